# SPDX-License-Identifier: Apache-2.0
"""Curves leave out what was not recorded, and are smoothed without lag."""

import pytest

from plotting.curves import Curve, curve_of, smooth


def test_a_curve_has_the_lines_that_have_its_metric():
    lines = [{"step": 1, "loss": 4.0}, {"step": 2, "loss": None}, {"step": 3}]
    assert curve_of(lines, "loss") == Curve([1], [4.0])


def test_the_ends_of_a_curve_are_means_over_a_twentieth_of_it():
    lucky = [6.0, 4.0, *[1.0] * 36, 0.06, 0.02]  # 40 steps: two at each end
    curve = Curve(list(range(40)), lucky)
    assert curve.first() == 5 and curve.last() == pytest.approx(0.04)
    assert Curve([1], [3.0]).first() == Curve([1], [3.0]).last() == 3


def test_the_smoothed_curve_does_not_drop_to_the_last_step():
    noise = [1.0, 3.0] * 200  # a mean of 2, and no trend
    smoothed = smooth(noise)
    # A window of 11 steps at the ends and of 21 between has one value more of one kind
    assert max(abs(value - 2) for value in smoothed) <= 1 / 11 + 1e-12
    assert len(smoothed) == 400


def test_a_trend_is_not_delayed_and_a_short_run_not_smoothed():
    line = [float(step) for step in range(400)]
    assert smooth(line)[10:-10] == pytest.approx(line[10:-10])
    assert smooth([3.0, 2.0, 1.0]) == [3.0, 2.0, 1.0]
