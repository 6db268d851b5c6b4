# SPDX-License-Identifier: Apache-2.0
"""The fix that a refusal names works: whoever follows it is not refused again."""

import dataclasses
import itertools
import math
import re
from argparse import Namespace

import pytest
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType
from transformers import LlamaConfig

import llama_pipeline
from components import config_rules
from components.cli import parse_arguments
from components.config_findings import STOPS
from components.config_strategy import MESH_KINDS
from components.expert_checks import find_indivisible_numbers
from components.mesh import Mesh
from components.mesh_checks import find_misfits_of_config
from components.pipeline_checks import find_misfits_of_size
from components.pipeline_kinds import KINDS

LAUNCH = re.compile(r"(?:launch|pass --num_processes) (\d+)")
SIZE = re.compile(r"set (?:parallelism_config_)?(\w+)_size to (\d+)|and (\w+)_size to (\d+)")
FLAG = re.compile(r"--(\w+) ([\w.]+)")


def ways_of(cure):
    """The ways that a cure names, each of which has to be enough."""
    return cure.split(", or ")


def with_sizes(way, sizes):
    """The sizes of a mesh that a way sets."""
    found = {
        first or second: int(value or other) for first, value, second, other in SIZE.findall(way)
    }
    return sizes | found


def launched_by(way, processes):
    """The number of processes that a way launches."""
    found = LAUNCH.search(way)
    return int(found[1]) if found else processes


# ---- Meshes ----
ENGINES = {
    "FSDP": {"fsdp_config": {"fsdp_version": 2, "fsdp_cpu_ram_efficient_loading": False}},
    "MULTI_GPU": {},
    "DEEPSPEED": {"deepspeed_config": {"zero_stage": 2}},
}
SIZES = [
    dict(zip(MESH_KINDS, sizes, strict=True))
    for sizes in itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2))
]


def refusals(engine, sizes, processes):
    """The fixes of what stops, of a file with a mesh."""
    mesh = {f"parallelism_config_{kind}_size": size for kind, size in sizes.items()}
    content = {"distributed_type": engine, "num_processes": processes} | ENGINES[engine]
    findings, _ = config_rules.check(content | {"parallelism_config": mesh})
    return {item.dotted_path: item.fix for item in findings if item.kind == STOPS}


def accelerate_takes(engine, sizes, processes):
    """Whether accelerate takes a mesh for so many processes."""
    accelerator = Namespace(
        multi_device=engine == "MULTI_GPU",
        num_processes=processes,
        is_fsdp2=engine == "FSDP",
        distributed_type=DistributedType(engine),
        is_main_process=False,
    )
    try:
        config = ParallelismConfig(**{f"{kind}_size": size for kind, size in sizes.items()})
        config._validate_accelerator(accelerator)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("engine", ENGINES)
def test_a_mesh_that_is_changed_as_told_is_taken_by_the_rules_and_by_accelerate(engine):
    followed = 0
    for sizes, processes in itertools.product(SIZES, range(1, 17)):
        fixes = refusals(engine, sizes, processes)
        fix = fixes.get("parallelism_config", "")
        if len(fixes) > 1 or not (LAUNCH.search(fix) or SIZE.search(fix)):
            continue  # other findings, which come first, have fixes of their own
        for way in ways_of(fix):
            if "fsdp2_tp.yaml" in way:
                group = processes // sizes["tp"]
                assert f"dp_shard_size {group}" in way
                assert not refusals("FSDP", sizes | {"dp_shard": group}, processes)
                continue
            others = with_sizes(way, sizes)
            number = launched_by(way, processes)
            assert not refusals(engine, others, number), (sizes, processes, way)
            assert accelerate_takes(engine, others, number), (sizes, processes, way)
            followed += 1
    print(f"{engine}: {followed} fixes were followed")
    assert followed > 50


# ---- What a model forbids ----
HEADS = [(4, 4), (4, 2), (4, 1), (6, 3), (6, 2), (8, 8), (5, 5)]


@pytest.mark.parametrize("kind", ["tp", "sp"])
def test_a_size_that_fits_the_heads_of_a_model_comes_with_a_mesh_for_the_same_ranks(kind):
    followed = 0
    for heads, shards, size in itertools.product(HEADS, (1, 2, 3), (2, 3, 4, 6)):
        config = LlamaConfig(
            hidden_size=heads[0] * 8, num_attention_heads=heads[0], num_key_value_heads=heads[1]
        )
        mesh = Mesh(dp_shard=shards, **{kind: size})
        for problem in find_misfits_of_config(config, mesh):
            way = ways_of(problem.rpartition(": ")[2])[0]
            if way == "leave out parallelism_config":
                continue
            sizes = with_sizes(way, {"dp_shard": shards, kind: size})
            assert not list(find_misfits_of_config(config, Mesh(**sizes))), problem
            launched = launched_by(way, shards * size)
            is_group_of_tp = kind == "tp" and shards == 1
            if not (is_group_of_tp and sizes["tp"] == 1):  # then it is DDP, of any number
                assert math.prod(sizes.values()) == launched, problem
            followed += 1
    assert followed > 20


# ---- Pipelines ----
def told_by(way, args):
    """The arguments with the flags that a way names."""
    flags = dict(FLAG.findall(way))
    flags.pop("num_processes", None)
    if "without --num_microbatches" in way:
        flags["num_microbatches"] = None
    values = {name: int(value) if str(value).isdigit() else value for name, value in flags.items()}
    return dataclasses.replace(args, **values)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_a_pipeline_that_is_changed_as_told_is_not_refused_again(schedule):
    followed = 0
    plain = parse_arguments(llama_pipeline.Arguments, words=[f"--pipeline_schedule={schedule}"])
    for ranks, size, rows, number, layers in itertools.product(
        (1, 2, 6, 7, 8), (2, 3, 4, 7), (1, 5, 8), (None, 2, 3), (None, 1, 4, 6)
    ):
        args = dataclasses.replace(
            plain, pp_size=size, per_device_train_batch_size=rows, num_microbatches=number
        )
        for problem in find_misfits_of_size(args, ranks, layers):
            for way in ways_of(problem.rpartition(": ")[2]):
                if way == "use recipes/llama.py under fsdp2_full_shard.yaml":
                    assert layers and layers < 2 * KINDS[schedule].stages_per_rank
                    continue
                told = told_by(way, args)
                found = list(find_misfits_of_size(told, launched_by(way, ranks), layers))
                assert not found, (problem, found)
                followed += 1
    assert followed > 500


# ---- Experts ----
def test_a_group_of_experts_that_is_changed_as_told_is_not_refused_again():
    followed = 0
    for size, ranks, experts in itertools.product(range(2, 9), range(1, 13), (0, 2, 4, 6, 8, 9)):
        for problem in find_indivisible_numbers(size, ranks, experts):
            for way in ways_of(problem.rpartition(": ")[2]):
                if way == "leave --ep_size out":
                    continue
                told = int(dict(FLAG.findall(way)).get("ep_size", size))
                found = list(find_indivisible_numbers(told, launched_by(way, ranks), experts))
                assert not found, (problem, found)
                followed += 1
    assert followed > 100


@pytest.mark.parametrize(
    ("size", "ranks", "experts", "says"),
    [
        (3, 8, 4, "--ep_size 3 does not divide 8 ranks and the model's 4 experts: use --ep_size 2"),
        (3, 3, 4, "does not divide the model's 4 experts: use --ep_size 2 and pass --num_pro"),
        (5, 6, 7, "does not divide 6 ranks and the model's 7 experts: use --ep_size 7 and pass"),
    ],
)
def test_the_size_of_a_group_of_experts_divides_both(size, ranks, experts, says):
    [problem] = find_indivisible_numbers(size, ranks, experts)
    assert says in problem
