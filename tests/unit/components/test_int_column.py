# SPDX-License-Identifier: Apache-2.0
"""A column that is read from disk has the values of an array, also of rows that were selected."""

import numpy as np
import pytest
from datasets import Dataset, concatenate_datasets

from components.int_column import IntColumn, column_of, stable_argsort

VALUES = np.random.default_rng(0).integers(0, 99, 50)


@pytest.fixture(params=["whole", "in chunks", "selected", "a slice"])
def found(request):
    """(a data set, the values of its column)."""
    whole = Dataset.from_dict({"length": VALUES, "kept": VALUES > 40})
    parts = [whole.select(range(start, start + 10)) for start in range(0, 50, 10)]
    numbers = np.array([7, 7, 49, 0, 13, 20])
    return {
        "whole": (whole, VALUES),
        "in chunks": (concatenate_datasets(parts), VALUES),
        "selected": (concatenate_datasets(parts).select(numbers), VALUES[numbers]),
        "a slice": (whole.select(range(5, 31)), VALUES[5:31]),
    }[request.param]


def test_a_column_has_the_values_of_an_array(found):
    dataset, values = found
    column = IntColumn.of(dataset, "length")
    assert len(column) == len(values)
    assert np.array_equal(column[1:4], values[1:4])
    assert np.array_equal(np.concatenate([column[:3], column[3:]]), values)
    rows = np.array([len(values) - 1, 0, 3, 3])
    assert np.array_equal(column[rows], values[rows])
    assert np.array_equal(np.concatenate(list(column.arrays())), values)
    assert (column.sum(), column.max()) == (values.sum(), values.max())
    assert column.mean() == pytest.approx(values.mean())
    assert IntColumn.of(dataset, "kept").sum() == (values > 40).sum()
    assert column_of(dataset, "length").to_pylist() == values.tolist()


def test_no_rows_have_no_values():
    column = IntColumn.of(Dataset.from_dict({"length": VALUES}), "length")
    assert column[np.array([], dtype=np.int64)].tolist() == []


@pytest.mark.parametrize("largest", [3, 255, 256, 65_535, 65_536, 2**40])
def test_places_in_ascending_order_are_those_of_a_stable_sort(largest):
    values = np.random.default_rng(0).integers(0, largest, 1000, endpoint=True)
    values[::100] = largest
    assert np.array_equal(stable_argsort(values), np.argsort(values, kind="stable"))
