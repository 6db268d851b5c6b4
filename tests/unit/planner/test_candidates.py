# SPDX-License-Identifier: Apache-2.0
"""The ways to run that the planner lists: their order, their groups, and which files are tried."""

import functools

import pytest

from launching import REPO
from planner import candidates, commands, recipe, yaml_files
from planner.cards import GIB
from planner.request import Request
from planner_jobs import BASE, config_of, mixture_of, training_arguments

EXPERTS = {"ep", "fsdp2_ep"}  # YAMLs under which ranks share experts
# One layer: hundreds of plans are made in each test, and more layers would be more of the same
SMALL_SHAPE = BASE | {"width": 128, "depth": 1, "vocab": 1000}
SMALL = config_of(SMALL_SHAPE)
# The activations of a long row take more than its weights
LONG = config_of(BASE | {"width": 256, "depth": 6, "vocab": 1000})


@functools.cache
def listed(words, ranks, machines=None):
    """The ways to run the small model on a card that holds all, in their order."""
    flags = words.split()
    request = Request(words=flags, num_processes=ranks, num_machines=machines)
    args = training_arguments(flags)
    launch = candidates.launch_of(request, args, SMALL, 8 * GIB)
    return candidates.ways_on(launch, ranks)


def test_the_cheaper_comes_first_and_offload_last():
    ways = listed("", 4)
    order = [(way.file, way.weights, way.checkpoints) for way in ways]
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
    assert order[0] == cheaper[0]
    assert [way for way in order if way in cheaper] == cheaper
    on_gpu = [way for way in ways if "offload" not in way.file]
    assert on_gpu == ways[: len(on_gpu)]
    costs = [way.cost for way in on_gpu]
    assert costs == sorted(costs)
    for way in ways[len(on_gpu) :]:
        assert "on the host" in way.reasons[0]
        assert way.host


def test_int8_is_never_listed_with_fsdp_and_no_file_twice():
    ways = listed("", 4)
    int8 = {way.file for way in ways if "int8" in way.weights}
    assert "ddp.yaml" in int8
    assert not [file for file in int8 if "fsdp" in file]
    assert {"fsdp.yaml", "fsdp2_full_shard.yaml"} & {way.file for way in ways} == {"fsdp.yaml"}


def test_whole_modules_are_in_every_way_beside_adapters():
    ways = listed("--use_peft --modules_to_save lm_head embed_tokens", 4)
    plain = {(way.file, way.weights, way.checkpoints): way for way in listed("", 4)}
    assert {way.weights for way in ways} == {"LoRA", "LoRA, int8", "LoRA, nf4", "LoRA, nf4 dq"}
    for way in ways:
        assert way.plan.args.modules_to_save == ["lm_head", "embed_tokens"]
        everything = way.device.get("whole modules", 0) + way.host.get("whole modules", 0)
        assert everything > 0
        assert way.peak > plain[way.file, way.weights, way.checkpoints].peak


GROUPS = [
    (1, None, set()),
    (3, None, set()),
    (4, 2, {"fsdp1", "fsdp2"}),
    (4, 4, {"fsdp2"}),
]


@pytest.mark.parametrize("ranks, machines, versions", GROUPS)
def test_groups_are_listed_where_they_can_be_formed(ranks, machines, versions):
    files = {way.file for way in listed("--gradient_checkpointing", ranks, machines)}
    assert {file[:5] for file in files if "hybrid" in file} == versions
    assert ("single.yaml" in files) == (ranks == 1)
    assert ("ddp.yaml" in files) == (ranks > 1)


def test_every_file_is_tried():
    """A new YAML too, but one of those that mean the same."""
    files = {path.name for path in (REPO / "accelerate_configs").glob("*.yaml")}
    tried = {path.name for path in [*yaml_files.shipped_files(), *yaml_files.mesh_files()]}
    assert {path.stem for path in yaml_files.expert_files()} == EXPERTS
    for_other_recipes = {"pp.yaml", *(f"{name}.yaml" for name in EXPERTS)}
    assert tried == files - {"fsdp2_full_shard.yaml"} - for_other_recipes


SIZES = [  # (ranks, machines, names of the ways under which ranks share rows)
    (1, None, set()),
    (
        4,
        None,
        {
            "tp, TP 4",
            "fsdp2_tp, TP 2",
            "fsdp2_cp, CP 2",
            "fsdp2_cp, CP 4",
            "deepspeed_ulysses, SP 2",
            "deepspeed_ulysses, SP 4",
        },
    ),
    (
        8,
        2,
        {
            "fsdp2_tp, TP 2",
            "fsdp2_tp, TP 4",
            "hsdp_tp, TP 2",
            "fsdp2_cp, CP 2",
            "fsdp2_cp, CP 4",
            "hsdp_cp, CP 2",
            "hsdp_cp, CP 4",
            "deepspeed_ulysses, SP 2",
            "deepspeed_ulysses, SP 4",
        },
    ),
]


@pytest.mark.parametrize("ranks, machines, names", SIZES)
def test_each_mesh_that_the_ranks_and_the_heads_allow_is_listed(ranks, machines, names):
    ways = listed("--gradient_checkpointing", ranks, machines)
    shared = [way for way in ways if way.plan.copies > 1]
    assert {way.name for way in shared} == names


def test_what_a_mesh_refuses_is_not_listed():
    ways = listed("--packing", 4)
    ulysses = {"deepspeed_ulysses, SP 2", "deepspeed_ulysses, SP 4"}
    shared = {way.name for way in ways if way.plan.copies > 1}
    assert shared == {"tp, TP 4", "fsdp2_tp, TP 2", *ulysses}  # no context parallelism
    for way in ways:
        assert way.plan.tp == 1 or way.weights in ("full", "LoRA")


def ways_of_mixture(words, ranks):
    request = Request(model="recipes/mixtral.py", words=words.split(), num_processes=ranks)
    args = recipe.parse_words(request.words, request.recipe)
    launch = candidates.launch_of(request, args, mixture_of(SMALL_SHAPE), 8 * GIB)
    return launch, candidates.ways_on(launch, ranks)


def test_a_mixture_is_also_spread_by_its_experts():
    launch, ways = ways_of_mixture("--gradient_checkpointing --eval_strategy no", 4)
    spread = [way for way in ways if way.plan.ep > 1]
    names = {"ep, EP 2", "ep, EP 4", "fsdp2_ep, EP 2", "fsdp2_ep, EP 4"}
    assert {way.name for way in spread} == names
    assert {way.weights for way in ways} == {"full", "LoRA"}
    words = commands.command(launch, next(way for way in spread if way.weights == "LoRA"))
    assert words[words.index("--ep_size") + 1] in ("2", "4")
    assert {"recipes/mixtral.py", "--use_peft", "--lora_target_parameters"} <= set(words)


def test_the_groups_of_experts_that_a_user_names_are_the_only_ones():
    _, ways = ways_of_mixture("--gradient_checkpointing --eval_strategy no --ep_size 2", 4)
    assert {way.name for way in ways} == {"ep, EP 2", "fsdp2_ep, EP 2"}


def test_long_rows_that_fit_no_single_gpu_are_shared():
    flags = "--max_length 16384 --per_device_train_batch_size 1 --eval_strategy no"
    request = Request(words=flags.split(), num_processes=4)
    args = training_arguments(request.words)
    card = int(2.2 * GIB)
    launch = candidates.launch_of(request, args, LONG, card)
    fitting = candidates.fitting_among(launch, candidates.ways_on(launch, 4))
    on_gpu = [way for way in fitting if not way.checkpoints]
    assert all(way.plan.copies > 1 for way in on_gpu)
    assert {way.plan.cp for way in on_gpu} >= {2, 4}
    assert {way.weights for way in on_gpu} >= {"full", "LoRA"}


def ways_for_long_rows(words=""):
    """The launch, and the ways under sequence parallelism, whose evaluation takes whole rows."""
    flags = f"--max_length 4096 --per_device_train_batch_size 1 {words}".split()
    request = Request(words=flags, num_processes=2)
    args = recipe.parse_words(flags)
    launch = candidates.launch_of(request, args, SMALL, 8 * GIB)
    ways = candidates.ways_on(launch, 2)
    return launch, [way for way in ways if way.plan.sp == 2 and way.weights == "full"]


def test_evaluation_in_large_batches_rules_no_way_out():
    """The command of a way that needs smaller ones says so."""
    launch, ways = ways_for_long_rows()
    _, as_given = ways_for_long_rows("--per_device_eval_batch_size 8")
    for light, heavy in zip(ways, as_given, strict=True):
        assert light.peak < heavy.peak
        shown = candidates.with_usual_evaluation(launch, light)
        words = commands.command(launch, shown)
        assert words[words.index("--per_device_eval_batch_size") + 1] == "1"


def test_a_way_evaluates_as_the_recipe_does_where_that_takes_no_more():
    launch, _ = ways_of_mixture("", 2)
    ways = candidates.ways_on(launch, 2)
    shown = candidates.with_usual_evaluation(launch, ways[0])
    assert shown.peak == ways[0].peak
    assert "--per_device_eval_batch_size" not in commands.command(launch, shown)
