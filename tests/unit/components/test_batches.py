# SPDX-License-Identifier: Apache-2.0
"""Batches cover every row once in each epoch, however they are cut."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from components.batches import Batches, BatchPlan
from components.shuffling import LISTED, NEWEST, SortedInParts, shuffled
from example_arguments import language_model_arguments
from fakes import fake_accelerator


# ---- Batches ----
@pytest.mark.parametrize("num_rows", [1, 11, 12, 13, 210])
@pytest.mark.parametrize(
    ("batch_size", "accumulation", "ranks"), [(12, 1, 1), (3, 4, 1), (3, 2, 2), (1, 3, 4)]
)
def test_an_epoch_has_every_row_once_in_the_same_steps_however_it_is_cut(
    num_rows, batch_size, accumulation, ranks
):
    window = accumulation * ranks
    batches = list(Batches(num_rows, batch_size, window, 2, orders(num_rows)))
    assert len(batches) % window == 0
    steps = [sorted(sum(batches[i : i + window], [])) for i in range(0, len(batches), window)]
    half = len(steps) // 2
    assert sorted(sum(steps[:half], [])) == sorted(sum(steps[half:], [])) == list(range(num_rows))
    whole = Batches(num_rows, 12, 1, 2, orders(num_rows))
    assert len(whole) == len(steps)
    assert steps == [sorted(batch) for batch in whole]
    assert all(steps)  # no step without rows


def orders(num_rows, seed=0):
    return lambda epoch: shuffled(num_rows, (seed, epoch))


def test_the_order_is_a_function_of_seed_and_epoch():
    order = [list(Batches(50, 50, 1, 2, orders(50, seed))) for seed in (0, 0, 1)]
    assert order[0] == order[1] != order[2] and order[0][0] != order[0][1]
    assert list(Batches(5, 2)) == [[0, 1], [2, 3], [4]]  # sequential


def test_batches_can_be_read_from_any_of_them_on(monkeypatch):
    """However many of them are computed at a time."""
    whole = list(Batches(100, 3, 4, 3, orders(100)))
    for at_once in (1, 7, 4096):
        monkeypatch.setattr("components.batches.ROWS_AT_ONCE", at_once)
        batches = Batches(100, 3, 4, 3, orders(100))
        assert list(batches.read(range(50, len(batches), 4))) == whole[50::4]


def test_rows_of_one_length_come_together_and_each_comes_once():
    lengths = np.random.default_rng(0).integers(1, 513, 1000)

    def sorted_order(epoch):
        return SortedInParts(shuffled(1000, (0, epoch)), lengths, 600)

    batches = list(Batches(1000, 4, 6, 2, sorted_order))
    assert Counter(row for batch in batches for row in batch) == {row: 2 for row in range(1000)}
    filled = [batch for batch in batches if batch]
    fill = [lengths[batch].sum() / (len(batch) * lengths[batch].max()) for batch in filled]
    assert np.mean(fill) > 0.97
    assert list(Batches(1000, 4, 6, 2, sorted_order).read(range(7, 252, 8))) == batches[7:252:8]
    assert len(batches) == len(Batches(1000, 4, 6, 2))  # as many steps


# ---- Loaders ----
ROWS = SimpleNamespace(dataset=SimpleNamespace(select_columns=lambda _: None))


def collate(source, lines):
    return lines


collate.columns = []


def dealt(flags, num_rows, num_processes, first_step=0, order=NEWEST, **settings):
    """For each rank the lines of its batches."""
    found = []
    for rank in range(num_processes):
        accelerator = fake_accelerator(
            num_processes=num_processes, process_index=rank, non_blocking=False, **settings
        )
        plan = BatchPlan(language_model_arguments(*flags.split()), accelerator, num_rows)
        loader = plan.training_loader(ROWS, collate, first_step, order, lines=range(num_rows))
        found.append(list(loader))
    return found


def test_the_ranks_of_a_pipeline_get_the_same_batches_and_pipelines_get_others():
    """Here ranks 0 and 2 are one pipeline, and ranks 1 and 3 are another."""
    flags = "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_steps 3"
    ranks = dealt(flags, 24, 4, pipeline_ranks=2)
    assert ranks[0] == ranks[2] and ranks[1] == ranks[3]
    assert sorted(sum(ranks[0] + ranks[1], [])) == list(range(24))


def test_a_step_has_the_same_rows_on_any_number_of_ranks_and_after_any_step():
    one = dealt("--per_device_train_batch_size 8 --max_steps 9", 24, 1)[0]
    four = dealt("--per_device_train_batch_size 2 --max_steps 9", 24, 4, first_step=2)
    steps = [sorted(sum(batches, [])) for batches in zip(*four, strict=True)]
    assert steps == [sorted(batch) for batch in one[2:]]


def test_a_run_that_began_with_the_listed_order_goes_on_with_it():
    """The first version's: numpy's permutation for (seed, epoch)."""
    flags = "--per_device_train_batch_size 24 --max_steps 3 --seed 7"
    for epoch, batch in enumerate(dealt(flags, 24, 1, order=LISTED)[0]):
        assert batch == np.random.default_rng((7, epoch)).permutation(24).tolist()
