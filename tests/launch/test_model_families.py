# SPDX-License-Identifier: Apache-2.0
"""The command that measures model families: a plain one, one without SDPA, and a mixture."""

import json
import sys

import pytest

from families.tables import BOUND, KINDS, first_differences, loaded_differences
from launching import REPO, run

ATTENTION = {"llama": "sdpa", "gemma2": "eager", "qwen3_moe": "sdpa"}


@pytest.fixture(scope="module")
def rows(once):
    """The rows of three families by their names."""

    def measure(folder):
        words = ["--families", *ATTENTION, "--json", folder / "rows.json"]
        done = run(sys.executable, REPO / "scripts" / "model_families.py", *words)
        assert done.returncode == 0, done.output

    folder = once("model_families", measure)
    return {row["family"]: row for row in json.loads((folder / "rows.json").read_text())["rows"]}


@pytest.mark.parametrize("family", ATTENTION)
def test_a_family_trains_as_transformers_would_and_its_results_load(family, rows):
    row = rows[family]
    assert row["verdict"] == "ok" and row["problems"] == []
    assert row["attention"] == ATTENTION[family]
    differences = first_differences(row) + loaded_differences(row)
    assert len(differences) == 2 * len(KINDS) and max(differences) <= BOUND
    for kind in KINDS:
        assert row[kind]["trained"] < row[kind]["losses"][-1] < row[kind]["losses"][0]
    assert row["LoRA"]["adapters"] >= 8 and row["LoRA"]["untrained"] == []


def test_only_a_mixture_has_a_routers_loss(rows):
    assert rows["qwen3_moe"]["router_loss"] > 0
    assert rows["llama"]["router_loss"] is rows["gemma2"]["router_loss"] is None
