# SPDX-License-Identifier: Apache-2.0
"""What clusters/slurm.sbatch does when a step ends, with stand-ins for Slurm's commands.

tests/cluster runs it on a real Slurm.
"""

import json
import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
# srun runs a command on this machine, as on a node that may lack the folder of the run.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
[[ $BLIND ]] && export LOGS=/missing SLURMD_NODENAME=$BLIND
SLURM_NODEID=0 exec "$@"
"""
# scontrol notes what it is asked.
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then echo localhost; exit; fi
echo "$*" >> "$ASKED"
[[ ! $REFUSES ]]
"""
# What starts the ranks: it writes the words that it was given, and a status if there is to be one.
LAUNCHER = """#!/bin/bash
printf '%s\\n' "$@" > "$WORDS"
[[ $STATUS ]] && echo "$STATUS" > "$OUTPUT_DIR/status.json"
[[ $SAVES ]] && mkdir "$OUTPUT_DIR/checkpoint-2" && > "$OUTPUT_DIR/checkpoint-2/manifest.json"
exit 1
"""


@pytest.fixture
def job(tmp_path):
    """A function that runs the template as a job whose step ends with a code."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("launcher", LAUNCHER)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*words, code=75, why=None, is_recorded=True, attempt=0, saves=False, **variables):
        (tmp_path / "asked").unlink(missing_ok=True)
        status = json.dumps({"exit_code": code, "why": why, "step": 2}, indent=2)
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
            "WORDS": str(tmp_path / "words"),
            "STATUS": status if is_recorded else "",
            "SAVES": "yes" if saves else "",
            "BLIND": "",
            "REFUSES": "",
        }
        command = ["bash", str(REPO / "clusters/slurm.sbatch"), *words]
        done = subprocess.run(
            command, env=environment | variables, capture_output=True, text=True, timeout=60
        )
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
    told, is_requeued = job(code=code, attempt=attempt, saves=saves)
    assert is_requeued == requeues
    assert (f"requeued: attempt {attempt + 1} continues" in told) == requeues
    assert ("give the job a longer --time" in told) == (code == 75 and not requeues)


@pytest.mark.parametrize(("task", "seed"), [(None, "%a"), ("2", "2")])
def test_percent_a_stands_for_a_task_only_in_an_array(task, seed, job, tmp_path):
    variables = {} if task is None else {"SLURM_ARRAY_TASK_ID": task}
    job("--seed", "%a", "--run_name", "50% and more", **variables)
    words = (tmp_path / "words").read_text().splitlines()
    assert words[words.index("--seed") + 1] == seed
    assert words[-1] == "50% and more"


@pytest.mark.parametrize("earlier", [0, 75])
def test_a_job_that_records_nothing_fails_whatever_an_earlier_job_of_the_run_recorded(
    earlier, job, tmp_path
):
    job(code=earlier, saves=True)
    time.sleep(0.01)  # so that the times of both jobs differ on every file system
    told, is_requeued = job(code=1, is_recorded=False, SLURM_JOB_ID="8")
    assert told == f"attempt 0 on localhost ended with exit code 1: {tmp_path}/run\n"
    assert not is_requeued


@pytest.mark.parametrize("words", [["--output_dir", "elsewhere"], ["--output-dir=elsewhere"]])
def test_the_folder_of_the_run_is_named_by_its_variable_only(words, job):
    told, _ = job("--seed", "1", *words, code=64)
    assert "OUTPUT_DIR" in told and told.count("\n") == 1
