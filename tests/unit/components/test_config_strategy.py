# SPDX-License-Identifier: Apache-2.0
"""What a config asks for, and into how many shards that splits each kind of state."""

import pytest
import yaml

from components.config_reading import as_read
from components.config_strategy import (
    shards_of,
    strategy_of,
    strategy_run,
)
from launching import CONFIGS

# The strategy in force, and the shards of parameters, gradients and optimizer state on two nodes
# of two processes
EXPECTED = {
    "single": ("NO_SHARD", "1 1 1"),
    "ddp": ("NO_SHARD", "1 1 1"),
    "pp": ("NO_SHARD", "1 1 1"),  # accelerate does not know of pipelines
    "ep": ("NO_SHARD", "1 1 1"),  # accelerate does not know of experts
    "fsdp2_ep": ("FULL_SHARD", "4 4 4"),
    "tp": ("NO_SHARD", "1 1 1"),  # each rank has a part of each matrix
    "fsdp2_tp": ("FULL_SHARD", "2 2 2"),
    "hsdp_tp": ("HYBRID_SHARD", "2 2 2"),
    "fsdp2_cp": ("FULL_SHARD", "4 4 4"),
    "hsdp_cp": ("HYBRID_SHARD", "4 4 4"),
    "deepspeed_ulysses": ("FULL_SHARD", "4 4 4"),
    "fsdp": ("FULL_SHARD", "4 4 4"),
    "fsdp1_full_shard": ("FULL_SHARD", "4 4 4"),
    "fsdp1_shard_grad_op": ("SHARD_GRAD_OP", "4 4 4"),
    "fsdp1_no_shard": ("NO_SHARD", "1 1 1"),
    "fsdp1_hybrid_shard": ("HYBRID_SHARD", "2 2 2"),
    "fsdp2_full_shard": ("FULL_SHARD", "4 4 4"),
    "fsdp2_shard_grad_op": ("SHARD_GRAD_OP", "4 4 4"),
    "fsdp2_hybrid_shard": ("HYBRID_SHARD", "2 2 2"),
    "fsdp2_cpu_offload": ("FULL_SHARD", "4 4 4"),
    "deepspeed_zero0": ("NO_SHARD", "1 1 1"),
    "deepspeed_zero1": ("ZeRO-1", "1 1 4"),
    "deepspeed_zero2": ("ZeRO-2", "1 4 4"),
    "deepspeed_zero3": ("FULL_SHARD", "4 4 4"),
    "deepspeed_zero2_offload": ("ZeRO-2", "1 4 4"),
    "deepspeed_zero3_offload": ("FULL_SHARD", "4 4 4"),
}


def test_every_shipped_file_is_expected():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_strategy_of_a_shipped_file(name):
    strategy, expected = EXPECTED[name]
    config = as_read(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()))
    shards = shards_of(strategy_of(config), processes=4, processes_per_node=2)
    counts = [shards[kind] for kind in ("parameters", "gradients", "optimizer")]
    assert strategy_run(config) == strategy
    assert " ".join(map(str, counts)) == expected
    assert shards["master"] == shards["optimizer"]
