# SPDX-License-Identifier: Apache-2.0
"""A rehearsal does what the YAML says, or refuses, and reports what it changes and why."""

from argparse import Namespace
from dataclasses import astuple

import pytest

from launching import CONFIGS
from rehearsal.planning import plan


def rehearse_shipped(name, device="cpu", **options):
    launch = Namespace(nondefault=list(options), **options)
    return plan(str(CONFIGS / f"{name}.yaml"), device, launch)


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
    for options, expected in (
        ({}, [("num_processes", "1", "2"), ("mixed_precision", "bf16", "no")]),
        ({"num_processes": 3}, [("mixed_precision", "bf16", "no")]),
        ({"num_processes": 3, "mixed_precision": "bf16"}, []),
    ):
        told = [astuple(one) for one in rehearse_shipped("fsdp2_full_shard", **options).overrides]
        assert [one[:3] for one in told] == expected
        assert all(one[3] for one in told)


def test_on_gpus_nothing_differs():
    rehearsal = rehearse_shipped("deepspeed_zero3_offload", device="cuda")
    assert rehearsal.overrides == []
    assert "ACCELERATE_TORCH_DEVICE" not in rehearsal.environment("folder")
