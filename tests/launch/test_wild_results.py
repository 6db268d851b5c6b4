# SPDX-License-Identifier: Apache-2.0
"""What public reports say of results that differ from their base, and of runs that differ unsaid.

evidence/wild.md has the reports.
"""

import json
import shutil
import sys

import pytest
import torch
from transformers import MobileViTConfig, MobileViTForImageClassification, ViTImageProcessor

from launching import REPO, read_json, read_metrics, run

RECIPES = ("llama", "llama_dpo", "mistral_pretrain", "mixtral", "bert", "bert_ner", "t5")
# transformers notes how a tokenizer was found, not what it is
OF_THIS_LOAD = ("is_local", "local_files_only")


def train(recipe, *arguments, **options):
    script = REPO / "recipes" / f"{recipe}.py"
    return run(sys.executable, script, "--max_steps", 1, "--save_steps", 0, *arguments, **options)


def settings_of(folder):
    """What the files of a tokenizer say, without its vocabulary."""
    settings = read_json(folder / "tokenizer_config.json")
    for name in OF_THIS_LOAD:
        settings.pop(name, None)
    whole = read_json(folder / "tokenizer.json")
    return settings, whole["truncation"], whole["padding"]


def padding_on(side, model, folder):
    """A copy of a model whose tokenizer pads on a side."""
    shutil.copytree(model, folder)
    settings = read_json(folder / "tokenizer_config.json") | {"padding_side": side}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_tokenizer_of_a_result_is_set_as_that_of_its_base(recipe, tiny_of, tmp_path):
    """Training pads on the right and cuts rows to --max_length. What serves the model must not."""
    base = padding_on("left", tiny_of(recipe) / "model", tmp_path / "base")
    rows = tiny_of(recipe) / "data" / "test.jsonl"
    source = ["--model_name_or_path", base, "--dataset_name", rows]
    done = train(recipe, *source, "--output_dir", tmp_path / "out")
    assert done.returncode == 0, done.output[-3000:]
    assert settings_of(tmp_path / "out") == settings_of(base)


def test_the_side_of_padding_changes_no_loss(tiny_of, tmp_path):
    losses = []
    for side in ("left", "right"):
        base = padding_on(side, tiny_of("bert") / "model", tmp_path / side)
        rows = tiny_of("bert") / "data" / "test.jsonl"
        out = tmp_path / f"out_{side}"
        source = ["--model_name_or_path", base, "--dataset_name", rows]
        done = train("bert", *source, "--output_dir", out)
        assert done.returncode == 0, done.output[-3000:]
        steps, _ = read_metrics(out)
        losses.append(steps[0]["loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["train.tsv", "rows.jsonl.gz", "ROWS.JSON", "rows"])
def test_a_file_that_is_there_is_never_looked_for_on_the_hub(name, tiny, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text("prompt\tcompletion\n1\t2\n")
    source = ["--model_name_or_path", tiny / "model", "--dataset_name", f"data/{name}"]
    done = train("llama", *source, "--output_dir", "out", "--dry_run", cwd=tmp_path)
    assert done.returncode == 65, done.output[-3000:]
    assert f"data/{name}" in done.output.splitlines()[-1]


def test_running_statistics_move_once_a_step_or_the_run_is_refused(tiny_of, tmp_path):
    """Recomputed layers run twice, and BatchNorm would count each batch twice."""
    torch.manual_seed(0)
    config = MobileViTConfig(
        image_size=32,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64],
        num_attention_heads=2,
        expand_ratio=2.0,
    )
    MobileViTForImageClassification(config).save_pretrained(tmp_path / "base")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "base")
    rows = tiny_of("vit") / "data"
    source = ["--model_name_or_path", tmp_path / "base", "--dataset_name", rows]
    source += ["--gradient_checkpointing", "--eval_strategy", "no"]
    done = train("vit", *source, "--output_dir", tmp_path / "whole")
    assert done.returncode == 64, done.output[-3000:]
    assert "--gradient_checkpointing" in done.output.splitlines()[-1]
