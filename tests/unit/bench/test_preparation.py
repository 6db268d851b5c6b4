# SPDX-License-Identifier: Apache-2.0
"""evidence/benchmark_rows.py: no figure without equal rows, and a busy machine is named."""

import sys

import pytest

import benchmark_rows
from bench import preparation, preparation_tables
from bench.preparation import conversations, judge
from bench.timed_rows import digest
from components.chat import DEFAULT_CHAT_TEMPLATE
from tiny import chat


def run_of(contestant, digests=("a", "b"), repeat=0, **facts):
    run = {
        "contestant": contestant,
        "repeat": repeat,
        "load": [0.2, 1.0],
        "loaded": False,
        "digests": list(digests),
        "cpu_seconds": 2.0,
        "rows_per_second": 1000.0,
    }
    return run | facts


def cell_of(*runs, any_load=False):
    cell = {"cell": "one question", "rows": 2, "device": "none", "date": "2026-01-01"}
    cell |= {"commit": "0", "versions": {"trl": "1"}, "max_length": 2048}
    return cell | {"runs": judge(runs, any_load)}


def voids(*runs, any_load=False):
    return [run["void"] for run in judge(runs, any_load)]


# ---- The gate ----
def test_equal_rows_are_valid_and_their_digests_are_left_out():
    judged = judge([run_of("ours"), run_of("trl")], any_load=False)
    assert [run["void"] for run in judged] == ["", ""]
    assert all("digests" not in run for run in judged)


@pytest.mark.parametrize(
    ("ours", "reason"),
    [
        ({"digests": ["a", "c"]}, "ours has other tokens or labels in 1 of 2 rows, first in row 2"),
        ({"digests": ["a"]}, "ours has 1 rows, trl 2"),
        ({"failed": "exit code 1"}, "ours failed"),
    ],
)
def test_one_run_with_other_rows_voids_all(ours, reason):
    found = voids(run_of("ours", **ours), run_of("trl"), run_of("ours", repeat=1))
    assert found == [reason] * 3


def test_a_reference_that_failed_voids_all():
    assert voids(run_of("ours"), run_of("trl", failed="exit code 1")) == ["trl failed"] * 2


def test_a_disturbed_run_counts_only_if_any_load_is_accepted():
    runs = [run_of("ours", loaded=True), run_of("trl")]
    assert voids(*runs) == ["loaded", ""]
    assert voids(*runs, any_load=True) == ["", ""]


def test_a_digest_depends_on_the_labels_too():
    assert digest([1, 2], [-100, 2]) == digest((1, 2), (-100, 2))
    assert digest([1, 2], [-100, 2]) != digest([1, 2], [-100, -100])
    assert digest([1, 2], [-100, 2]) != digest([1, 2, 3], [-100, 2, -100])


# ---- What is read ----
def test_conversations_have_as_many_questions_as_requested():
    pairs = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(5)]
    rows = list(conversations(pairs, 2))
    assert [message["content"] for message in rows[1]["messages"]] == ["q2", "a2", "q3", "a3"]
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant"] * 2
    assert len(rows) == 2  # the fifth question is left out
    (row,) = conversations([{"prompt": "q", "completion": "a"}], 1)
    assert [message["content"] for message in row["messages"]] == ["q", "a"]


def test_the_marks_are_all_that_the_template_loses():
    unmarked = preparation.MARK.sub("", chat.CHAT_TEMPLATE)
    assert "generation %}" not in unmarked and "endgeneration" not in unmarked
    assert unmarked.count("add_generation_prompt") == 1
    assert preparation.MARK.sub("", "{%- generation -%}x{%- endgeneration -%}") == "x"
    assert preparation.MARK.sub("", DEFAULT_CHAT_TEMPLATE) == DEFAULT_CHAT_TEMPLATE


# ---- What is reported ----
def test_the_table_has_rates_and_how_many_times_that_of_sfttrainer():
    fast = [run_of("ours", rows_per_second=2100.0, repeat=i) for i in range(2)]
    slow = [run_of("trl", rows_per_second=1000.0, repeat=i) for i in range(2)]
    text = preparation_tables.block({"cells": [cell_of(*fast, *slow)]})
    lines = [line.split("|")[2:-1] for line in text.splitlines()[2:]]
    found = [[part.strip() for part in line] for line in lines]
    assert found == [["this recipe", "2,100", "2.10"], ["SFTTrainer", "1,000", ""]]
    assert "other work" not in text


def test_a_void_cell_shows_no_figure():
    results = {"cells": [cell_of(run_of("ours", ["a", "c"]), run_of("trl"))]}
    for text in (preparation_tables.block(results), preparation_tables.details(results)):
        assert "other tokens or labels" in text
        assert "1,000" not in text and "2.00" not in text


def test_a_table_of_runs_beside_other_work_says_so():
    busy = run_of("ours", loaded=True, load=[3.0, 6.44])
    results = {"cells": [cell_of(busy, run_of("trl"), any_load=True)]}
    text = preparation_tables.block(results)
    assert "other work during 1 of 2 runs (load average up to 6.4)" in text
    assert "load average up to 6.4" in preparation_tables.details(results)


def test_without_measurements_there_are_no_figures():
    assert preparation_tables.block(None).startswith("Not measured yet")


# ---- The command ----
@pytest.mark.parametrize("words", [["--repeats", "0"], ["--data", "missing"], ["--nothing"]])
def test_a_wrong_call_is_one_line_and_64(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark_rows.py", *words])
    with pytest.raises(SystemExit) as stopped:
        benchmark_rows.main()
    assert stopped.value.code == 64
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_smoke_test_writes_no_results_unless_a_file_is_named(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmark_rows.py", "--smoke"])
    assert benchmark_rows.parse_args()[1].json is None
