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
[[ $SAVES ]] && echo checkpoint-2 > "$OUTPUT_DIR/latest"
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


def test_an_early_stop_after_attempts_that_made_checkpoints_is_requeued(job, tmp_path):
    earlier = tmp_path / "run" / "logs" / "job-7" / "attempt-6"
    earlier.mkdir(parents=True)
    (earlier / ".began").touch()
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


@pytest.mark.parametrize("earlier", [0, 75])
def test_a_job_that_records_nothing_fails_whatever_an_earlier_job_of_the_run_recorded(
    earlier, job, tmp_path
):
    job(code=earlier, saves=True)
    time.sleep(0.01)  # so that the times of both jobs differ on every file system
    told, is_requeued = job(code=1, is_recorded=False, SLURM_JOB_ID="8")
    assert told == f"attempt 0 on localhost ended with exit code 1: {tmp_path}/run\n"
    assert not is_requeued


def test_each_job_and_task_of_an_array_has_logs_of_its_own(job, tmp_path):
    array = {"SLURM_ARRAY_JOB_ID": "8", "OUTPUT_DIR": str(tmp_path / "run")}
    job(SLURM_JOB_ID="7", attempt=2)
    job(SLURM_JOB_ID="9", SLURM_ARRAY_TASK_ID="1", **array)
    job(SLURM_JOB_ID="8", SLURM_ARRAY_TASK_ID="2", **array)
    logs = tmp_path / "run" / "logs"
    attempts = sorted(str(path.relative_to(logs)) for path in logs.glob("*/*"))
    assert attempts == ["job-7/attempt-2", "job-8-1/attempt-0", "job-8-2/attempt-0"]
    words = (tmp_path / "words").read_text().splitlines()
    assert words[words.index("--log_dir") + 1] == f"{logs}/job-8-2/attempt-0/node-0"


def test_a_node_without_the_folder_of_the_run_is_named_before_any_rank_starts(job, tmp_path):
    told, is_requeued = job(code=64, BLIND="n1")
    assert told.startswith(f"error: n1 cannot write to OUTPUT_DIR={tmp_path}/run of ")
    assert told.endswith(": choose a folder that all nodes share\n") and told.count("\n") == 1
    assert not is_requeued and not (tmp_path / "words").exists()


def test_a_folder_that_cannot_be_written_is_named_with_the_reason(job, tmp_path):
    (tmp_path / "file").touch()
    told, _ = job(code=73, OUTPUT_DIR=f"{tmp_path}/file/run")
    reason = "cannot be written (Not a directory): choose a folder that can"
    assert told == f"error: OUTPUT_DIR={tmp_path}/file/run {reason}\n"


@pytest.mark.parametrize("flag", ["--output_dir", "--output-dir"])
@pytest.mark.parametrize("form", ["{} elsewhere", "{}=elsewhere"])
def test_the_folder_of_the_run_is_named_by_its_variable_only(flag, form, job):
    told, _ = job("--seed", "1", *form.format(flag).split(), code=64)
    assert told == f"error: OUTPUT_DIR names the folder of the run, not {flag}\n"


def test_the_last_line_has_the_reason_if_the_recipe_recorded_one(job, tmp_path):
    told, _ = job(code=73, why='No space for "model", at all')
    reason = r'"No space for \"model\", at all"'
    assert told == f"attempt 0 on localhost ended with exit code 73 {reason}: {tmp_path}/run\n"


def test_a_job_that_slurm_does_not_requeue_says_how_to_continue(job, tmp_path):
    told, _ = job(saves=True, REFUSES="yes")
    assert "\nrequeued:" not in told
    cure = f"submit the same job with OUTPUT_DIR={tmp_path}/run to continue"
    assert told.endswith(f"not requeued: Slurm refused it: {cure}\n")


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
