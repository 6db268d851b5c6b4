# SPDX-License-Identifier: Apache-2.0
"""From an accelerate config and the recipe's arguments to a plan."""

import pytest

from components import config_reading
from launching import CONFIGS
from planner import yaml_files
from planner.errors import UnplannableError
from planner.plan import plan_of
from planner.validation import training_arguments
from proof.jobs import mesh_configs

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


@pytest.mark.parametrize("name", sorted(set(mesh_configs()) - {"ep", "fsdp2_ep"}))
def test_a_yaml_under_which_ranks_share_rows_is_refused(name):
    with pytest.raises(UnplannableError, match="rehearse the run"):
        plan_of(training_arguments([]), yaml_files.read(CONFIGS / f"{name}.yaml"))


@pytest.mark.parametrize("name", sorted(PLANS))
def test_a_yaml_is_planned_as_what_it_runs(name):
    config = yaml_files.read(CONFIGS / f"{name}.yaml")
    numbers = {"num_processes": 4, "num_machines": 2}
    if name == "single":
        numbers = {"num_processes": 1, "num_machines": 1}
    plan = plan_of(training_arguments([]), config, **numbers)
    found = {column: getattr(plan, column) for column in COLUMNS}
    assert found == dict(zip(COLUMNS, PLANS[name], strict=True))
    assert plan.mixed_precision == "bf16"


UNPLANNED = {
    "fsdp_activation_checkpointing": True,
    "fsdp_transformer_layer_cls_to_wrap": "LlamaMLP",
    "fsdp_use_orig_params": False,
}


@pytest.mark.parametrize("key", UNPLANNED)
def test_keys_that_change_memory_are_not_passed_over(key):
    fsdp = {"fsdp_version": 1, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    content = {"distributed_type": "FSDP", "fsdp_config": fsdp | {key: UNPLANNED[key]}}
    with pytest.raises(UnplannableError, match=key):
        plan_of(training_arguments([]), config_reading.as_read(content), 4)
