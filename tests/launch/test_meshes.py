# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a row or a layer train as one process does, and go on with each other's runs.

Four YAMLs stand for all: two ways of tensor parallelism, context and sequence parallelism. Those
over 8 ranks, other sizes and more kinds of weights are run by scripts/parity.py.
"""

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import llama
from components.chat_template import ChatTemplate
from launching import read_metrics
from proof.compare import compare, within
from proof.jobs import CUT, run_on_mesh
from proof.jobs import Run as Job
from proof.launch import launch
from tiny import makers

RANKS = {"tp": 2, "fsdp2_tp": 4, "fsdp2_cp": 4, "deepspeed_ulysses": 2}
PARTS_OF_ROWS = {"fsdp2_cp": 4, "deepspeed_ulysses": 2}
# 45 rows do not divide by 12: the last window of an epoch has batches with few rows or none
ROWS = "--num_train_rows 45 --num_test_rows 9".split()
STEPS = 6
FLAGS = (
    *f"--max_steps {STEPS} --save_steps 2 --save_total_limit 9".split(),
    *"--eval_strategy steps --eval_steps 2".split(),
)
# fp32 rounds at 6e-8; sums of another order, over other parts, differ by a few times that
BOUNDS = {"loss": 1e-6, "grad_norm": 1e-5, "learning_rate": 0.0, "weights": 1e-5}
EVALUATED = {"rel": 1e-6}


# ---- Runs that tests share ----
@pytest.fixture(scope="session")
def tiny_of_meshes(once):
    """The folder of the tiny model of the meshes' jobs, and of few rows."""
    maker, *shape = run_on_mesh("single", 1).maker
    return once("meshes", partial(makers.make, maker, words=[*shape, *ROWS]))


def job_of(config, weights="full", flags=()):
    """The job under a YAML, on as few ranks as show it."""
    if config == "fsdp2_full_shard":
        job = Job("meshes", config, 2, *CUT[2], weights)
    else:
        job = run_on_mesh(config, RANKS.get(config, 1), weights=weights)
    return replace(job, flags=(*FLAGS, *flags))


@pytest.fixture(scope="session")
def finished(once, tiny_of_meshes):
    """A function from a YAML, and a kind of weights, to the folder of its run."""

    def train(job, folder):
        code, output = launch(job, tiny_of_meshes, folder)
        assert code == 0, output[-3000:]

    def folder_of(config, weights="full", flags=()):
        job = job_of(config, weights, flags)
        return once(f"finished_{job.name}", partial(train, job))

    return folder_of


def go_on(config, tiny, folder, **options):
    """Continue the run in a folder under a YAML, and return what was printed."""
    code, output = launch(job_of(config, **options), tiny, folder)
    assert code == 0 and "Continuing from" in output, output[-3000:]
    return output


def take_over(run, folder, step):
    """Make a folder as the run was after this step."""
    shutil.copytree(run / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    shutil.copy(run / "metrics.jsonl", folder)


def assert_agrees(folder, whole):
    """The steps, evaluations and result of a run are those of another one."""
    found = compare(folder, whole)
    assert within(found, BOUNDS), found
    evaluations, expected = read_metrics(folder)[1], read_metrics(whole)[1]
    assert [line["step"] for line in evaluations] == [line["step"] for line in expected]
    for ours, theirs in zip(evaluations, expected, strict=True):
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], **EVALUATED)


# ---- Numbers ----
@pytest.mark.parametrize("config", RANKS)
def test_a_mesh_gives_the_numbers_of_one_process(config, finished):
    folder, whole = finished(config), finished("single")
    print({k: v for k, v in compare(folder, whole).items()})
    print([(a["eval_loss"], b["eval_loss"]) for a, b in zip(read_metrics(folder)[1], read_metrics(whole)[1])])
    assert_agrees(folder, whole)
    assert json.loads((folder / "report.json").read_text())["verdict"] == "ok"
    assert max(line["grad_norm"] for line in read_metrics(folder)[0]) > 0.5  # It was clipped


@pytest.mark.parametrize("config", PARTS_OF_ROWS)
def test_adapters_on_parts_of_rows_give_the_numbers_of_one_process(config, finished):
    assert_agrees(finished(config, "LoRA"), finished("single", "LoRA"))


@pytest.mark.parametrize("config", RANKS)
def test_a_run_that_continues_ends_bit_for_bit_as_if_it_had_not_stopped(
    config, finished, tiny_of_meshes, tmp_path
):
    whole = finished(config)
    folder = tmp_path / "run"
    take_over(whole, folder, 2)
    go_on(config, tiny_of_meshes, folder)
    for path in sorted(whole.rglob("*")):
        if path.is_file():
            other = folder / path.relative_to(whole)
            same = other.is_file() and path.read_bytes() == other.read_bytes()
            if not same: print("DIFFERS", path.relative_to(whole))
    for name in ("model.safetensors", f"checkpoint-{STEPS}/state.safetensors"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("config", RANKS)
def test_a_run_goes_on_where_only_weights_are_sharded_and_back_again(
    config, finished, tiny_of_meshes, tmp_path
):
    folder = tmp_path / "run"
    take_over(finished(config), folder, 2)
    print(go_on("fsdp2_full_shard", tiny_of_meshes, folder)[-5000:])
    back = tmp_path / "back"
    take_over(folder, back, 4)
    print(go_on(config, tiny_of_meshes, back)[-100:])
    assert_agrees(back, finished("single"))
