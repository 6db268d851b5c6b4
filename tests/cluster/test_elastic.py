# SPDX-License-Identifier: Apache-2.0
"""clusters/torchrun_elastic.sh: from two hosts to one and back to two, in one run.

Both agents run on this machine with one CPU rank each. A host is lost by killing all of its
processes.
"""

import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from launching import CONFIGS, REPO, data_of, read_metrics, rehearse
from slurm_cluster import free_ports

# Enough for a host to come back before the last step: on one host they take longer than a start
STEPS = 200
ROWS = 8  # in a step
PATIENCE = 900  # seconds, of a busy machine
SCRIPT = REPO / "clusters" / "torchrun_elastic.sh"


@pytest.fixture
def start(short_of, tmp_path):
    """A function that starts the script as on one host, and returns its process and its log."""
    (port,) = free_ports(1)
    (tmp_path / "ranks").mkdir()
    variables = {
        # CPU ranks, as scripts/rehearse.py starts them
        "LAUNCHER": "accelerate launch --quiet --mixed_precision no",
        "RANK_PROGRAM": "python scripts/rehearsal/cpu_ranks.py",
        "REHEARSAL_FOLDER": str(tmp_path / "ranks"),
        "REHEARSAL_DEVICE": "cpu",
        "REHEARSAL_RANKS_PER_NODE": "1",
        "ACCELERATE_TORCH_DEVICE": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "GPUS": "1",
        "RDZV_CONF": "last_call_timeout=5",
        "RECIPE": "recipes/llama.py",
        "CONFIG": str(CONFIGS / "ddp.yaml"),
        "OUTPUT_DIR": str(tmp_path / "run"),
        "MEETING": f"127.0.0.1:{port}",
        "HOSTS": "1:2",
        "ROWS_PER_STEP": str(ROWS),
        "BATCH": str(ROWS // 2),
    }
    words = [*data_of(short_of("llama")), "--max_steps", STEPS, "--save_steps", 5]
    started = []

    def start(name, *more, **changes):
        log = tmp_path / f"{name}.log"
        process = subprocess.Popen(
            [str(word) for word in (SCRIPT, *words, "--logging_steps", 1, *more)],
            cwd=REPO,
            env=os.environ | variables | changes,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        if not started:  # Its agent has the store, on which the others depend.
            wait(lambda: answers(port) or process.poll() is not None, "store", log)
        started.append(process)
        return process, log

    yield start
    for process in started:
        kill_all_of(process)


def answers(port):
    """Whether a process of this machine listens on a port."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def kill_all_of(process):
    """Kill a process and all that it has started; nothing happens if it has ended."""
    if process.poll() is None:
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
        process.wait()


def wait(condition, what, *logs):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        text = "\n".join(log.read_text()[-3000:] for log in logs)
        assert time.monotonic() < deadline, f"no {what}:\n{text}"
        time.sleep(0.2)


def steps_in(folder):
    metrics = folder / "metrics.jsonl"
    return [line["step"] for line in read_metrics(folder)[0]] if metrics.exists() else []


def losses_of(folder):
    return [line["loss"] for line in read_metrics(folder)[0]]


def test_a_host_is_lost_and_comes_back(start, short_of, tmp_path):
    first, log = start("first")
    second, _ = start("second")
    wait(lambda: len(steps_in(tmp_path / "run")) >= 8, "step 8", log)
    kill_all_of(second)
    wait(
        lambda: f"x 1 in parallel = {ROWS} rows per step" in log.read_text(), "run on one host", log
    )
    third, other_log = start("third")
    assert first.wait(PATIENCE) == 0, log.read_text()[-3000:]
    assert third.wait(PATIENCE) == 0, other_log.read_text()[-3000:]
    assert steps_in(tmp_path / "run") == list(range(1, STEPS + 1))
    flags = ("--max_steps", STEPS, "--per_device_train_batch_size", ROWS // 2, "--logging_steps", 1)
    flags += ("--output_dir", tmp_path / "whole")
    rehearse("ddp", *data_of(short_of("llama")), *flags, code=0)
    # The same rows in each step; only the order of a sum depends on the number of ranks
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(tmp_path / "whole"), abs=1e-4)
    # Either agent may have rank 0 of the last attempt, which prints
    after_return = log.read_text().split(f"x 1 in parallel = {ROWS} rows per step")[-1]
    assert f"x 2 in parallel = {ROWS} rows per step" in after_return + other_log.read_text()


def test_what_no_restart_cures_ends_the_agents_of_all_hosts(start, tmp_path):
    # Ranks of a rehearsal agree on an exit code; plain ones each have their own.
    plain = {"HOSTS": "2", "RANK_PROGRAM": f"env ACCELERATE_USE_CPU=true {sys.executable}"}
    words = ("--dataset_name", "missing.jsonl")
    agents = [start(name, *words, **plain) for name in ("first", "second")]
    for process, log in agents:
        assert process.wait(PATIENCE) == 65, log.read_text()[-3000:]
        text = log.read_text()
        assert "ended with exit code 65: " in text
        assert text.count("error: ") == 1 and "missing.jsonl" in text, text
    assert not list((tmp_path / "run").glob(".began*"))
