# SPDX-License-Identifier: Apache-2.0
"""Batches cover every row once in each epoch, however they are cut."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from components.batches import BatchPlan, describe_batch, global_batches
from components.lines import OnePerLine
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
    batches = global_batches(num_rows, batch_size, window, num_epochs=2, seed=0)
    assert len(batches) % window == 0
    steps = [sorted(sum(batches[i : i + window], [])) for i in range(0, len(batches), window)]
    half = len(steps) // 2
    assert sorted(sum(steps[:half], [])) == sorted(sum(steps[half:], [])) == list(range(num_rows))
    whole = global_batches(num_rows, 12, 1, num_epochs=2, seed=0)
    assert steps == [sorted(batch) for batch in whole]
    assert all(steps)  # no step without rows


def test_the_order_is_a_function_of_seed_and_epoch():
    order = [global_batches(50, 50, 1, num_epochs=2, seed=seed) for seed in (0, 0, 1)]
    assert order[0] == order[1] != order[2] and order[0][0] != order[0][1]
    assert global_batches(5, 2, 1) == [[0, 1], [2, 3], [4]]  # sequential


def test_rows_of_one_length_come_together_and_each_comes_once():
    lengths = np.random.default_rng(0).integers(1, 513, 1000)
    batches = global_batches(1000, 4, 6, 2, seed=0, lengths=lengths)
    assert Counter(row for batch in batches for row in batch) == {row: 2 for row in range(1000)}
    filled = [batch for batch in batches if batch]
    fill = [lengths[batch].sum() / (len(batch) * lengths[batch].max()) for batch in filled]
    assert np.mean(fill) > 0.97
    assert batches == global_batches(1000, 4, 6, 2, seed=0, lengths=lengths)
    assert len(batches) == len(global_batches(1000, 4, 6, 2, seed=0))  # as many steps


def test_the_ranks_of_a_pipeline_get_the_same_batches_and_pipelines_get_others():
    """Here ranks 0 and 2 are one pipeline, and ranks 1 and 3 are another."""
    accelerator = fake_accelerator(num_processes=4, pipeline_ranks=2, prepare=lambda it: it)
    rows = SimpleNamespace(dataset=SimpleNamespace(select_columns=lambda _: None))

    def collate(source, lines):
        return lines

    collate.columns = []
    flags = "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_steps 3".split()
    plan = BatchPlan(language_model_arguments(*flags), accelerator, 24)
    assert plan.rows_per_step == 8
    loader = plan.training_loader(rows, collate, 0, OnePerLine(24))
    dealt = [loader.batch_sampler[rank::4] for rank in range(4)]
    assert dealt[0] == dealt[2] and dealt[1] == dealt[3]
    assert sorted(sum(dealt[0] + dealt[1], [])) == list(range(24))


# ---- Summary ----
def test_the_effective_batch_is_told_as_a_product():
    flags = "--per_device_train_batch_size 4 --gradient_accumulation_steps 2".split()
    gpus = fake_accelerator(num_processes=8, device=torch.device("cuda"))
    says = "4 rows x 2 micro-batches x 8 GPUs = 64 rows per step, about 6,400 tokens"
    assert describe_batch(language_model_arguments(*flags), gpus, "rows", 100) == says
    pipelines = fake_accelerator(num_processes=8, pipeline_ranks=4)
    says = "4 rows x 2 batches x 2 pipelines = 16 rows per step"
    assert describe_batch(language_model_arguments(*flags), pipelines, "rows") == says
    one = describe_batch(language_model_arguments(), fake_accelerator(), "pairs")
    assert one == "8 pairs x 1 micro-batch x 1 process = 8 pairs per step"
