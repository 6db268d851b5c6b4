# SPDX-License-Identifier: Apache-2.0
"""The published table: what it shows, and that the families in it are as they should be."""

import json

from families import tables
from families.catalog import FAMILIES
from families.launches import KINDS
from launching import REPO

RUN = {"losses": [6.0, 5.0], "trained": 4.5, "loaded": 4.5}
ROW = {
    "family": "llama",
    "own_loss": 6.0,
    "router_loss": None,
    "attention": "sdpa",
    "full": RUN,
    "LoRA": RUN | {"trained": 4.0, "loaded": 4.0, "adapters": 14, "untrained": []},
    "FSDP": RUN | {"losses": [6.000003, 5.0]},
    "verdict": "ok",
    "problems": [],
}
REFUSED = {"family": "aria", "verdict": "FAILED", "problems": ["full: exit code 64: a | b"]}


def test_a_line_has_the_largest_difference_of_the_three_runs():
    cells = tables.cells_of(ROW)
    expected = ["`llama`", "sdpa", "6.0000", "0.0000005", "4.5000", "4.0000", "14", "0", ""]
    assert cells == expected


def test_a_family_that_fails_comes_last_with_its_reason():
    last = tables.families_table([REFUSED, ROW]).splitlines()[-1]
    assert last.startswith("| `aria`") and "full: exit code 64: a / b" in last


def test_a_router_has_its_remark():
    (remark,) = tables.remarks(ROW | {"router_loss": 0.0123})
    assert remark == "router's loss, not trained on: 0.0123"


def test_what_was_not_measured_is_said():
    assert "Not measured yet" in tables.block(None)


def test_the_block_counts_those_that_work():
    measured = {"rows": [ROW, REFUSED], "versions": {"torch": "2"}}
    block = tables.block(measured)
    assert block.startswith("1 of 2 families") and "at most 0.0000005" in block


# ---- Published ----
ROWS = json.loads((REPO / "results" / "model_families.json").read_text())["rows"]
GOOD = [row for row in ROWS if row["verdict"] == tables.OK]


def test_every_family_of_the_catalog_was_measured():
    assert [row["family"] for row in ROWS] == list(FAMILIES)


def test_the_published_families_are_within_the_bound():
    assert len(GOOD) >= 40
    for row in GOOD:
        assert row.keys() >= KINDS.keys()
        differences = tables.first_differences(row) + tables.loaded_differences(row)
        assert max(differences) <= tables.BOUND, row["family"]


def test_each_published_failure_has_a_reason():
    assert all(row["problems"] for row in ROWS if row not in GOOD)


def test_families_of_several_attentions_are_among_them():
    assert {row["attention"] for row in GOOD} == {"sdpa", "eager"}
