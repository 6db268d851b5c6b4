# SPDX-License-Identifier: Apache-2.0
"""The start of many ranks, simulated: rows go to one rank each, and owners have what they must."""

import pytest

from bench import start
from bench.start_tables import NOT_MEASURED, block


@pytest.fixture(scope="module")
def rows():
    return start.RowsWithLengths(60_000)


@pytest.mark.parametrize("strategy", start.STRATEGIES)
def test_all_ranks_together_get_each_row_once(rows, strategy):
    dealt = []
    for rank in range(50):
        for batch in start.batches_of(rank, 50, rows, strategy):
            dealt += batch
    assert sorted(dealt) == list(range(60_000))


@pytest.mark.parametrize("strategy", start.STRATEGIES)
def test_a_deal_is_measured_on_all_ranks_or_where_they_sort_on_some(rows, strategy):
    row = start.measure_deal(50, rows, strategy)
    assert row["simulated"] == (16 if strategy == "group_by_length" else 50)
    assert row["first_ms"] > 0
    assert 0 < row["peak_bytes"] < 50 * 2**20


def test_ranks_that_get_the_same_rows_are_an_error(rows, monkeypatch):
    monkeypatch.setattr(start, "batches_of", lambda rank, *_: iter([[rank // 2]]))
    with pytest.raises(ValueError, match="25 rows went to two of 50 ranks"):
        start.measure_deal(50, rows, "random")


def test_owners_have_at_most_an_equal_share_and_the_largest_tensor():
    sizes = start.tensors_of_state("8B")
    assert sum(sizes.values()) == pytest.approx(12 * 8.03e9, rel=1e-3)
    for ranks in (8, 1024):
        row = start.measure_owners("8B", sizes, ranks)
        assert row["largest_share"] <= row["whole"] / ranks + row["largest_tensor"]
        assert row["largest_share"] >= max(row["whole"] / ranks, row["largest_tensor"])


def test_the_tables_say_what_was_measured_or_that_nothing_was():
    deal = {"strategy": "random", "ranks": 1024, "simulated": 1024, "first_ms": 3.21}
    deal |= {"further_ms": 0.25, "peak_bytes": 2**20}
    owners = {"model": "70B", "ranks": 1024, "tensors": 2892, "whole": 2**40, "ms": 208.3}
    owners |= {"largest_share": 2**32, "largest_tensor": 2**32}
    planner = {"model": "70B", "ranks": 1024, "peak": 2**34, "seconds": 11.41}
    text = block({"deal": [deal], "owners": [owners], "planner": [planner]})
    assert "| `random` " in text and "| 1,024 | 1,024 " in text
    assert "| 70B   | 1,024 | 2,892   | 1.00 " in text
    assert "| 70B   | 1,024 | 16.0 " in text
    assert block(None) == NOT_MEASURED
