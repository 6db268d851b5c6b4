# SPDX-License-Identifier: Apache-2.0
"""An order has every number once, is as random as one drawn at random, and never changes."""

import numpy as np
import pytest

from components.shuffling import NEWEST, ShuffledOrder, numbers_from, shuffled


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
        [5, 4, 9, 2, 3, 7, 8, 6, 0, 1],
        [8, 0, 1, 4, 5, 6, 7, 2, 3, 9],
        [70043944, 11712399, 27526674, 76718585, 48621316],
        [913322975566, 543850756111, 1091883834969],
    ]


def test_a_place_is_computed_without_those_before_it():
    order = ShuffledOrder(10_000, (1, 2))
    whole = order.at(np.arange(10_000))
    few = np.array([9_999, 0, 5_000])
    assert np.array_equal(order.at(few), whole[few])
    assert list(numbers_from(order, 700, 9_000)) == whole[700:9_000].tolist()


def deviations(counts):
    """By how many standard deviations chi-square of equally likely counts is off."""
    degrees = counts.size - 1
    expected = counts.mean()
    return (((counts - expected) ** 2).sum() / expected - degrees) / np.sqrt(2 * degrees)


@pytest.mark.parametrize("number", [5, 10, 33])
def test_over_seeds_every_pair_of_places_gets_every_pair_of_numbers_equally_often(number):
    """With four rounds it is off by 9 and 25 deviations for 10 and 5 numbers."""
    places = np.arange(number)
    orders = np.stack([ShuffledOrder(number, (seed, 0)).at(places) for seed in range(2_000)])
    for first, second in ((0, 1), (0, number // 2), (number - 2, number - 1)):
        pairs = orders[:, first] * number + orders[:, second]
        different = ~np.eye(number, dtype=bool).ravel()
        counts = np.bincount(pairs, minlength=number**2)[different]
        assert abs(deviations(counts)) < 4


def test_neighbors_of_the_file_are_no_neighbors_of_the_order():
    """In 100,000 numbers about 2 of 100,000 neighbors differ by 1 in a list drawn at random."""
    order = ShuffledOrder(100_000, (0, 0)).at(np.arange(100_000))
    assert (np.abs(np.diff(order)) == 1).sum() < 12  # Poisson of mean 2: once in a million seeds
    halves = order.reshape(10, -1) < 50_000
    # 5,000 expected of 10,000 in each tenth, by chance +- 47
    assert np.abs(halves.sum(axis=1) - 5_000).max() < 5 * 47
