# SPDX-License-Identifier: Apache-2.0
"""Parity calls nothing equal that is not, and what is published is what was measured."""

import json
import math
import re
from statistics import median

import numpy as np
import pytest
from safetensors.numpy import save_file

from launching import REPO
from proof import jobs
from proof.compare import BOUNDS, bounds_of, compare, within
from proof.parity_table import merge, run_of
from publish import pages
from tables_speed import cell_of, milliseconds_more, paired, values

RESULTS = json.loads((REPO / "results" / "parity.json").read_text())


def finished_run(folder, losses=(1.0, 2.0), norms=(1.0, 1.0), weights=(1.0, 2.0), name="weight"):
    """A folder as a run leaves it."""
    folder.mkdir()
    pairs = zip(losses, norms, strict=True)
    lines = [{"loss": loss, "grad_norm": norm, "learning_rate": 1e-3} for loss, norm in pairs]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    save_file({name: np.array(weights, dtype="float32")}, folder / "model.safetensors")
    return folder


def test_equal_runs_differ_by_nothing(tmp_path):
    found = compare(finished_run(tmp_path / "a"), finished_run(tmp_path / "b"))
    assert found == dict.fromkeys(BOUNDS, 0.0) and within(found, BOUNDS)


@pytest.mark.parametrize(
    ("number", "change"),
    [
        ("loss", {"losses": (1.0, 2.0 + 4e-6)}),
        ("loss", {"losses": (1.0, math.nan)}),
        ("grad_norm", {"norms": (1.0, 0.0)}),
        ("grad_norm", {"norms": (1.0, None)}),
        ("weights", {"weights": (1.0, 2.0001)}),
        ("weights", {"weights": (1.0, math.nan)}),
        ("weights", {"weights": (0.0, 0.0)}),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_number_that_differs_is_out_of_bounds(number, change, swapped, tmp_path):
    changed = finished_run(tmp_path / "a", **change)
    sound = finished_run(tmp_path / "b")
    found = compare(sound, changed) if swapped else compare(changed, sound)
    assert not within(found, BOUNDS)
    assert within(found | {number: 0.0}, BOUNDS)  # and nothing else is


def test_runs_with_other_tensors_or_steps_cannot_be_compared(tmp_path):
    sound = finished_run(tmp_path / "a")
    with pytest.raises(ValueError, match="different tensors"):
        compare(finished_run(tmp_path / "b", name="other"), sound)
    with pytest.raises(ValueError, match="zip"):
        compare(finished_run(tmp_path / "c", losses=(1.0,), norms=(1.0,)), sound)


def test_nothing_that_was_measured_is_out_of_bounds():
    for row in RESULTS["rows"]:
        if row["verdict"] == "ok":
            bounds, _ = bounds_of(run_of(row))
            assert row["bytes"] == "ok" and within(row["differences"], bounds), row


def test_every_run_was_measured_or_is_named_as_not_measured_yet():
    measured = {run_of(row): row["verdict"] for row in RESULTS["rows"]}
    page = (REPO / "docs" / "proof.md").read_text()
    known = {run.recipe for run in measured}
    expected = {}
    for run in jobs.all_runs():
        if run.recipe in known:
            expected[run] = "refused" if jobs.is_refused(run) else "ok"
    if "not measured yet: `python evidence/parity.py --groups bf16`" in page:
        expected = {run: verdict for run, verdict in expected.items() if run.group != "bf16"}
    assert measured == expected
    told = re.search(r"Not measured yet under every YAML: (.*?)\.\s", page, re.DOTALL)
    named = set(re.findall(r"`(\w+)\.py`", told[1])) if told else set()
    assert set(jobs.MAKERS) - known == named


def test_what_is_measured_again_takes_the_place_of_its_rows_alone():
    before = RESULTS["rows"]
    chosen = [run for run in jobs.all_runs() if (run.recipe, run.config) == ("t5", "ddp")]
    again = [row | {"verdict": "again"} for row in before if run_of(row) in chosen]
    reference = next(row for row in before if row["config"] == "single")
    gone = reference | {"flags": ["--a_flag_of_old"]}
    merged = merge([*again, reference], [*before, gone], chosen)
    assert {run_of(row) for row in merged} == {run_of(row) for row in before}
    assert len(merged) == len(before)
    assert {run_of(row) for row in merged if row["verdict"] == "again"} == set(chosen)


def test_rows_from_before_are_held_to_the_bounds_of_today():
    run = next(run for run in jobs.all_runs() if run.config == "deepspeed_zero2")
    before = next(row for row in RESULTS["rows"] if run_of(row) == run)
    older = before | {"bounds": before["bounds"] | {"loss": 1.0}, "why": "an older reason"}
    assert merge([], [older], chosen=[]) == [before]
    worse = older | {"differences": older["differences"] | {"loss": 0.5}}
    assert merge([], [worse], chosen=[])[0]["verdict"] == "OUT OF BOUNDS"


@pytest.mark.parametrize("config", jobs.configs())
def test_every_rank_of_every_yaml_held_what_was_promised(config):
    rows = [row for row in RESULTS["rows"] if row["group"] == "strategies"]
    full = {
        row["ranks"]: row for row in rows if (row["config"], row["weights"]) == (config, "full")
    }
    for ranks in {jobs.ranks_of(config, 2), jobs.ranks_of(config, 4)}:
        held = full[ranks]["held"].values()
        assert full[ranks]["bytes"] == "ok"
        assert all(len(one_class["ranks"]) == ranks for one_class in held)


def test_the_tables_are_those_of_the_measurements():
    again = "python evidence/readme_tables.py"
    results = pages.read_results()
    for path, text in pages.fill_documents(results).items():
        assert path.read_text() == text, again
    assert pages.whole(results) == (REPO / "results" / "README.md").read_text(), again


def test_the_readme_tells_the_measured_speed():
    readme = (REPO / "README.md").read_text()
    told_there = re.search(r"\*\*No framework tax\.\*\*(.*?)\n\n", readme, re.DOTALL)[1]
    medium = cell_of("matched, medium")
    nothing = cell_of("matched, near zero")
    shipped = cell_of("shipped, medium")
    slower = median(paired(nothing, "ours", "floor", of=milliseconds_more))
    told = ["36M", f"{slower:.1f}"]
    for label in ("trainer", "trl packed"):
        ratios = paired(shipped, "ours", label, "tokens_per_second")
        told.append(f"{median(ratios):.1f}")
    assert re.findall(r"\d[0-9.]*M?\b", told_there) == told
    assert median(paired(medium, "ours", "floor")) <= 1  # no slower
    losses = {}
    for label in ("ours", "trainer", "trl packed"):
        found = values(shipped, label, "held_out_loss")
        losses[label] = median(found.values())
    assert losses["ours"] == min(losses.values()), losses  # as low a loss
