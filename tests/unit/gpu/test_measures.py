# SPDX-License-Identifier: Apache-2.0
"""Figures of the GPU proof: constants of the planner, speeds beside bare loops, parts of a save."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from bench import machine
from gpu import plans, saves, side_by_side
from gpu.cell import Setup
from launching import REPO

GIB = 2**30


# ---- The planner's constants ----


def runs_with(rounding, context, number=8):
    """Runs that take exactly what these constants say."""
    runs = []
    for i in range(1, number + 1):
        tensors = i * GIB
        reserved = tensors * (1 + rounding)
        run = {"planned tensors": tensors, "allocated": tensors}
        runs.append(run | {"reserved": reserved, "process": reserved + context})
    return runs


def test_constants_are_found_again_and_the_error_is_that_of_the_other_half():
    outcome = plans.judge(runs_with(0.03, GIB // 2))
    found = {row["what"]: row["value"] for row in outcome.rows}
    assert outcome.ok
    assert found["rounding, fitted"] == 0.03
    assert found["context, GiB, fitted"] == 0.5
    assert found["runs fitted"] == found["runs held out"] == 4
    assert abs(found["furthest below, held out"]) < 1e-3


def test_a_plan_that_is_too_low_on_held_out_runs_is_not_ok():
    runs = runs_with(0.03, GIB // 2)
    runs[1]["process"] *= 1.05  # held out: out of memory
    assert not plans.judge(runs).ok
    runs = runs_with(0.03, GIB // 2)
    runs[0]["process"] *= 1.05  # fitted: the median does not see it
    assert plans.judge(runs).ok


# ---- Speed ----


def row(what, result="trained", difference=0.0, times=1.0):
    return {
        "what": what,
        "result": result,
        "loss differs by": difference,
        "times the recipe's step": times,
    }


OURS = row("this recipe")
OUT_OF_MEMORY = row("plain PyTorch loop", "exit code 1")
ANOTHER_CURVE = row("plain loop without unneeded logits", difference=0.02)  # nats


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            [OURS, row("plain loop without unneeded logits"), row("plain PyTorch loop", times=1.2)],
            True,
        ),
        ([row("this recipe", "exit code 1")], False),
        ([OURS, ANOTHER_CURVE], False),
        (
            [OURS, row("plain loop without unneeded logits", times=0.9)],
            False,
        ),  # the recipe is 11 % slower
        ([OURS, OUT_OF_MEMORY, row("plain loop without unneeded logits")], True),
        (
            [OURS, row("SFTTrainer", difference=0.5), row("plain loop without unneeded logits")],
            True,
        ),  # shown, but the loops decide
        ([OURS, row("plain loop without unneeded logits", "no time left")], None),
        ([OURS], None),
    ],
)
def test_a_speed_counts_beside_bare_loops_with_the_same_losses(rows, expected):
    setup = Setup("cuda", False, Path(), Path(), 0.0)
    assert side_by_side.verdict(rows, lambda ours: True, setup) is expected
    assert side_by_side.verdict(rows, lambda ours: False, setup) is False


def test_a_plan_takes_the_pieces_of_the_loss_that_the_recipe_chooses_on_the_gpu(
    tmp_path, monkeypatch
):
    """On a GPU they grow with its memory, so that plans of a CPU were 35 % too low on an H200."""
    config = LlamaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=100_000)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    flags = {"model_name_or_path": tmp_path, "dataset_name": "rows.jsonl", "output_dir": "run"}
    flags |= {"per_device_train_batch_size": 4, "max_length": 4096}
    logits = 4 * 4095 * 100_000  # elements: 6 GiB in fp32

    def planned(memory_mib, **more):
        monkeypatch.setattr(machine, "gpu_facts", lambda: {"memory_mib": memory_mib})
        setup = Setup("cuda", False, Path(), Path(), 0.0)
        return plans.planned_tensors(setup, flags | more, 4 * 4095)

    assert planned(1024 * 640) - planned(1024 * 24) > 4 * logits
    assert planned(1024 * 640, max_logits_mib=256) == planned(1024 * 24, max_logits_mib=256)


def test_published_figures_are_bounds_of_the_recipe():
    assert side_by_side.fast_enough_lora({"tokens/s": 9_000})
    assert not side_by_side.fast_enough_lora({"tokens/s": 8_000})
    assert side_by_side.fast_enough_full({"MFU": 0.5})
    assert not side_by_side.fast_enough_full({"MFU": 0.4})
    assert side_by_side.fast_enough_full({}) is None  # a card whose peak is not known
    assert side_by_side.small_enough_qlora({"allocated, GiB": 7.4})
    assert not side_by_side.small_enough_qlora({"allocated, GiB": 9.0})


# ---- Saves ----

PART = """
import time


def gather():
    time.sleep(0.05)
"""
RUN = """
import time

from components import state

time.sleep(0.3)
state.gather()
"""


def test_the_parts_of_a_save_are_files_of_the_recipes():
    for name in saves.PARTS:
        assert (REPO / "recipes" / "components" / name).is_file()


def test_the_parts_of_a_save_count_what_the_save_calls_and_not_the_rest(tmp_path):
    (tmp_path / "components").mkdir()
    (tmp_path / "components" / "state.py").write_text(PART)
    script = tmp_path / "run.py"
    script.write_text(RUN)
    profile = tmp_path / "profile.bin"
    subprocess.run([sys.executable, "-m", "cProfile", "-o", profile, script], check=True)
    found = {row["function"]: row for row in saves.profile_rows(profile)}
    slept = next(row for name, row in found.items() if "sleep" in name)
    assert slept["calls"] == 1
    assert 0.05 <= slept["seconds"] < 0.3
    assert found["state.py: gather"]["seconds"] >= 0.05
