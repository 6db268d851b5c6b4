# SPDX-License-Identifier: Apache-2.0
"""The published pages: their marks, and tables of what was measured."""

import json

import pytest

from measured import host_memory, save_memory
from measured.rehearsals import all_names, config_names
from proof import markdown
from publish import memory, pages, proof, saving, strategies


@pytest.mark.parametrize(
    "text", ["<!-- proof -->\n", "<!-- proof -->\n<!-- proof -->\n<!-- end of proof -->"]
)
def test_a_table_without_one_end_is_refused(text):
    with pytest.raises(ValueError, match="needs one <!-- proof --> and one <!-- end of proof -->"):
        pages.fill(text, pages.read_results())


@pytest.mark.parametrize(("copies", "places"), [(0, "none"), (2, "a.md, b.md")])
def test_each_table_is_in_one_document(copies, places, tmp_path, monkeypatch):
    found = [tmp_path / name for name in ("a.md", "b.md")]
    marks = {name: f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in pages.BLOCKS}
    others = "".join(text for name, text in marks.items() if name != "proof")
    for number, path in enumerate(found):
        path.write_text(others * (number == 0) + marks["proof"] * (number < copies))
    monkeypatch.setattr(pages, "documents", lambda: found)
    with pytest.raises(ValueError, match=rf"proof --> belongs in one document, and is in {places}"):
        pages.fill_documents(pages.read_results())


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ("checkpoint_memory", all_names()),
        ("host_memory", config_names()),
        ("planner_ranks", all_names()),
    ],
)
def test_what_is_measured_under_each_yaml_has_all_of_them(table, names):
    rows = pages.read_results()[table]["rows"]
    assert {row["config"] for row in rows} == set(names)


@pytest.mark.parametrize(
    "write",
    [
        lambda path, row: save_memory.write_table(path, row, []),
        lambda path, row: host_memory.write_table(path, 1, row),
    ],
    ids=["checkpoint_memory", "host_memory"],
)
def test_measuring_one_yaml_again_keeps_the_rows_of_the_others(write, tmp_path):
    path = tmp_path / "results.json"
    for config, value in (("fsdp2_full_shard", 1), ("ddp", 2), ("fsdp2_full_shard", 3)):
        write(path, {"config": config, "ranks": 2, "value": value})
    rows = json.loads(path.read_text())["rows"]
    assert [(row["config"], row["value"]) for row in rows] == [("ddp", 2), ("fsdp2_full_shard", 3)]


def test_a_yaml_has_its_place_by_its_kind():
    names = ["deepspeed_zero3", "fsdp1_no_shard", "fsdp2_full_shard", "ddp", "single"]
    expected = ["single", "ddp", "fsdp2_full_shard", "fsdp1_no_shard", "deepspeed_zero3"]
    assert sorted(names, key=strategies.rank_of) == expected
    with pytest.raises(ValueError, match="a new kind"):
        strategies.rank_of("pipeline")


def test_the_largest_difference_is_of_the_runs_that_report_one():
    rows = [{"differences": {"loss": value}} for value in (1e-7, None, 3e-6)]
    assert strategies.largest(rows, "loss") == 3e-6
    assert strategies.largest(rows[1:2], "loss") is None
    assert strategies.with_bound(rows, "loss", {"loss": 1e-5}) == "0.000003 (0.00001)"
    assert strategies.with_bound(rows[1:2], "loss", {"loss": 1e-5}) == ""


@pytest.mark.parametrize(
    ("number", "text"), [(2.4e-7, "0.0000002"), (0.0, "0"), (0.02, "0.02"), (9.6e-7, "0.000001")]
)
def test_a_small_number_is_written_without_an_exponent(number, text):
    assert markdown.decimal(number) == text


@pytest.mark.parametrize(
    ("sizes", "text"),
    [([100, 100], "1"), ([50, 51], "0.51"), ([50, 50], "1/2"), ([20, 32], "0.32")],
)
def test_a_share_is_what_was_measured_on_the_fullest_rank(sizes, text):
    held = {"shards": 4, "ranks": [[size, 25] for size in sizes]}
    assert strategies.share_text(held, whole=100) == text
    assert strategies.share_text(None, whole=100) == ""


def test_the_table_of_proof_tells_what_failed():
    results = pages.read_results()
    kills = [{"figure": 3, "count": 5, "ok": ok} for ok in (True, True, False)]
    beside_saves = [{"figure": 4, "count": 5, "ok": ok} for ok in (True, False)]
    changed = results["fault_injection"] | {
        "random kills": {"trials": kills},
        "random kills, --async_save": {"trials": beside_saves},
    }
    text = proof.proof_block(results | {"fault_injection": changed})
    assert "10 of 15 `kill -9` at random moments, at most 3 steps lost" in text
    assert "5 of 10 with `--async_save`, at most 4 lost" in text


def test_the_table_of_proof_shows_the_worst_plans_too():
    results = pages.read_results()
    drawn = [
        {"kind": "drawn", proof.FORMULAS: 0.0},
        {"kind": "drawn", proof.FORMULAS: -0.08},
        {"kind": "one thing", proof.FORMULAS: 0.5},
    ]
    text = proof.proof_block(results | {"planner": {"cells": drawn}})
    (row,) = [line for line in text.splitlines() if "random settings" in line]
    assert "2 fp32 jobs with random settings: mean error 4.00%, largest 8.00%" in row


def test_bytes_show_the_fullest_rank_and_its_share():
    held = {"shards": 4, "ranks": [[1000, 1000], [1200, 1000]]}
    assert strategies.bytes_text(held) == "1,200 (1/4)"
    assert strategies.bytes_text(held | {"shards": 1}) == "1,200"
    assert strategies.bytes_text(None) == ""


@pytest.mark.parametrize(
    ("error", "text"), [(0.01234, "+1.23%"), (-0.01234, "-1.23%"), (-1e-6, "+0.00%")]
)
def test_an_error_has_its_sign(error, text):
    assert memory.signed(error) == text


# ---- Memory of a save ----


def saved(grown):
    """What one rank took to save a share of 100 MB whose largest tensor has 20 MB."""
    return {
        "grown": [grown * saving.MB],
        "shares": [100 * saving.MB],
        "largest": 20 * saving.MB,
    }


@pytest.mark.parametrize("kind", saving.KINDS)
def test_a_rank_that_takes_more_than_its_bound_is_bold_and_fails_the_measurement(kind):
    row = {"config": "ddp", "ranks": 1} | dict.fromkeys(saving.KINDS, saved(140))
    assert saving.is_within(row)
    assert "**" not in saving.checkpoint_memory_table([row])
    row[kind] = saved(141)
    assert not saving.is_within(row)
    assert saving.checkpoint_memory_table([row]).count("**141**") == 1
