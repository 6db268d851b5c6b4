# SPDX-License-Identifier: Apache-2.0
"""clusters/slurm.sbatch as it is shipped, in a Slurm cluster of two nodes on this machine.

Every job trains a shipped recipe under a shipped YAML, on CPU ranks (LAUNCHER is
scripts/rehearse.py). What interrupts a run must not change it: its weights equal, bit for bit,
those of a job that nothing interrupted.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

import net
from launching import CONFIGS, REPO, data_of, read_json, read_metrics

STEPS = 60
LAUNCHER = f"{sys.executable} scripts/rehearse.py --device cpu"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
PATIENCE = 900  # seconds, of a busy machine; an attempt starts within 20 on two idle cores


@dataclass
class Job:
    """A submitted job, and the folder of its run."""

    cluster: object
    number: str
    folder: Path

    @property
    def step(self):
        """The last step that the run has logged."""
        try:
            return read_metrics(self.folder)[0][-1]["step"]
        except (OSError, ValueError, IndexError):
            return 0

    @property
    def attempts(self):
        """How often Slurm has requeued the job."""
        return int(self.cluster.job(self.number)["Restarts"])

    def wait_for_step(self, step):
        self.wait(lambda: self.step >= step, f"step {step}")

    def wait_for_attempt(self, number):
        self.wait(lambda: self.attempts >= number, f"attempt {number}")

    def wait(self, condition, what):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"no {what}:\n{self.output()}"
            state = self.cluster.job(self.number)["JobState"]
            assert state not in ENDED, f"{state} before {what}:\n{self.output()}"
            time.sleep(0.2)

    def end(self):
        """The state in which the job ends."""
        return self.cluster.wait_for_state(self.number, ENDED, PATIENCE)

    def output(self):
        """What the batch script and both nodes have printed."""
        logs = [self.folder.parent / f"{self.number}.out", *self.folder.glob("logs/*/*/node-*.log")]
        return "\n".join(path.read_text() for path in logs if path.exists())


@pytest.fixture
def submit(cluster, tiny_of, tmp_path):
    """A function that submits the template for the job of `STEPS` steps, or another one."""
    jobs = []

    def submit(
        folder=tmp_path / "run",
        flags=("--max_steps", STEPS),
        sbatch=("--nodes=2",),
        recipe="llama",
        config="fsdp",
        launcher=LAUNCHER,
    ):
        variables = {
            "LAUNCHER": launcher,
            "RECIPE": f"recipes/{recipe}.py",
            "CONFIG": str(CONFIGS / f"{config}.yaml"),
            "OUTPUT_DIR": str(folder),
        }
        words = ["sbatch", "--parsable", "--gpus-per-node=1", f"--output={folder.parent}/%j.out"]
        words += [*sbatch, "clusters/slurm.sbatch", *data_of(tiny_of(recipe))]
        words += ["--logging_steps", "1", *flags]
        job = Job(cluster, cluster.run(*words, cwd=REPO, environment=variables), folder)
        jobs.append(job)
        return job

    yield submit
    for job in jobs:
        cluster.run("scancel", job.number, check=False)


@pytest.fixture
def whole(submit, once):
    """The folder of a run on two nodes that nothing interrupted."""

    def train(folder):
        job = submit(folder)
        assert job.end() == "COMPLETED", job.output()
        assert job.attempts == 0

    return once("whole", train)


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def assert_same_run(job, whole):
    """The job has ended, and its run is the uninterrupted one."""
    assert job.end() == "COMPLETED", job.output()
    losses = [(line["step"], line["loss"]) for line in read_metrics(job.folder)[0]]
    assert losses == [(line["step"], line["loss"]) for line in read_metrics(whole)[0]]
    assert weights(job.folder) == weights(whole)


def preempt(cluster):
    """Have a job of a higher partition take both nodes for a second."""
    words = ("--partition=high", "--nodes=2", "--gpus-per-node=1", "--output=/dev/null")
    return cluster.run("sbatch", "--parsable", *words, "--wrap=sleep 1")


def test_a_job_on_two_nodes_is_one_run(whole):
    assert read_json(whole / "status.json")["state"] == "done"
    assert [line["step"] for line in read_metrics(whole)[0]] == list(range(1, STEPS + 1))
    (logs,) = whole.glob("logs/job-*/attempt-0")
    assert "FSDP2 FULL_SHARD, 2 x cpu" in (logs / "node-0.log").read_text()
    for node in (0, 1):
        assert len(list(logs.glob(f"node-{node}/*/attempt_0/0/stdout.log"))) == 1


def test_a_job_that_is_preempted_three_times_equals_the_uninterrupted_one(cluster, submit, whole):
    job = submit()
    for attempt in (1, 2, 3):
        job.wait_for_step(job.step + 1)
        preempt(cluster)
        job.wait_for_attempt(attempt)
    assert_same_run(job, whole)
    assert job.attempts == 3
    assert job.output().count("continues from the newest checkpoint") == 3


def test_a_job_that_reaches_its_time_limit_saves_and_goes_on(submit):
    """Slurm looks at time limits every 30 seconds, and takes a minute for the least of them."""
    job = submit(
        flags=("--max_steps", 100_000), sbatch=("--nodes=2", "--time=1", "--signal=B:USR1@25")
    )
    job.wait_for_attempt(1)
    saved = max(int(name.rpartition("-")[2]) for name in net.checkpoints(job.folder))
    assert saved > 0 and "ended with exit code 75" in job.output()
    job.wait_for_step(saved + 1)
    assert f"Continuing from {job.folder}/checkpoint-{saved}" in job.output()


def test_a_job_that_is_cancelled_saves_and_is_not_requeued(cluster, submit, whole):
    job = submit()
    job.wait_for_step(5)
    cluster.run("scancel", job.number)
    assert job.end() == "CANCELLED"
    job.cluster.wait_until(lambda: cluster.states() == ["idle", "idle"], "the end of the ranks")
    assert read_json(job.folder / "status.json")["exit_code"] == 75
    assert cluster.job(job.number)["JobState"] == "CANCELLED"
    assert_same_run(submit(job.folder), whole)  # the same command again


def test_a_job_whose_node_loses_power_goes_on_from_its_newest_checkpoint(cluster, submit, whole):
    job = submit(flags=("--max_steps", STEPS, "--save_steps", 5))
    job.wait_for_step(7)
    kill_all_on(cluster.daemons["n1"].pid)
    job.wait_for_attempt(1)
    cluster.start_node("n1")
    assert_same_run(job, whole)


def kill_all_on(process):
    """Kill every process of the host, which is a namespace here, of a process."""
    host = os.readlink(f"/proc/{process}/ns/uts")
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # It has ended.
            if os.readlink(entry / "ns" / "uts") == host:
                os.kill(int(entry.name), signal.SIGKILL)


def test_an_array_is_three_runs(cluster, submit, tmp_path):
    run = partial(submit, folder=tmp_path / "%a", config="single")
    job = run(flags=("--max_steps", 3, "--seed", "%a"), sbatch=("--nodes=1", "--array=1-3"))
    cluster.wait_until(lambda: cluster.run("squeue", "--noheader") == "", "the array", PATIENCE)
    seeds = [
        read_json(tmp_path / str(task) / "run.json")["arguments"]["seed"] for task in (1, 2, 3)
    ]
    assert seeds == [1, 2, 3], job.output()
    assert len({weights(tmp_path / str(task)) for task in (1, 2, 3)}) == 3


def test_a_job_that_fails_in_the_folder_of_a_finished_one_is_not_taken_for_it(submit):
    first = submit(flags=("--max_steps", 2), sbatch=("--nodes=1",), config="single")
    assert first.end() == "COMPLETED", first.output()
    second = submit(first.folder, launcher="false")
    assert second.end() == "FAILED"
    assert second.cluster.job(second.number)["ExitCode"] == "1:0"


def test_a_folder_that_only_one_node_has_is_found_before_any_rank_starts(cluster, submit, tmp_path):
    folder = tmp_path / "only on n0"
    folder.mkdir()
    on_n1 = ("nsenter", "--mount", f"--target={cluster.daemons['n1'].pid}")
    subprocess.run([*on_n1, "mount", "-t", "tmpfs", "none", folder], check=True)
    try:
        job = submit(folder / "run")
        assert job.end() == "FAILED"
    finally:
        subprocess.run([*on_n1, "umount", folder], check=True)
    assert cluster.job(job.number)["ExitCode"] == "64:0"
    refusal = (
        f"n1 cannot write to OUTPUT_DIR={job.folder} of n0: choose a folder that all nodes share"
    )
    assert job.output().splitlines()[-1] == f"error: {refusal}"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"flags": ("--no_such_flag", 1)}, 64, "--no_such_flag"),
        ({"flags": ("--output_dir", "elsewhere")}, 64, "OUTPUT_DIR names the folder of the run"),
        ({"config": "missing"}, 64, "CONFIG is the YAML"),
    ],
)
def test_a_wrong_call_fails_once_with_one_line(options, code, message, submit):
    job = submit(**options)
    assert job.end() == "FAILED"
    assert job.cluster.job(job.number)["ExitCode"] == f"{code}:0"
    assert job.attempts == 0 and message in job.output()
