# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a layer or a row draw the same dropout where one process draws once, only there.

The numbers of meshes are in test_cells.py, stopped runs in test_chains.py.
"""

import json
import shutil

import pytest
from transformers import AutoConfig

import net
from launching import RECIPE, REPO, rehearse
from net import Cell

ADAPTERS = ["--use_peft", "--lora_dropout", "0.1"]


def draws_of_dropout(config, ranks, tiny, model, folder, *flags):
    """What each rank drew for dropout in each of two steps, as digests."""
    data = net.data_of(tiny)
    data[data.index("--model_name_or_path") + 1] = model
    words = [*data, "--max_steps", 2, "--save_steps", 0, "--output_dir", folder / "run"]
    script = REPO / "tests" / "record_dropout.py"
    words = [folder / "draws", RECIPE, *words, *ADAPTERS, *flags]
    done = rehearse(config, *words, num_processes=ranks, script=script)
    assert done.returncode == 0, done.output[-3000:]
    files = [folder / f"draws.{rank}" for rank in range(ranks)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def assert_different(steps):
    """Each step has draws, and no two of them are the same."""
    assert all(steps)
    digests = [digest for step in steps for digest in step]
    assert len(digests) == len(set(digests))


def test_ranks_that_share_matrices_drop_the_same_and_others_something_else(net_tiny, tmp_path):
    tiny = net_tiny("llama")
    model = shutil.copytree(tiny / "model", tmp_path / "model")
    config = AutoConfig.from_pretrained(model)
    config.attention_dropout = 0.1
    config.save_pretrained(model)
    eager = ["--attn_implementation", "eager"]  # sdpa draws in its kernel
    draws = draws_of_dropout("fsdp2_tp", 4, tiny, model, tmp_path, *eager)
    assert draws[0] == draws[1] and draws[2] == draws[3]
    assert_different([*draws[0], *draws[2]])


@pytest.mark.parametrize(("config", "ranks"), [("fsdp2_cp", 4), ("deepspeed_ulysses", 2)])
def test_ranks_with_different_tokens_drop_something_else(config, ranks, net_tiny, tmp_path):
    tiny = net_tiny("llama")
    draws = draws_of_dropout(config, ranks, tiny, tiny / "model", tmp_path)
    assert_different([step for rank in draws for step in rank])


def test_a_classifier_on_a_split_model_gives_the_numbers_of_one_process(net_tiny, tmp_path):
    """bert.py trains a decoder, since tensor parallelism needs a plan, which BERT has not."""
    shutil.copytree(net_tiny("llama") / "model", tmp_path / "tiny" / "model")
    shutil.copytree(net_tiny("bert") / "data", tmp_path / "tiny" / "data")
    losses = []
    for cell in (Cell(recipe="bert"), Cell("tp", recipe="bert", ranks=2, sharing=2)):
        done = net.launch(cell, tmp_path / "tiny", tmp_path / cell.config).expect(0)
        losses.append([line["loss"] for line in net.metrics(done.folder) if "loss" in line])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # As the bound of golden figures
