# SPDX-License-Identifier: Apache-2.0
"""What hosts compare at the start; tests/hosts has two that lose each other."""

from types import SimpleNamespace

import pytest

from core.exits import End
from extras.hosts.hooks import in_run
from extras.hosts.watch import facts_of, find_difference


def test_what_differs_between_hosts_is_named_with_both():
    facts = facts_of(SimpleNamespace(max_steps=3, output_dir="a"))
    assert find_difference([("a", facts), ("b", dict(facts))]) is None
    other = facts | {"--max_steps": "4"}
    assert find_difference([("a", facts), ("a", facts), ("b", other)]).startswith(
        "--max_steps is 3 on a and 4 on b: "
    )
    del other["torch"]
    assert " and not there on b: " in find_difference([("a", facts), ("b", other)])


@pytest.mark.parametrize(
    ("environment", "is_left_out"),
    [
        ({"SLURM_STEP_NUM_NODES": "2", "GROUP_WORLD_SIZE": "1"}, True),
        ({"PET_NNODES": "2"}, True),  # without torchrun
        ({"SLURM_STEP_NUM_NODES": "1", "GROUP_WORLD_SIZE": "1"}, False),
        ({"SLURM_NNODES": "2"}, False),  # an allocation, in which a step may be smaller
        ({"PET_NNODES": "1:2", "GROUP_WORLD_SIZE": "1"}, False),
    ],
)
def test_a_launch_that_leaves_out_hosts_of_its_job(environment, is_left_out, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if is_left_out:
        with pytest.raises(End) as end:
            in_run(None)
        assert next(iter(environment)) in end.value.why
    else:
        assert in_run(None) is None
