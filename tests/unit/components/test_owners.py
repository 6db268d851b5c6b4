# SPDX-License-Identifier: Apache-2.0
"""Each tensor has one owner, and no rank gets much more than an equal share."""

import random

import pytest

from components.owners import SMALLEST_SHARE, share_out, spread_ranks

MIB = 2**20


def loads_of(owners, sizes, ranks):
    loads = [0] * ranks
    for name, owner in owners.items():
        loads[owner] += sizes[name]
    return loads


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 512])
def test_no_rank_has_more_than_an_equal_share_and_the_largest_tensor(ranks):
    dice = random.Random(ranks)
    sizes = {f"w{i}": dice.randrange(1, 64 * MIB) for i in range(900)}
    owners = share_out(sizes, ranks)
    assert owners.keys() == sizes.keys()
    most = sum(sizes.values()) / ranks + max(sizes.values())
    assert max(loads_of(owners, sizes, ranks)) <= most


def test_the_order_of_the_names_does_not_matter():
    sizes = {f"w{i}": MIB * (1 + i % 3) for i in range(30)}
    turned = dict(reversed(sizes.items()))
    assert share_out(sizes, 4) == share_out(turned, 4)


def test_small_states_are_not_spread_over_all_ranks():
    sizes = {f"w{i}": SMALLEST_SHARE // 4 for i in range(8)}
    assert set(share_out(sizes, 16).values()) == {0, 8}
    assert set(share_out({"w": 1}, 16).values()) == {0}


def test_tiny_tensors_make_no_owner_of_their_own():
    """Each weight has a step count of 4 bytes, and there are more ranks than large tensors."""
    sizes = {f"matrix{i}": 64 * MIB for i in range(6)} | {f"step{i}": 4 for i in range(100)}
    owners = share_out(sizes, 16)
    loads = loads_of(owners, sizes, 16)
    assert sorted(load // MIB for load in loads) == 10 * [0] + 6 * [64]
    assert {owner for name, owner in owners.items() if name.startswith("step")} <= {
        owner for name, owner in owners.items() if name.startswith("matrix")
    }


@pytest.mark.parametrize("seed", range(50))
def test_an_owner_has_three_quarters_of_a_smallest_share_or_more(seed):
    dice = random.Random(seed)
    largest = dice.choice([MIB // 100, MIB // 2, MIB, 4 * MIB])
    sizes = {f"w{i}": dice.randrange(1, largest) for i in range(dice.randrange(200, 400))}
    loads = loads_of(share_out(sizes, 512), sizes, 512)
    assert min(load for load in loads if load) >= SMALLEST_SHARE * 3 / 4


def test_owners_that_are_chosen_among_all_ranks_are_the_same_as_without_holders():
    sizes = {f"w{i}": MIB * (1 + i % 3) for i in range(30)}
    assert share_out(sizes, 4, dict.fromkeys(sizes, range(4))) == share_out(sizes, 4)


def test_a_tensor_of_a_stage_goes_to_a_rank_of_that_stage():
    sizes = {"first": MIB, "first.more": MIB, "last": MIB}
    holders = {"first": [0, 1], "first.more": [0, 1], "last": [2, 3]}
    assert share_out(sizes, 4, holders) == {"first": 0, "first.more": 1, "last": 2}


def test_ranks_are_at_equal_distances():
    assert spread_ranks(3, 9) == [0, 3, 6]
    assert spread_ranks(0, 9) == [0]
    assert spread_ranks(99, 3) == [0, 1, 2]
