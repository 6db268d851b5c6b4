"""From an accelerate config and the recipe's arguments to a plan."""

import pytest

from components import config_reading
from launching import CONFIGS
from planner import yaml_files
from planner.errors import Unplannable
from planner.plan import Plan, plan_of
from planner.validation import training_arguments

# On 4 ranks of 2 machines
PLANS = {
    "single": Plan(None, "single", ranks=1, shards=1),
    "ddp": Plan(None, "ddp", ranks=4, shards=4),
    "fsdp": Plan(None, "fsdp2", ranks=4, shards=4),
    "fsdp2_full_shard": Plan(None, "fsdp2", ranks=4, shards=4),
    "fsdp2_shard_grad_op": Plan(None, "fsdp2", ranks=4, shards=4, reshards=False),
    "fsdp2_hybrid_shard": Plan(None, "fsdp2", ranks=4, shards=2),
    "fsdp1_full_shard": Plan(None, "fsdp1", ranks=4, shards=4),
    "fsdp1_hybrid_shard": Plan(None, "fsdp1", ranks=4, shards=2),
    "fsdp1_shard_grad_op": Plan(None, "fsdp1", ranks=4, shards=4, reshards=False),
    "fsdp1_no_shard": Plan(None, "fsdp1", ranks=4, shards=1, reshards=False),
    "deepspeed_zero0": Plan(None, "zero", stage=0, ranks=4, shards=4),
    "deepspeed_zero1": Plan(None, "zero", stage=1, ranks=4, shards=4),
    "deepspeed_zero2": Plan(None, "zero", stage=2, ranks=4, shards=4),
    "deepspeed_zero3": Plan(None, "zero", stage=3, ranks=4, shards=4),
}
# (of which strategy, whether it offloads parameters, and the optimizer)
OFFLOADING = {
    "fsdp2_cpu_offload": ("fsdp2_full_shard", True, True),
    "deepspeed_zero2_offload": ("deepspeed_zero2", False, True),
    "deepspeed_zero3_offload": ("deepspeed_zero3", True, True),
}


def expected(name):
    """(engine, stage, shards, reshards, offloads parameters, offloads the optimizer) of a YAML."""
    sibling, parameters, optimizer = OFFLOADING.get(name, (name, False, False))
    plan = PLANS[sibling]
    return plan.engine, plan.stage, plan.shards, plan.reshards, parameters, optimizer


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_a_yaml_is_planned_as_what_it_runs(name):
    config = yaml_files.read(CONFIGS / f"{name}.yaml")
    ranks, machines = (1, 1) if name == "single" else (4, 2)
    plan = plan_of(training_arguments([]), config, ranks, machines)
    offloads = plan.offloads_parameters, plan.offloads_optimizer
    assert (plan.engine, plan.stage, plan.shards, plan.reshards, *offloads) == expected(name)
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
    with pytest.raises(Unplannable, match=key):
        plan_of(training_arguments([]), config_reading.as_read(content), 4)
