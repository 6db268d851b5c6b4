# SPDX-License-Identifier: Apache-2.0
"""Faults that a reader found in drafts of this code, each held as what has to happen instead."""

import shutil

from transformers import Dinov2Config, Dinov2ForImageClassification

import net
from launching import read_json, recipe, write_rows
from net import Cell

LORA = Cell(weights="LoRA")


def test_a_data_set_without_a_row_left_is_refused_in_a_mixture(net_tiny, tmp_path):
    """And its share is not taken from the rows of another one."""
    row = {"prompt": "1 + 1?", "completion": "2"}
    paths = []
    for name, number in (("one", 1), ("many", 40)):
        rows = [row | {"prompt": f"{number} + 1?"} for number in range(number)]
        paths.append(write_rows(tmp_path / f"{name}.jsonl", rows))
    words = ["--model_name_or_path", net_tiny("llama") / "model", "--dry_run"]
    words += ["--dataset_name", *paths, "--dataset_weights", "1", "1", "--output_dir", tmp_path]
    # All but two rows are held out, so that this one is too
    assert "one.jsonl" in recipe(*words, "--eval_split", 39, code=65).output


def test_a_state_that_could_not_be_read_back_is_refused_at_the_start(net_tiny, tmp_path):
    """8-bit optimizers scale blocks of numbers, which begin where a rank's part does."""
    cell = Cell("fsdp1_full_shard", ranks=2, flags=("--optim", "adamw_8bit"))
    done = net.launch(cell, net_tiny("llama"), tmp_path / "run")
    assert done.code not in (0, 75) and "weight's shape" in done.output, done.output[-3000:]
    assert [line["step"] for line in net.figures(done.folder)] == [1]


def test_a_run_with_a_weight_that_no_gradient_reaches_goes_on(net_tiny, tmp_path):
    """DINOv2 has a token for masked patches, which classifying images never uses."""
    tiny = tmp_path / "tiny"
    shutil.copytree(net_tiny("vit"), tiny)
    config = read_json(tiny / "model" / "config.json")
    kept = ("hidden_size", "num_attention_heads", "num_hidden_layers", "image_size", "patch_size")
    model = Dinov2ForImageClassification(Dinov2Config(**{key: config[key] for key in kept}))
    model.save_pretrained(tiny / "model")
    cell = Cell(recipe="vit")
    whole = net.launch(cell, tiny, tmp_path / "whole").expect(0)
    stop = {"at": "forward 14", "do": "SIGTERM"}
    net.launch(cell, tiny, tmp_path / "run", inject=stop).expect(75)
    done = net.launch(cell, tiny, tmp_path / "run").expect(0)
    assert net.figures(done.folder) == net.figures(whole.folder)
