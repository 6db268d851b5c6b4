# SPDX-License-Identifier: Apache-2.0
"""torch: an agent that joins a running job never learns the address of its store (2 agents)."""

import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

with socket.create_server(("127.0.0.1", 0)) as free:
    PORT = free.getsockname()[1]
AGENT = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--rdzv-backend=c10d"]
AGENT += [f"--rdzv-endpoint=127.0.0.1:{PORT}", "--rdzv-conf=last_call_timeout=1,read_timeout=10"]
AGENT += ["--monitor-interval=0.1", "--no-python", "sh", "-c"]
RANK = "echo $WORLD_SIZE >> {}; exec sleep 600"


def start(log: Path) -> subprocess.Popen:
    return subprocess.Popen([*AGENT, RANK.format(log)], stderr=log.with_suffix(".err").open("w"))


def wait_for(agent: subprocess.Popen, log: Path, text: str) -> None:
    while agent.poll() is None and not (log.exists() and text in log.read_text()):
        time.sleep(0.1)


with tempfile.TemporaryDirectory() as folder:
    logs = [Path(folder, name) for name in ("first", "second")]
    first = start(logs[0])
    wait_for(first, logs[0], "1")
    second = start(logs[1])
    wait_for(second, logs[1], "2")
    lines = logs[1].with_suffix(".err").read_text().splitlines()
    errors = [line for line in lines if "DistStoreError" in line] or lines
    result = "the second agent joins" if logs[1].exists() else errors[-1]
    print(f"expected: the second agent joins\ngot: {result}")
    for agent in (first, second):
        agent.send_signal(signal.SIGTERM)
