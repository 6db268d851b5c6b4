# SPDX-License-Identifier: Apache-2.0
"""clusters/torchrun_elastic.sh ends on all hosts with what no restart cures.

Both agents run on this machine. That a host is lost and comes back is in tests/hosts.
"""

import os
import socket
import subprocess
import sys
import time

from launching import CONFIGS, REPO, data_of
from ranks import free_port

PATIENCE = 900  # seconds, of a busy machine


def answers(port):
    """Whether a process of this machine listens on a port."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def test_what_no_restart_cures_ends_the_agents_of_all_hosts(tiny_of, tmp_path):
    port = free_port()
    variables = {
        "LAUNCHER": "accelerate launch --quiet --mixed_precision no",
        # Ranks of a rehearsal agree on an exit code; plain ones each have their own
        "RANK_PROGRAM": f"env ACCELERATE_USE_CPU=true {sys.executable}",
        "CUDA_VISIBLE_DEVICES": "",
        "GPUS": "1",
        "RDZV_CONF": "last_call_timeout=5",
        "RECIPE": "recipes/llama.py",
        "CONFIG": str(CONFIGS / "ddp.yaml"),
        "OUTPUT_DIR": str(tmp_path / "run"),
        "MEETING": f"127.0.0.1:{port}",
        "HOSTS": "2",
        "ROWS_PER_STEP": "8",
        "BATCH": "4",
    }
    words = [REPO / "clusters" / "torchrun_elastic.sh", *data_of(tiny_of("llama"))]
    words += ["--max_steps", 2, "--dataset_name", "missing.jsonl"]
    agents = {}
    for name in ("first", "second"):
        log = tmp_path / f"{name}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [str(word) for word in words],
                cwd=REPO,
                env=os.environ | variables,
                stdout=file,
                stderr=file,
            )
        agents[log] = process
        while not answers(port):  # The first agent has the store, on which the other depends
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
    for log, process in agents.items():
        assert process.wait(PATIENCE) == 65, log.read_text()[-3000:]
        text = log.read_text()
        assert "ended with exit code 65: " in text
        assert text.count("error: ") == 1 and "missing.jsonl" in text, text
    assert not list((tmp_path / "run").glob(".began*"))
