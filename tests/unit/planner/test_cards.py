# SPDX-License-Identifier: Apache-2.0
"""The memory of cards, and what no tensor holds."""

import pytest

from planner.plan import GIB, bytes_of_card, with_constants

SIZES = {
    "24GB": 24 * 10**9,
    "24gb": 24 * 10**9,
    "24": 24 * 10**9,
    "24GiB": 24 * GIB,
    "1.5 GiB": 3 * GIB // 2,
    "h200": int(139.8 * GIB),
    "RTX-4090": int(23.5 * GIB),
    None: None,
}


@pytest.mark.parametrize("card", SIZES)
def test_a_card_is_a_name_or_a_size(card):
    assert bytes_of_card(card) == SIZES[card]


def test_several_ranks_take_more_besides_tensors():
    one = with_constants({"parameters": GIB}, ranks=1)
    two = with_constants({"parameters": GIB}, ranks=2)
    assert one["parameters"] == GIB
    assert two["constants"] - one["constants"] == GIB // 2
