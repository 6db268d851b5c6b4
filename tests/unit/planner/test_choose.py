# SPDX-License-Identifier: Apache-2.0
"""The ways to run that the planner lists: their order, their groups, and which files are tried."""

import pytest

import llama
import planner_jobs
from core.cli import parse
from launching import CONFIGS
from planner import choose
from planner.answer import DOES_NOT_FIT, answer
from planner.request import GIB, Request

SHAPE = planner_jobs.BASE | {"width": 128, "depth": 1, "vocab": 1000}
EXPERTS = {"ep.yaml", "fsdp2_ep.yaml"}
MESHES = {path.name for path in CONFIGS.glob("*_[ct]p.yaml")} | {
    "tp.yaml",
    "deepspeed_ulysses.yaml",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    planner_jobs.config_of(SHAPE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def launch_of(model):
    """A function from words to the launch of the small model on a card that holds all."""

    def launch_of(words="", ranks=4, machines=None, card=8 * GIB):
        flags = words.split()
        request = Request(words=flags, num_processes=ranks, num_machines=machines)
        args = planner_jobs.training_arguments(model, flags)
        defaults = vars(parse(llama.Arguments, words=[]))
        return choose.Launch(request, llama, args, defaults, card)

    return launch_of


def ways(launch):
    """All ways: those of torch, then those of DeepSpeed."""
    return [*choose.ways_on(launch, False, []), *choose.ways_on(launch, True, [])]


def test_the_cheaper_comes_first_and_offload_last(launch_of):
    order = choose.ways_on(launch_of(), False, [])
    names = [(way.file, way.weights, way.plan.args.gradient_checkpointing) for way in order]
    cheaper = [
        ("ddp.yaml", "LoRA", False),
        ("fsdp2_shard_grad_op.yaml", "LoRA", False),
        ("fsdp.yaml", "LoRA", False),
        ("ddp.yaml", "LoRA, nf4", False),
        ("ddp.yaml", "LoRA, nf4 dq", False),
        ("ddp.yaml", "LoRA", True),
        ("ddp.yaml", "full", False),
        ("fsdp.yaml", "full", False),
        ("ddp.yaml", "full", True),
    ]
    assert [name for name in names if name in cheaper] == cheaper
    offloads = [way.offloads for way in order]
    assert offloads == sorted(offloads) and offloads[-1] > 0


def test_every_file_is_tried_but_those_of_fsdp1_of_a_mesh_and_of_other_recipes(launch_of):
    files = {path.name for path in CONFIGS.glob("*.yaml")}
    left_out = {file for file in files if file.startswith("fsdp1")}
    left_out |= {"single.yaml", "pp.yaml", "fsdp2_full_shard.yaml", *EXPERTS, *MESHES}
    assert {way.file for way in ways(launch_of("--gradient_checkpointing"))} == files - left_out


def test_enough_ways_that_fit_are_traced_and_one_of_each_kind_of_weights(launch_of):
    fitting, _ = choose.find_ways(launch_of())
    assert len(fitting) >= choose.SHOWN
    assert {way.weights for way in fitting} >= {"full", "LoRA", "LoRA, int8", "LoRA, nf4 dq"}


def test_where_nothing_fits_it_is_said_how_much_is_missing(model, capsys):
    assert answer(Request(str(model), ["--use_peft"], gpu="0.8GiB")) == DOES_NOT_FIT
    out = capsys.readouterr().out
    assert "0 of " in out and "LoRA, nf4: does not fit, at least " in out
    assert "accelerate launch" not in out
