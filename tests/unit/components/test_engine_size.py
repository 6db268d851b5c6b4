# SPDX-License-Identifier: Apache-2.0
"""A launch that leaves out hosts of its engine's job is refused, and no other one."""

import pytest

from components.engine_size import find_other_size


@pytest.mark.parametrize("variable", ["SLURM_STEP_NUM_NODES", "SKYPILOT_NUM_NODES", "PET_NNODES"])
def test_hosts_that_the_launch_leaves_out_are_a_problem(variable):
    (line,) = find_other_size({variable: "2", "GROUP_WORLD_SIZE": "1"})
    assert f"has 2 hosts ({variable}), and this launch is for 1: pass --num_machines" in line
    assert f"unset {variable}" in line
    (line,) = find_other_size({variable: "2"})  # without torchrun
    assert "this launch is for 1" in line


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"GROUP_WORLD_SIZE": "4"},
        {"SLURM_STEP_NUM_NODES": "2", "GROUP_WORLD_SIZE": "2"},
        {"SLURM_STEP_NUM_NODES": "1"},
        {"SLURM_NNODES": "2"},  # an allocation, in which a step may be smaller
        {"PET_NNODES": "1:2", "GROUP_WORLD_SIZE": "1"},
        {"PET_NNODES": "2", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": "100"},
    ],
)
def test_other_launches_are_not(environment):
    assert list(find_other_size(environment)) == []
