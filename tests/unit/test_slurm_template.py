# SPDX-License-Identifier: Apache-2.0
"""Which jobs clusters/slurm.sbatch requeues, with stand-ins for Slurm's commands.

tests/cluster runs it on a real Slurm.
"""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
# srun runs a command on this machine
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=0 exec "$@"
"""
# scontrol notes what it is asked.
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then echo localhost; exit; fi
echo "$*" >> "$ASKED"
"""
# What starts the ranks
LAUNCHER = """#!/bin/bash
echo "$STATUS" > "$OUTPUT_DIR/status.json"
[[ $SAVES ]] && mkdir "$OUTPUT_DIR/checkpoint-2" && > "$OUTPUT_DIR/checkpoint-2/manifest.json"
exit 1
"""


@pytest.fixture
def job(tmp_path):
    """A function that runs the template as a job whose step ends with a code."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("launcher", LAUNCHER)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(code, attempt, saves):
        status = json.dumps({"exit_code": code, "why": None, "step": 2}, indent=2)
        environment = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "RECIPE": str(REPO / "recipes/llama.py"),
            "CONFIG": str(REPO / "accelerate_configs/fsdp.yaml"),
            "LAUNCHER": shlex.quote(str(tmp_path / "launcher")),
            "OUTPUT_DIR": str(tmp_path / "run"),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "recipe",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_NNODES": "1",
            "SLURM_GPUS_ON_NODE": "1",
            "SLURM_CPUS_ON_NODE": "8",
            "SLURM_RESTART_COUNT": str(attempt),
            "ASKED": str(tmp_path / "asked"),
            "STATUS": status,
            "SAVES": "yes" if saves else "",
        }
        command = ["bash", str(REPO / "clusters/slurm.sbatch")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr, (tmp_path / "asked").is_file()

    return run


@pytest.mark.parametrize(
    ("code", "attempt", "saves", "requeues"),
    [
        (75, 0, True, True),
        (75, 9, True, True),
        (75, 0, False, True),  # preempted early
        (75, 3, False, False),  # never gets anywhere
        (1, 0, True, True),
        (1, 0, False, False),
        (73, 0, True, False),
    ],
)
def test_a_job_is_requeued_if_the_next_attempt_is_worth_it(code, attempt, saves, requeues, job):
    told, is_requeued = job(code, attempt, saves)
    assert is_requeued == requeues
    assert (f"requeued: attempt {attempt + 1} continues" in told) == requeues
    assert ("give the job a longer --time" in told) == (code == 75 and not requeues)
