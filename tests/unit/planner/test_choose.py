# SPDX-License-Identifier: Apache-2.0
"""The ways to run that the planner lists: their order, their groups, and which files are tried."""

import pytest

import llama
import planner_jobs
from core.cli import parse
from launching import CONFIGS
from planner import choose
from planner.choose import KINDS
from planner.request import GIB, Request

SHAPE = planner_jobs.BASE | {"width": 128, "depth": 1, "vocab": 1000}
EXPERTS = {"ep.yaml", "fsdp2_ep.yaml"}


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
    """All ways, in their order within each kind."""
    return [way for kind in KINDS for way in choose.ways_on(launch, kind, [])]


def test_the_cheaper_comes_first_and_offload_last(launch_of):
    order = choose.ways_on(launch_of(), KINDS[0], [])
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


def test_int8_is_never_listed_with_fsdp_and_no_file_twice(launch_of):
    found = ways(launch_of())
    int8 = {way.file for way in found if "int8" in way.weights}
    assert "ddp.yaml" in int8 and not [file for file in int8 if "fsdp" in file]
    assert {"fsdp.yaml", "fsdp2_full_shard.yaml"} & {way.file for way in found} == {"fsdp.yaml"}


def test_every_file_is_tried_but_those_of_fsdp1_and_of_other_recipes(launch_of):
    files = {path.name for path in CONFIGS.glob("*.yaml")}
    left_out = {file for file in files if file.startswith("fsdp1")}
    left_out |= {"single.yaml", "pp.yaml", "fsdp2_full_shard.yaml", *EXPERTS}
    launch = launch_of("--gradient_checkpointing", 8, 2)
    on_one_machine = launch_of("--gradient_checkpointing", 4)
    tried = {way.file for way in [*ways(launch), *ways(on_one_machine)]}
    assert tried == files - left_out


SIZES = [  # (ranks, machines, names of the ways under which ranks share rows)
    (1, None, set()),
    (
        4,
        None,
        "tp CP1 SP1 TP4, fsdp2_tp CP1 SP1 TP2, fsdp2_cp CP2 SP1 TP1, fsdp2_cp CP4 SP1 TP1, "
        "deepspeed_ulysses CP1 SP2 TP1, deepspeed_ulysses CP1 SP4 TP1",
    ),
]


@pytest.mark.parametrize("ranks, machines, names", SIZES)
def test_each_mesh_that_the_ranks_and_the_heads_allow_is_there(launch_of, ranks, machines, names):
    launch = launch_of("--gradient_checkpointing", ranks, machines)
    found = choose.ways_on(launch, "sharing", [])
    shared = set()
    for way in found:
        plan = way.plan
        shared.add(f"{way.file[:-5]} CP{plan.cp} SP{plan.sp} TP{plan.tp}")
    assert shared == set(names.split(", ") if names else ())


def test_what_a_mesh_refuses_is_not_there(launch_of):
    for way in choose.ways_on(launch_of("--packing"), "sharing", []):
        assert way.plan.cp == 1
        assert way.plan.tp == 1 or way.weights in ("full", "LoRA")


def test_whole_modules_are_in_every_way_beside_adapters(launch_of):
    words = "--use_peft --modules_to_save lm_head embed_tokens"
    found = choose.ways_on(launch_of(words), KINDS[0], [])
    assert {way.weights for way in found} == {"LoRA", "LoRA, int8", "LoRA, nf4", "LoRA, nf4 dq"}
    for way in found:
        assert way.plan.args.modules_to_save == ["lm_head", "embed_tokens"]


def test_enough_ways_that_fit_are_traced_and_one_of_each_kind_of_weights(launch_of):
    fitting, _ = choose.find_ways(launch_of())
    assert len(fitting) >= choose.SHOWN
    assert {way.weights for way in fitting} >= {"full", "LoRA", "LoRA, int8", "LoRA, nf4 dq"}


def test_long_rows_that_fit_no_single_gpu_are_shared(launch_of):
    words = "--max_length 32768 --per_device_train_batch_size 1 --use_peft"
    launch = launch_of(words, 4)
    alone = choose.trace_until_enough(launch, choose.ways_on(launch, KINDS[0], []), [])
    tight = int(0.9 * min(way.peak for way in alone))
    fitting, _ = choose.find_ways(launch_of(words, 4, card=tight))
    assert any(way.plan.copies > 1 for way in fitting)


def test_double_quantization_changes_only_the_scales(launch_of):
    found = choose.ways_on(launch_of("--gradient_checkpointing"), KINDS[0], [])
    launch = launch_of()
    plain, double = (
        choose.traced(launch, next(way for way in found if way.weights == weights))
        for weights in ("LoRA, nf4", "LoRA, nf4 dq")
    )
    assert double.held.device["quantization"] < plain.held.device["quantization"]
    assert double.held.device["activations"] == plain.held.device["activations"]
