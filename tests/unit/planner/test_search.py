# SPDX-License-Identifier: Apache-2.0
"""The search for the largest batch or length that fits."""

import pytest

from planner.search import largest_that_fits


@pytest.mark.parametrize("bend", [0.0, 1.0, 40.0])
@pytest.mark.parametrize("root", [3, 4, 700, 65_536])
def test_the_search_is_short(bend, root):
    """For a peak that is flat, then a line, then steeper, as that of attention with masks."""
    seen = []

    def peak(number):
        seen.append(number)
        line = max(number, root // 2)
        return line + bend * number**2 / root

    card = peak(root)
    bounds = {"low": 2, "at_low": peak(2), "most": 2**17}
    assert largest_that_fits(peak, card, guess=4, **bounds) == root
    assert len(seen) <= 25


def test_no_larger_number_is_returned_than_is_wanted():
    found = largest_that_fits(lambda number: 0, card=10, low=1, at_low=0, most=37, guess=2)
    assert found == 37
