# SPDX-License-Identifier: Apache-2.0
"""--report_to trackio works without a network: its store has what metrics.jsonl has, once."""

import json
import sys

import pytest

from launching import read_rows, recipe, rehearse, run, starting_cold
from net import data_of

JOB = [
    *"--eval_strategy steps --eval_steps 2 --save_steps 2".split(),
    *"--per_device_train_batch_size 3 --report_to trackio".split(),
]
# Prints all runs of a project as trackio's own functions read them from its store
READ = """
import json, sys, trackio
from trackio.sqlite_storage import SQLiteStorage
found = []
for run in trackio.Api().runs(sys.argv[1]):
    logs = SQLiteStorage.get_logs(run.project, run.name, run_id=run.id)
    found.append({"name": run.name, "config": run.config, "logs": logs})
print(json.dumps(found))
"""
# Loaded by each process at its start: it notes each address outside this machine
GUARD = """
import os, socket
connect, look_up = socket.socket.connect, socket.getaddrinfo
local = ("127.0.0.1", "::1", "localhost", socket.gethostname(), None, "")
def note(host):
    if host not in local:
        with open(os.environ["NOTED"], "a") as file:
            file.write(f"{host}\\n")
def noting_connect(self, address):
    if isinstance(address, tuple):
        note(address[0])
    return connect(self, address)
def noting_look_up(host, *rest, **more):
    note(host)
    return look_up(host, *rest, **more)
socket.socket.connect, socket.getaddrinfo = noting_connect, noting_look_up
"""


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A folder of its own for what trackio keeps."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    return tmp_path / "store"


def runs_in_store():
    done = run(sys.executable, "-c", READ, "llama", stderr=None)
    return json.loads(done.stdout.splitlines()[-1])


def metrics_of(folder):
    """The lines of metrics.jsonl, without values that no tracker gets."""
    lines = []
    for line in read_rows(folder / "metrics.jsonl"):
        lines.append({name: value for name, value in line.items() if value is not None})
    return lines


def logged(run_of_store):
    """What trackio has of each line, without the time at which it was told."""
    lines = [dict(line) for line in run_of_store["logs"]]
    for line in lines:
        assert line.pop("timestamp")
    return lines


def test_trackio_has_each_line_of_metrics_once_and_no_process_looks_outside(
    tiny, store, tmp_path, monkeypatch
):
    """Of a run that continues on two ranks."""
    (tmp_path / "guard").mkdir()
    (tmp_path / "guard" / "sitecustomize.py").write_text(GUARD)
    monkeypatch.setenv("NOTED", str(tmp_path / "noted"))
    monkeypatch.delenv("HF_HUB_OFFLINE")  # as for a user
    monkeypatch.setenv("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # `datasets` counts what is loaded
    words = [*data_of(tiny), *JOB, "--output_dir", tmp_path / "run", "--max_steps"]
    with monkeypatch.context() as patched, starting_cold():  # Each process loads the guard
        patched.setenv("PYTHONPATH", str(tmp_path / "guard"))
        batch = ["--per_device_train_batch_size", 6]
        output = recipe(*words, 2, *batch, code=0).output
        call = "import socket, contextlib\nwith contextlib.suppress(OSError):\n"
        assert not (tmp_path / "noted").exists(), (tmp_path / "noted").read_text()
        run(sys.executable, "-c", f"{call} socket.create_connection(('host.invalid', 1))")
        assert (tmp_path / "noted").read_text() == "host.invalid\n"  # It would have seen it
    assert "Reserved keys" not in output
    rehearse("ddp", *words, 4, "--allow_change", "max_steps", num_processes=2, code=0)

    (found,) = runs_in_store()
    assert found["name"] == str(tmp_path / "run") and found["config"]["eval_steps"] == "2"
    expected = metrics_of(tmp_path / "run")
    assert [line["step"] for line in expected] == [1, 2, 2, 3, 4, 4]  # With two evaluations
    assert logged(found) == expected
