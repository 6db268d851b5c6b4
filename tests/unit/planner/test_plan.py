# SPDX-License-Identifier: Apache-2.0
"""From an accelerate config and the recipe's arguments to a plan."""

import pytest

from config_strategy import read
from launching import CONFIGS
from planner.plan import plan_of
from planner.request import UnplannableError
from planner_jobs import BASE, config_of, training_arguments


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config_of(BASE | {"width": 128, "depth": 1, "vocab": 1000}).save_pretrained(folder)
    return folder


COLUMNS = "engine stage shards reshards offloads_parameters offloads_optimizer".split()
PLANS = {  # the plan of each YAML on 4 ranks of 2 machines
    "single": ("single", 0, 1, True, False, False),
    "ddp": ("ddp", 0, 4, True, False, False),
    "pp": ("ddp", 0, 4, True, False, False),  # for recipes without pipelines
    "ep": ("ddp", 0, 4, True, False, False),  # for recipes without experts
    "fsdp2_ep": ("fsdp2", 0, 4, True, False, False),
    "fsdp": ("fsdp2", 0, 4, True, False, False),
    "fsdp2_full_shard": ("fsdp2", 0, 4, True, False, False),
    "fsdp2_shard_grad_op": ("fsdp2", 0, 4, False, False, False),
    "fsdp2_hybrid_shard": ("fsdp2", 0, 2, True, False, False),
    "fsdp2_cpu_offload": ("fsdp2", 0, 4, True, True, True),
    "fsdp1_full_shard": ("fsdp1", 0, 4, True, False, False),
    "fsdp1_hybrid_shard": ("fsdp1", 0, 2, True, False, False),
    "fsdp1_shard_grad_op": ("fsdp1", 0, 4, False, False, False),
    "fsdp1_no_shard": ("fsdp1", 0, 1, False, False, False),
    "deepspeed_zero0": ("zero", 0, 4, True, False, False),
    "deepspeed_zero1": ("zero", 1, 4, True, False, False),
    "deepspeed_zero2": ("zero", 2, 4, True, False, False),
    "deepspeed_zero2_offload": ("zero", 2, 4, True, False, True),
    "deepspeed_zero3": ("zero", 3, 4, True, False, False),
    "deepspeed_zero3_offload": ("zero", 3, 4, True, True, True),
}


# {YAML under which ranks share rows: name, ranks, shards, replicas, copies of a row}
MESHES = {
    "tp": ("TP 2", 2, 1, 1, 2),
    "fsdp2_tp": ("FSDP2 FULL_SHARD x TP 2", 4, 2, 1, 2),
    "hsdp_tp": ("FSDP2 HYBRID_SHARD x TP 2", 8, 2, 2, 2),
    "fsdp2_cp": ("FSDP2 FULL_SHARD x CP 2", 4, 4, 1, 2),
    "hsdp_cp": ("FSDP2 HYBRID_SHARD x CP 2", 8, 4, 2, 2),
    "deepspeed_ulysses": ("DeepSpeed ZeRO-3 x SP 2", 2, 2, 1, 2),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_yaml_under_which_ranks_share_rows_is_planned_as_what_it_runs(name, model):
    plan = plan_of(training_arguments(model), read(CONFIGS / f"{name}.yaml"))
    found = (plan.name, plan.ranks, plan.shards, plan.replicas, plan.copies)
    assert found == MESHES[name]


@pytest.mark.parametrize("name", MESHES)
def test_other_numbers_of_ranks_than_those_of_the_mesh_are_refused(name, model):
    config = read(CONFIGS / f"{name}.yaml")
    with pytest.raises(UnplannableError, match="the config's mesh needs"):
        plan_of(training_arguments(model), config, 3 * MESHES[name][1])


REFUSED = [
    ("fsdp2_cp", ["--packing"]),
    ("fsdp2_cp", ["--attn_implementation", "eager"]),
    ("fsdp2_cp", ["--padding_free"]),
    ("deepspeed_ulysses", ["--attn_implementation", "eager"]),
]


@pytest.mark.parametrize("name, flags", REFUSED)
def test_what_the_recipe_refuses_under_a_mesh_is_not_planned(name, flags, model):
    config = read(CONFIGS / f"{name}.yaml")
    with pytest.raises(UnplannableError, match=flags[0]):
        plan_of(training_arguments(model, flags), config)


@pytest.mark.parametrize("name", sorted(PLANS))
def test_a_yaml_is_planned_as_what_it_runs(name, model):
    config = read(CONFIGS / f"{name}.yaml")
    numbers = {"num_processes": 4, "num_machines": 2}
    if name == "single":
        numbers = {"num_processes": 1, "num_machines": 1}
    plan = plan_of(training_arguments(model), config, **numbers)
    found = {column: getattr(plan, column) for column in COLUMNS}
    assert found == dict(zip(COLUMNS, PLANS[name], strict=True))
    assert plan.mixed_precision == "bf16"


UNPLANNED = {
    "fsdp_activation_checkpointing": True,
    "fsdp_transformer_layer_cls_to_wrap": "LlamaMLP",
    "fsdp_use_orig_params": False,
}


@pytest.mark.parametrize("key", UNPLANNED)
def test_keys_that_change_memory_are_not_passed_over(key, model):
    fsdp = {"fsdp_version": 1, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    content = {"distributed_type": "FSDP", "fsdp_config": fsdp | {key: UNPLANNED[key]}}
    with pytest.raises(UnplannableError, match=key):
        plan_of(training_arguments(model), content, 4)
