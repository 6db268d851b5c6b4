# SPDX-License-Identifier: Apache-2.0
"""What clusters/slurm.sbatch does when a step ends, with stand-ins for Slurm's commands.

tests/cluster runs it on a real Slurm.
"""

import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
# srun runs the recipe's agent on this machine, and scontrol notes what it is asked.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=0 exec "$@"
"""
SCONTROL = """#!/bin/bash
[[ $1 == show ]] && echo localhost || echo "$*" >> "$ASKED"
"""
# What starts the ranks: it writes the words that it was given, and a status if there is to be one.
LAUNCHER = """#!/bin/bash
printf '%s\\n' "$@" > "$WORDS"
echo '{"exit_code": '"$CODE"',' > "$OUTPUT_DIR/status.json"
[[ $SAVES ]] && echo checkpoint-2 > "$OUTPUT_DIR/latest"
exit 1
"""


@pytest.fixture
def job(tmp_path):
    """A function that runs the template as a job whose step ends with a code."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("launcher", LAUNCHER)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*words, code=75, attempt=0, saves=False, **variables):
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
            "CODE": str(code),
            "SAVES": "yes" if saves else "",
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


def test_an_early_stop_after_attempts_that_made_checkpoints_is_requeued(job, tmp_path):
    (tmp_path / "run" / "logs" / "attempt-6").mkdir(parents=True)
    time.sleep(0.01)
    (tmp_path / "run" / "latest").write_text("checkpoint-2")
    time.sleep(0.01)
    _, is_requeued = job(attempt=9)
    assert is_requeued


@pytest.mark.parametrize(("task", "seed"), [(None, "%a"), ("2", "2")])
def test_percent_a_stands_for_a_task_only_in_an_array(task, seed, job, tmp_path):
    variables = {} if task is None else {"SLURM_ARRAY_TASK_ID": task}
    job("--seed", "%a", "--run_name", "50% and more", **variables)
    words = (tmp_path / "words").read_text().splitlines()
    assert words[words.index("--seed") + 1] == seed
    assert words[-1] == "50% and more"


ONE_CORE = {"SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_ON_NODE": "2"}
TOLD = (
    "warning: CPUs per node: 2, ranks per node: 4: give the job more with sbatch "
    "--cpus-per-task=N, with N larger than 8\n"
)


@pytest.mark.parametrize(
    ("variables", "is_warned"),
    [
        (ONE_CORE, True),
        (ONE_CORE | {"SLURM_CPUS_PER_TASK": "2"}, False),  # the user's own choice
        (ONE_CORE | {"SLURM_CPUS_ON_NODE": "32"}, False),  # the cluster gives CPUs for each GPU
    ],
)
def test_ranks_that_share_one_core_are_named_with_the_cure(variables, is_warned, job):
    told, _ = job(**variables)
    assert (TOLD in told) == is_warned
    assert told.count("warning:") == is_warned
