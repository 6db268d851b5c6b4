# SPDX-License-Identifier: Apache-2.0
"""evidence/benchmark_rows.py: both sides prepare the same rows, and a difference is void."""

import json
import re
import sys
from pathlib import Path

import pytest

import benchmark_rows
from bench.preparation import CONTESTANTS, Settings, judge, run_once

CELL = "four questions"


@pytest.fixture(scope="module")
def folder(once):
    """The folder of one of the cells, measured once."""
    return once("benchmark_rows", measure)


def measure(folder):
    words = ["--smoke", "--repeats", "1", "--output_dir", folder, "--json", folder / "out.json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark_rows, "CELLS", [CELL])
        patch.setattr(sys, "argv", ["benchmark_rows.py", *map(str, words)])
        assert benchmark_rows.main() == 0


def test_all_contestants_prepare_the_same_rows(folder):
    text = (folder / "out.json").read_text()
    (cell,) = json.loads(text)["cells"]
    assert (cell["cell"], cell["rows"]) == (CELL, 16)
    assert [run["contestant"] for run in cell["runs"]] == list(CONTESTANTS)
    assert {run["void"] for run in cell["runs"]} == {""}
    assert len({(run["tokens"], run["trained_on"]) for run in cell["runs"]}) == 1
    for run in cell["runs"]:
        assert run["cpu_seconds"] > 0
        assert 0 < run["trained_on"] < run["tokens"]
    assert cell["versions"]["tokenizers"]
    assert "/home" not in text and str(Path(sys.executable).parent) not in text


def test_a_template_that_does_not_end_turns_alike_is_void(folder, tmp_path):
    settings = Settings(folder / "smoke", folder, smoke=True)
    reference = {"contestant": "trl", "loaded": False}
    record = folder / "smoke" / "runs" / "four_questions" / "trl" / "record.json"
    reference |= json.loads(record.read_text())
    template = settings.unmarked_template
    right = template.read_text()
    template.write_text(re.sub(r" \+ '<\|end_of_turn\|>'", " + ' <|end_of_turn|>'", right, count=1))
    assert template.read_text() != right
    planted = run_once(CELL, "ours without marks", settings)
    template.write_text(right)
    reasons = {run["void"] for run in judge([planted, reference], any_load=False)}
    assert reasons == {
        "ours without marks has other tokens or labels in 16 of 16 rows, first in row 1"
    }
