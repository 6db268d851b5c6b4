# SPDX-License-Identifier: Apache-2.0
"""A rehearsal does what the YAML says, or refuses, and reports what it changes and why."""

import pytest

from launching import CONFIGS
from rehearsal.planning import Override, plan


def rehearse_shipped(name, device="cpu", **wishes):
    return plan(str(CONFIGS / f"{name}.yaml"), device, **wishes)


@pytest.mark.parametrize(
    ("name", "ranks", "ranks_per_node"),
    [
        ("single", 1, 0),
        ("ddp", 2, 1),
        ("fsdp2_full_shard", 2, 1),
        ("fsdp1_hybrid_shard", 4, 2),
        ("fsdp2_hybrid_shard", 4, 2),
        ("deepspeed_zero3", 2, 1),
    ],
)
def test_on_cpu_it_starts_the_fewest_ranks_that_show_the_strategy(name, ranks, ranks_per_node):
    rehearsal = rehearse_shipped(name)
    assert (rehearsal.ranks, rehearsal.ranks_per_node) == (ranks, ranks_per_node)


def test_ranks_that_would_not_show_hybrid_sharding_are_refused():
    with pytest.raises(ValueError, match="not 2 ranks"):
        rehearse_shipped("fsdp1_hybrid_shard", num_processes=2)


def test_what_differs_from_the_yaml_is_told_with_its_reason():
    slow = "slow on CPU; --mixed_precision bf16 also shows what bf16 refuses"
    more_ranks = Override("num_processes", "1", "2", "one rank would show nothing")
    assert rehearse_shipped("fsdp2_full_shard").overrides == [
        more_ranks,
        Override("mixed_precision", "bf16", "no", slow),
    ]
    asked = rehearse_shipped("fsdp2_full_shard", num_processes=3, mixed_precision="fp16")
    assert asked.overrides == [
        Override("num_processes", "1", "3", "requested"),
        Override("mixed_precision", "bf16", "fp16", "requested"),
    ]
    assert rehearse_shipped("fsdp2_full_shard", mixed_precision="bf16").overrides == [more_ranks]


def test_on_gpus_nothing_differs():
    rehearsal = rehearse_shipped("deepspeed_zero3_offload", device="cuda")
    assert rehearsal.overrides == []
    assert "ACCELERATE_TORCH_DEVICE" not in rehearsal.environment("folder")


def test_on_several_machines_each_starts_its_share_of_the_ranks():
    rehearsal = rehearse_shipped("ddp", num_processes=4, num_machines=2)
    assert (rehearsal.ranks, rehearsal.ranks_here, rehearsal.ranks_per_node) == (4, 2, 2)
    meeting = ["--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "host"]
    command = rehearsal.command(["recipe.py"], 29500, meeting)
    place = command.index("--num_machines")
    assert command[place : place + 6] == meeting
