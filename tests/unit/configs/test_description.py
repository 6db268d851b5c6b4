# SPDX-License-Identifier: Apache-2.0
"""What check_config says that a config does is what accelerate does with it."""

import copy
import json

import pytest
import yaml

from accelerate_judge import fsdp_run, launched, run, write
from broken_configs import (
    BROKEN,
    DDP,
    DEEPSPEED_JSON,
    FSDP1,
    FSDP2,
    FULL2,
    MESH,
    MESH_OF,
    ZERO,
    ZERO3,
)
from components import accelerate_keys as keys
from components import config_rules
from components.config_files import load
from components.config_findings import STOPS
from configs.description import describe
from configs.reports import check_file
from launching import CONFIGS

pytestmark = pytest.mark.usefixtures("pretended_gpu")
SHIPPED = sorted(CONFIGS.glob("*.yaml"))
# Shares of parameters, gradients and optimizer state, with 4 processes
SHARES = {
    "single": "whole whole whole",
    "ddp": "whole whole whole",
    "pp": "whole whole whole",  # accelerate does not know of pipelines
    "fsdp": "1/4 1/4 1/4",
    "fsdp1_full_shard": "1/4 1/4 1/4",
    "fsdp1_shard_grad_op": "1/4 1/4 1/4",
    "fsdp1_no_shard": "whole whole whole",
    "fsdp1_hybrid_shard": "1/4 1/4 1/4",
    "fsdp2_full_shard": "1/4 1/4 1/4",
    "fsdp2_shard_grad_op": "1/4 1/4 1/4",
    "fsdp2_hybrid_shard": "1/2 1/2 1/2",
    "fsdp2_cpu_offload": "1/4 1/4 1/4",
    "deepspeed_zero0": "whole whole whole",
    "deepspeed_zero1": "whole whole 1/4",
    "deepspeed_zero2": "whole 1/4 1/4",
    "deepspeed_zero3": "1/4 1/4 1/4",
    "deepspeed_zero2_offload": "whole 1/4 1/4",
    "deepspeed_zero3_offload": "1/4 1/4 1/4",
}


# In units of what a mesh splits: the shards of tensor parallel slices are shards of a slice
MESHES = {
    "ep": "whole whole whole",  # accelerate does not know of experts
    "fsdp2_ep": "1/4 1/4 1/4",
    "tp": "1/2 1/2 1/2",
    "fsdp2_tp": "1/4 1/4 1/4",
    "hsdp_tp": "1/4 1/4 1/4",
    "fsdp2_cp": "1/4 1/4 1/4",
    "hsdp_cp": "1/4 1/4 1/4",
    "deepspeed_ulysses": "1/2 1/2 1/2",
}


def does(path, num_processes=None):
    return check_file(load(path), num_processes).does


# ---- Shipped files ----
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_is_split_is_named(path):
    content = yaml.safe_load(path.read_text())
    is_fixed = path.stem == "single" or "parallelism_config" in content
    words = does(path, None if is_fixed else 4)
    shares = [words[name].split()[0] for name in ("parameters", "gradients", "optimizer")]
    assert " ".join(shares) == (SHARES | MESHES)[path.stem]
    assert (words["state"] != "on the GPU") == ("offload" in path.stem)
    assert "bf16" in words["precision"]


@pytest.mark.parametrize(
    ("config", "by_itself", "with_recipes"),
    [
        (
            "fsdp2_full_shard",
            "computes and communicates in bf16",
            "computes in bf16, reduces gradients in fp32",
        ),
        (
            "deepspeed_zero2",
            "fp32 master weights in the optimizer",
            "gradients are reduced in fp32",
        ),
    ],
)
def test_what_the_recipes_reduce_in_is_only_said_of_the_recipes(config, by_itself, with_recipes):
    file = load(CONFIGS / f"{config}.yaml")
    for recipes in (False, True):
        words = check_file(file, for_recipes=recipes).does
        assert (with_recipes in words["precision"]) == recipes
        assert by_itself in words["precision"] or recipes


EXPERTS = "mixtral.py --ep_size N gives each"
PIPELINES = "llama_pipeline.py --pp_size N gives each"
ROOM = {"ddp": (True, True), "ep": (True, True), "pp": (True, True), "fsdp2_ep": (True, False)}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_flags_are_named_that_make_something_else_of_a_file(path):
    words = does(path).get("flags", "")
    assert (EXPERTS in words, PIPELINES in words) == ROOM.get(path.stem, (False, False))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ep", ("mixed_precision: bf16", "mixed_precision: fp16")),
        ("fsdp2_ep", ("efficient_loading: false", "efficient_loading: true")),
        ("fsdp2_ep", ("fsdp_version: 2", "fsdp_version: 2\n  fsdp_offload_params: true")),
    ],
)
def test_flags_are_not_named_where_a_recipe_refuses_them(name, change, tmp_path):
    text = (CONFIGS / f"{name}.yaml").read_text()
    assert text.count(change[0]) == 1
    assert "flags" not in does(write(tmp_path, text.replace(*change)))


@pytest.mark.parametrize(
    ("text", "parts", "mesh"),
    [
        (
            ZERO3.replace("8", "4") + MESH_OF.format(first="tp", second="sp"),
            "1/4",
            "SP 2: 2 share the tokens",
        ),
        (DDP.replace("MULTI_GPU", "NO") + MESH_OF.format(first="tp", second="cp"), "whole", None),
    ],
)
def test_what_an_engine_does_not_split_by_is_not_described(text, parts, mesh, tmp_path):
    words = does(write(tmp_path, text))
    assert words["parameters"].split()[0] == parts
    assert words.get("mesh", "none").startswith(mesh or "none")


@pytest.mark.parametrize(
    ("stage", "shares"),
    [
        (0, ["1/2 of each split matrix"] * 3),
        (2, ["1/2 of each split matrix", "1/4", "1/4"]),
        (3, ["1/4", "1/4", "1/4"]),
    ],
)
def test_matrices_that_deepspeed_splits_are_not_called_whole(stage, shares, tmp_path):
    deepspeed = {
        "bf16": {"enabled": True},
        "tensor_parallel": {"autotp_size": 2},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(deepspeed))
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 4\n"
        f"deepspeed_config:\n  deepspeed_config_file: {path}\n"
    )
    words = does(write(tmp_path, text))
    assert words["mesh"] == "TP 2: 2 share the matrices of each layer"
    assert words["rows"] == "2 groups of 2 processes have rows of their own"
    for name, share in zip(("parameters", "gradients", "optimizer"), shares, strict=True):
        assert words[name].startswith(share)


def test_keys_of_rows_that_nothing_splits_have_no_effect(tmp_path):
    mesh = "parallelism_config:\n  parallelism_config_tp_size: 2\n"
    key = "parallelism_config_sp_attn_implementation"
    words = does(write(tmp_path, DDP.replace("8", "2") + mesh + f"  {key}: sdpa\n"))
    assert words["no effect"] == f"{key} (for rows that are split)"


# ---- accelerate as the judge ----
class TestTheTwoNoShardsThatRunFullShard:
    def test_fsdp1_with_reshard_after_forward(self, tmp_path):
        text = FSDP1 + "  fsdp_reshard_after_forward: NO_SHARD\n"
        assert fsdp_run(tmp_path, text)["sharding_strategy"] == "ShardingStrategy.FULL_SHARD"
        words = does(write(tmp_path, text))
        assert words["runs"] == "FSDP1 FULL_SHARD"
        assert words["parameters"].startswith("1/8 ")

    def test_fsdp2_with_sharding_strategy(self, tmp_path):
        text = FSDP2 + "  fsdp_sharding_strategy: NO_SHARD\n"
        told = fsdp_run(tmp_path, text)
        assert (told["sharding_strategy"], told["reshard_after_forward"]) == ("None", "True")
        words = does(write(tmp_path, text))
        assert words["runs"] == "FSDP2 FULL_SHARD"
        assert words["parameters"].startswith("1/8 ")


@pytest.mark.parametrize("strategy", keys.STRATEGIES)
def test_the_strategy_that_fsdp1_runs_is_named(strategy, tmp_path):
    text = FSDP1 + f"  fsdp_sharding_strategy: {strategy}\n"
    told = fsdp_run(tmp_path, text)["sharding_strategy"]
    assert told.removeprefix("ShardingStrategy.").lstrip("_") == strategy
    assert does(write(tmp_path, text))["runs"] == f"FSDP1 {strategy}"


# For each key of FSDP a value that is no version's default
FSDP_VALUES = {
    "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    "fsdp_reshard_after_forward": False,
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_forward_prefetch": True,
    "fsdp_use_orig_params": False,
    "fsdp_offload_params": True,
    "fsdp_sync_module_states": False,
    "fsdp_activation_checkpointing": True,
    "fsdp_cpu_ram_efficient_loading": False,
    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
    "fsdp_ignored_modules": "head",
    "fsdp_min_num_params": 5,
    "fsdp_transformer_layer_cls_to_wrap": "Block",
}
# What must be beside a key for it to be read
NEEDED_BESIDE = {
    "fsdp_sync_module_states": {"fsdp_cpu_ram_efficient_loading": False},
    "fsdp_min_num_params": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"},
    "fsdp_transformer_layer_cls_to_wrap": {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("key", FSDP_VALUES)
def test_a_key_of_fsdp_has_an_effect_under_the_versions_that_are_named(key, version, tmp_path):
    section = {"fsdp_version": version, **NEEDED_BESIDE.get(key, {})}
    content = yaml.safe_load(DDP) | {"distributed_type": "FSDP", "fsdp_config": section}
    without_key = yaml.safe_dump(content)
    section[key] = FSDP_VALUES[key]
    with_key = yaml.safe_dump(content)
    has_effect = fsdp_run(tmp_path, without_key) != fsdp_run(tmp_path, with_key)
    assert has_effect == (keys.READ_BY_ONE_VERSION.get(key, version) == version)
    assert has_effect != (key in does(write(tmp_path, with_key))["no effect"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rdzv_backend", "c10d"),
        ("same_network", "true"),
        ("enable_cpu_affinity", "true"),
        ("downcast_bf16", "true"),
        ("tpu_use_sudo", "true"),
    ],
)
def test_the_launcher_only_takes_from_the_command_line_what_is_named(key, value, tmp_path):
    assert key in keys.COMMAND_LINE_ONLY
    assert len(keys.COMMAND_LINE_ONLY) == 5
    text = DDP + f"{key}: {value}\n"
    without_key = launched(tmp_path, DDP).args
    with_key = launched(tmp_path, text).args
    assert getattr(without_key, key) == getattr(with_key, key) != value
    assert key in does(write(tmp_path, text))["no effect"]


# What stops with the processes, the GPUs or the model at hand, and no sooner
STOPS_LATER = {
    "layers as a list",
    "classes in a list, under a short name",
    "variable that nothing fills in",
    "address that nothing fills in",
    "processes in words",
    "mesh without the long prefix",
    "rank of no machine",
    "fewer GPUs than processes",
    "mesh and processes apart",
    "replicas of DDP that are not the processes",
    "mesh for FSDP1",
    "mesh that shards nothing",
    "tensor parallel mesh under FSDP2",
    "replicas of tensor parallel groups",
    "a row split in two ways",
    "context parallelism without FSDP2",
    "sequence parallelism that divides no processes",
    "a step of no micro-batch",
    "no such ZeRO stage",
    "no such device",
}
NEED_MORE_TO_RUN = {"no number of processes", "no machine, no processes", "fp8 of no backend"}


@pytest.mark.parametrize("name", sorted({*BROKEN} - NEED_MORE_TO_RUN))
def test_accelerate_stops_exactly_where_nothing_is_said_to_run(name, tmp_path):
    path = write(tmp_path, BROKEN[name].text)
    checked = check_file(load(path))
    try:
        run(tmp_path, path.read_text())
        stopped = None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        stopped = error
    stops = stopped is not None or name in STOPS_LATER
    assert (STOPS in [item.kind for item in checked.findings]) == stops
    assert checked.does["runs"].startswith("nothing") == stops
    assert stopped is None or name not in STOPS_LATER


# ---- Values of any kind ----
ODD_VALUES = (None, True, 7, -1, 2.5, "", "word", [], ["a"], {}, {"a": {"b": 1}}, {1: 2})
ODD_VALUES_OF_JSON = (None, True, 7, "auto", "word", [], {}, {"auto": "auto"})


def paths_of(content, path=()):
    for key, value in content.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from paths_of(value, (*path, key))


def with_odd_values(content, values):
    """Yield the content with each value at each of its keys."""
    for path in paths_of(content):
        for value in values:
            changed = copy.deepcopy(content)
            section = changed
            for key in path[:-1]:
                section = section[key]
            section[path[-1]] = copy.copy(value)
            yield changed


def check_and_describe(content, deepspeed=None):
    findings, config = config_rules.check(content, deepspeed)
    describe(content, config, findings, deepspeed)


def test_no_value_of_any_kind_makes_the_check_fail():
    texts = [path.read_text() for path in SHIPPED]
    for text in [*texts, FULL2 + MESH + "2\n"]:
        for content in with_odd_values(yaml.safe_load(text), ODD_VALUES):
            check_and_describe(content)


def test_no_value_of_any_kind_beside_another_mistake_makes_the_check_fail():
    """Files with a mistake share most keys: each value is at each key of one in four of them."""
    for number, case in enumerate(BROKEN.values()):
        values = ODD_VALUES[number % 4 :: 4]
        for content in with_odd_values(yaml.safe_load(case.text), values):
            check_and_describe(content)


def test_no_value_of_any_kind_in_a_deepspeed_json_makes_the_check_fail():
    content = yaml.safe_load(ZERO + "  deepspeed_config_file: ds.json\n")
    for deepspeed in with_odd_values(DEEPSPEED_JSON, ODD_VALUES_OF_JSON):
        check_and_describe(content, deepspeed)
