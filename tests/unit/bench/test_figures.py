# SPDX-License-Identifier: Apache-2.0
"""Ratios are taken within a repeat, over the runs that count."""

import pytest

from bench.figures import milliseconds_more, paired, spread, values
from measured_runs import cell_of, run_of


def test_ratios_are_those_of_a_repeat():
    """In the second repeat the machine was half as fast: a ratio of means would say 1.4."""
    seconds = {"floor": (1.0, 2.0, 1.0), "ours": (1.1, 2.2, 2.2)}
    runs = []
    for name, of_repeats in seconds.items():
        for repeat, time in enumerate(of_repeats):
            runs.append(run_of(name, repeat, seconds_per_step=time))
    cell = cell_of(*runs)
    assert paired(cell, "ours", "floor") == pytest.approx([1.1, 1.1, 2.2])
    assert spread(paired(cell, "ours", "floor")) == "1.10 (1.10 to 2.20)"
    over = paired(cell, "ours", "floor", of=milliseconds_more)
    assert over == pytest.approx([100, 200, 1200])


def test_a_repeat_counts_only_if_both_do():
    runs = [run_of(name, repeat) for repeat in range(3) for name in ("floor", "ours")]
    runs[0]["loaded"] = True  # the floor of the first repeat
    runs[3]["losses"] = [3.0, 2.1]
    assert len(paired(cell_of(*runs), "ours", "floor")) == 1
    assert spread([]) == ""


def test_a_peak_of_memory_is_a_number_like_any_other():
    runs = [run_of("floor"), run_of("floor", repeat=1, memory_mib={"resident": 600.0})]
    cell = cell_of(*runs)
    assert values(cell, "floor", "memory.resident") == {0: 500.0, 1: 600.0}
    assert values(cell, "floor", "memory.allocated") == {}
