# SPDX-License-Identifier: Apache-2.0
"""An order has every number once, is as random as one drawn at random, and never changes."""

import numpy as np
import pytest

from components.shuffling import NEWEST, ShuffledOrder, shuffled


@pytest.mark.parametrize("number", [1, 2, 3, 64, 65, 1000, 4097, 100_000])
def test_an_order_has_every_number_once(number):
    for seed in range(3):
        order = ShuffledOrder(number, (seed, 0)).at(np.arange(number))
        assert np.array_equal(np.sort(order), np.arange(number))


def test_an_order_never_changes():
    """A checkpoint has only a version of it, so another result needs another version."""
    assert NEWEST == 2
    found = [
        shuffled(10, (42, 0)).at(np.arange(10)).tolist(),
        shuffled(10, (42, 1)).at(np.arange(10)).tolist(),
        shuffled(10**8, (42, 0)).at(np.arange(5)).tolist(),
        shuffled(2**40, (42, 3, 7)).at(np.arange(3)).tolist(),
    ]
    assert found == [
        [5, 6, 0, 7, 3, 2, 4, 9, 1, 8],
        [0, 8, 7, 4, 3, 1, 2, 9, 6, 5],
        [70043944, 11712399, 27526674, 76718585, 48621316],
        [913322975566, 543850756111, 1091883834969],
    ]


def deviations(counts):
    """By how many standard deviations chi-square of equally likely counts is off."""
    degrees = counts.size - 1
    expected = counts.mean()
    return (((counts - expected) ** 2).sum() / expected - degrees) / np.sqrt(2 * degrees)


def test_over_seeds_every_pair_of_places_gets_every_pair_of_numbers_equally_often():
    """With four rounds it is off by 25 deviations."""
    number = 5
    places = np.arange(number)
    orders = np.stack([ShuffledOrder(number, (seed, 0)).at(places) for seed in range(2_000)])
    for first, second in ((0, 1), (0, number // 2), (number - 2, number - 1)):
        pairs = orders[:, first] * number + orders[:, second]
        different = ~np.eye(number, dtype=bool).ravel()
        counts = np.bincount(pairs, minlength=number**2)[different]
        assert abs(deviations(counts)) < 4
