# SPDX-License-Identifier: Apache-2.0
"""The folder at the end is the model of the best evaluation, under every way to hold its state.

Each job calls the largest loss the best, which the first evaluation has: so the best model is
neither the last nor the newest checkpoint.
"""

import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file

from components.checkpoint import read_state
from launching import REPO, recipe, rehearse, run
from proof.jobs import MAKERS
from proof.launch import data_of

JOB = [
    *["--max_steps", "6", "--eval_strategy", "steps", "--eval_steps", "2", "--learning_rate"],
    *["1e-3", "--load_best_model_at_end", "--greater_is_better", "true", "--save_total_limit", "1"],
]


def words(tiny, folder):
    data = tiny / "data"
    return [
        *["--model_name_or_path", tiny / "model", "--dataset_name", data / "train.jsonl"],
        *["--eval_dataset_name", data / "test.jsonl", "--output_dir", folder, *JOB],
    ]


def check_best_is_saved(folder):
    """The result has the weights of checkpoint-2, which is there beside the newest."""
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-6",
    ]
    saved = load_file(folder / "model.safetensors")
    best = read_state(folder / "checkpoint-2")
    last = read_state(folder / "checkpoint-6")
    for name, weight in saved.items():
        assert torch.equal(weight, best[name]), name
    assert any(not torch.equal(weight, last[name]) for name, weight in saved.items())


# What an evaluation leaves whole differs between these (state.py, free_whole_weights)
@pytest.mark.parametrize(
    "config", ["fsdp1_shard_grad_op", "fsdp2_shard_grad_op", "fsdp2_full_shard", "deepspeed_zero3"]
)
def test_the_best_model_is_saved_under(config, tiny, tmp_path):
    done = rehearse(config, *words(tiny, tmp_path / "run"), num_processes=2)
    assert done.returncode == 0, done.output[-4000:]
    check_best_is_saved(tmp_path / "run")


def test_a_resumed_run_knows_the_best_of_before(tiny, tmp_path):
    folder = tmp_path / "run"
    done = recipe(*words(tiny, folder))
    assert done.returncode == 0 and "after step 2, whose model is saved" in done.output
    check_best_is_saved(folder)
    first = load_file(folder / "model.safetensors")

    for name in ("checkpoint-6", "model.safetensors"):  # as if it had been killed after step 2
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = recipe(*words(tiny, folder))
    assert done.returncode == 0 and "Continuing from" in done.output, done.output[-4000:]
    check_best_is_saved(folder)
    again = load_file(folder / "model.safetensors")
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())


@pytest.mark.parametrize("recipe_name", MAKERS)
def test_without_rows_to_evaluate_on_it_is_refused_before_the_model_is_loaded(
    recipe_name, tiny_of, tmp_path
):
    words = data_of(tiny_of(recipe_name))
    without_eval = words[: words.index("--eval_dataset_name")]
    script = REPO / "recipes" / f"{recipe_name}.py"
    flags = ["--load_best_model_at_end", "--max_steps", "2", "--output_dir", tmp_path / "run"]
    done = run(sys.executable, script, *without_eval, *flags)
    assert done.returncode == 64, done.output[-3000:]
    held_out = "--num_eval_documents" if recipe_name == "mistral_pretrain" else "--eval_split"
    assert (
        "--load_best_model_at_end needs rows to evaluate on: pass --eval_dataset_name, "
        f"{held_out}, or a --dataset_test_split that the data set has"
    ) in done.output
    assert "Loading weights" not in done.output
