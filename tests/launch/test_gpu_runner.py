# SPDX-License-Identifier: Apache-2.0
"""The runner of the GPU proof limits, kills, records and resumes.

It starts a small program instead of a real cell, so that each test takes a second.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gpu import runner
from gpu.cell import Cell

pytestmark = pytest.mark.cold("processes are looked for in /proc")
# What a cell's process does, by the name of the cell
PROGRAM = """
import json, os, subprocess, sys, time
name = sys.argv[sys.argv.index("--worker") + 1]
work = os.path.join(sys.argv[sys.argv.index("--output") + 1], "work", name)
def outcome(**found):
    with open(os.path.join(work, "outcome.json"), "w") as file:
        json.dump(found, file)
print("the cell", name, "started", flush=True)
if name == "good":
    open(os.path.join(work, "model.safetensors"), "w").close()
    outcome(rows=[{"x": 1}], ok=True, commands=["python x.py"])
if name == "measured":
    outcome(rows=[{"x": 2}], ok=None, commands=[])
if name == "out of bound":
    outcome(rows=[{"x": 3}], ok=False, commands=[])
if name == "skips":
    outcome(skipped="no compiler")
if name == "fails":
    sys.exit("ValueError: it broke")
if name == "half done":
    outcome(rows=[{"x": 4}], ok=True, commands=[])
    sys.exit(3)
if name == "sleeps":
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(sleep, start_new_session=True)
    outcome(rows=[{"child": child.pid}], ok=True, commands=[])
    time.sleep(600)
"""
FACTS = {"device": "a processor", "driver": None, "versions": {"python": "3"}, "commit": "abc"}


@pytest.fixture
def proof(tmp_path, monkeypatch):
    """A proof in tiny on a CPU, whose cells are those of the small program."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    monkeypatch.setattr(runner, "PROGRAM", path)
    return runner.Proof("cpu", True, tmp_path / "out", FACTS)


def cell(name, **facts):
    return Cell(name, f"that {name} works", "", "a bound", **facts)


def run(proof, *names, retry=False, **facts):
    """Run cells of the small program; returns (their verdicts by name, lines printed)."""
    lines = []
    cells = [cell(name, **facts) for name in names]
    records = runner.run_all(cells, proof, retry=retry, show=lines.append)
    return {record["cell"]: record["verdict"] for record in records}, lines


def record_of(proof, name):
    return json.loads((proof.output / f"{name}.json").read_text())


def done_before(lines):
    return ["done before" in line for line in lines]


def test_a_trial_in_tiny_on_a_cpu_is_not_taken_for_the_measurement(proof):
    run(proof, "good")
    on_a_gpu = replace(proof, facts=FACTS | {"device": "a GPU"})
    assert done_before(run(on_a_gpu, "good")[1]) == [False]
    in_full = replace(on_a_gpu, tiny=False)
    assert done_before(run(in_full, "good")[1]) == [False]
    assert done_before(run(in_full, "good")[1]) == [True]


def test_verdicts_follow_from_what_the_cell_left(proof):
    expected = {
        "good": "ok",
        "measured": "measured",
        "out of bound": "not ok",
        "skips": "skipped",
        "fails": "failed",
        "half done": "failed",
    }
    verdicts, lines = run(proof, *expected)
    assert verdicts == expected
    good = record_of(proof, "good")
    assert good["rows"] == [{"x": 1}]
    assert good["commands"] == ["python x.py"]
    assert good["error"] is None
    assert good["bound"] == "a bound"
    assert good["seconds"] >= 0
    assert "python" in good["versions"]
    assert record_of(proof, "skips")["error"] == "no compiler"
    assert "ValueError: it broke" in record_of(proof, "fails")["error"]
    assert record_of(proof, "half done")["rows"] == [{"x": 4}]
    assert len(lines) == 6
    assert "failed" in lines[4]


def test_weights_of_a_finished_cell_are_deleted_and_its_texts_are_not(proof):
    run(proof, "good")
    left = {path.name for path in proof.work_folder(cell("good")).iterdir()}
    assert left == {"outcome.json", "log.txt"}


def test_a_cell_over_its_limit_is_killed_with_all_its_processes_and_keeps_its_rows(proof):
    begun = time.monotonic()
    verdicts, _ = run(proof, "sleeps", limit=1)
    assert verdicts == {"sleeps": "timed out"}
    assert time.monotonic() - begun < 30
    record = record_of(proof, "sleeps")
    assert "killed after 3 s" in record["error"]
    assert "the cell sleeps started" in record["error"]
    child = record["rows"][0]["child"]  # which had moved to a session of its own
    assert not is_alive(child)


def is_alive(process):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return text.rsplit(")", 1)[1].split()[0] != "Z"


def test_a_second_start_does_what_is_missing_and_with_retry_what_failed(proof):
    names = ("good", "fails", "skips")
    run(proof, *names)
    assert done_before(run(proof, *names)[1]) == [True, True, False]
    assert done_before(run(proof, *names, retry=True)[1]) == [True, False, False]


def test_a_broken_record_is_not_taken_for_a_result(proof):
    run(proof, "good")
    (proof.output / "good.json").write_text('{"cell": "go')
    assert done_before(run(proof, "good")[1]) == [False]
    assert record_of(proof, "good")["verdict"] == "ok"


def test_the_total_limit_leaves_out_what_would_not_fit(proof):
    lines = []
    cells = [cell("good", limit=100), cell("measured", limit=10)]
    records = runner.run_all(cells, proof, minutes=1, show=lines.append)
    assert [record["cell"] for record in records] == ["measured"]
    assert "no time" in lines[0]
    assert "its limit is 300 s" in lines[0]
    assert not (proof.output / "good.json").exists()  # to be run another time


def test_what_cannot_run_here_is_skipped_with_the_reason(proof):
    run(proof, "good", cuda_only="it asks CUDA")
    assert record_of(proof, "good")["error"] == "needs a GPU: it asks CUDA"
    run(proof, "good", needs=("torch", "no-such-package", "nor-this"))
    assert record_of(proof, "good")["error"] == "not installed: no-such-package, nor-this"


def test_the_mark_finds_every_process_of_a_cell_and_no_other():
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    mine = {**os.environ, runner.MARK: "mine"}
    marked = subprocess.Popen(sleep, env=mine, start_new_session=True)
    other = subprocess.Popen(sleep, env={**os.environ, runner.MARK: "minefield"})
    try:
        end = time.monotonic() + 10  # until the new process has its own environment
        while runner.marked_processes("mine") != [marked.pid] and time.monotonic() < end:
            time.sleep(0.05)
        assert runner.marked_processes("mine") == [marked.pid]
        runner.kill_marked("mine")
        assert marked.wait(timeout=10) == -9
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
