# SPDX-License-Identifier: Apache-2.0
"""The ways to run that the planner lists: their order, and which files are tried."""

import pytest

import planner_jobs
from launching import CONFIGS
from planner.answer import answer, find_ways
from planner.plan import GIB, Request

SHAPE = planner_jobs.BASE | {"width": 128, "depth": 1, "vocab": 1000}
OF_OTHER_RECIPES = {"pp", "ep", "fsdp2_ep"}
LESS_THAN_OTHERS = {"fsdp2_full_shard", "deepspeed_zero0"}  # the same as fsdp, more than ddp


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    planner_jobs.config_of(SHAPE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ways(model):
    """All ways to run the small model on four cards that hold nothing, so that all are tried."""
    args = planner_jobs.training_arguments(model)
    return find_ways(Request(num_processes=4), args, 1)


def test_the_cheaper_comes_first_and_offload_last(ways):
    names = [(way.file, way.weights, way.plan.args.gradient_checkpointing) for way in ways]
    cheaper = [
        ("ddp", "LoRA", "no"),
        ("fsdp2_shard_grad_op", "LoRA", "no"),
        ("fsdp", "LoRA", "no"),
        ("ddp", "LoRA", "selective"),
        ("ddp", "LoRA, nf4", "no"),
        ("ddp", "LoRA", "full"),
        ("ddp", "full", "no"),
        ("fsdp", "full", "no"),
        ("ddp", "full", "selective"),
        ("ddp", "full", "full"),
    ]
    assert [name for name in names if name in cheaper] == cheaper
    offloads = [way.plan.offloads_optimizer for way in ways]
    assert offloads == sorted(offloads) and offloads[-1]


def test_every_file_is_tried_but_those_of_fsdp1_of_a_mesh_and_of_other_recipes(ways):
    files = {path.stem for path in CONFIGS.glob("*.yaml")}
    left_out = {file for file in files if file.startswith("fsdp1") or file.endswith(("tp", "cp"))}
    left_out |= {"single", "deepspeed_ulysses", *OF_OTHER_RECIPES, *LESS_THAN_OTHERS}
    assert {way.file for way in ways} == files - left_out


def test_what_fits_is_not_looked_for_under_deepspeed(model):
    args = planner_jobs.training_arguments(model)
    ways = find_ways(Request(num_processes=4), args, 8 * GIB)
    assert {way.weights for way in ways} == {"full", "LoRA", "LoRA, nf4"}
    assert not any(way.file.startswith("deepspeed") for way in ways)


def test_where_nothing_fits_it_is_said_how_much_is_missing(model):
    _, text, fits = answer(Request(str(model), ["--use_peft"], gpu="0.8GiB"))
    assert not fits
    assert "0 of " in text and "LoRA, nf4: does not fit, at least " in text
    assert "accelerate launch" not in text
