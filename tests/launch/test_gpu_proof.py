# SPDX-License-Identifier: Apache-2.0
"""evidence/gpu_proof.py as far as a CPU allows: cells in their own processes, or why not."""

import json
import sys

import pytest

from launching import run

CELLS = {"micro.found_inf": "ok", "micro.pinned_answer": "skipped", "strategies.one_process": "ok"}


@pytest.fixture(scope="module")
def proof(once):
    """The folder of a proof of CELLS, and what the program printed."""

    def measure(folder):
        done = start(folder)
        assert done.returncode == 0, done.output
        (folder / "output").write_text(done.output)

    folder = once("proof", measure)
    return folder, (folder / "output").read_text()


def start(folder):
    only = "|".join(f"^{name}$" for name in CELLS)
    command = [sys.executable, "evidence/gpu_proof.py", "--device", "cpu", "--tiny", "--only", only]
    return run(*command, "--output", folder)


def record_of(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize(("name", "verdict"), CELLS.items())
def test_each_cell_leaves_a_record_that_says_how_it_was_measured(name, verdict, proof):
    folder, output = proof
    record = record_of(folder, name)
    assert record["verdict"] == verdict, record["error"]
    assert record["cell"] == name
    assert record["proves"]
    assert record["tiny"] is True
    assert "cores" in record["device"]
    assert record["versions"]["torch"]
    assert record["commit"]
    assert name in output


def test_a_skipped_cell_says_why_and_has_no_rows(proof):
    skipped = record_of(proof[0], "micro.pinned_answer")
    assert skipped["error"].startswith("needs a GPU")
    assert skipped["rows"] == []


def test_a_cell_of_strategies_trains_the_shipped_recipe_and_reads_the_shard_report(proof):
    folder, _ = proof
    record = record_of(folder, "strategies.one_process")
    full, qlora = record["rows"]
    for row in (full, qlora):
        assert row["shard report"] == "ok"
        assert row["learns"]
    assert 0 < qlora["optimizer, bytes"] < full["optimizer, bytes"]
    assert record["commands"][0].startswith("python scripts/rehearse.py --device cpu")
    assert str(folder) not in json.dumps(record)  # commands hold on any machine


def test_weights_of_a_finished_cell_are_gone_and_its_texts_are_not(proof):
    folder, _ = proof
    left = {path.suffix for path in (folder / "work").rglob("*") if path.is_file()}
    assert ".safetensors" not in left
    assert {".json", ".jsonl", ".txt"} <= left


def test_what_is_done_is_not_done_again(proof):
    folder, _ = proof
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    again = start(folder)
    assert again.returncode == 0
    assert again.output.count("done before") == 2  # a skipped one is looked at again
    after = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    changed = {path.name for path in before if before[path] != after[path]}
    assert changed == {"micro.pinned_answer.json"}
