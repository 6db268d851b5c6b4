# SPDX-License-Identifier: Apache-2.0
"""Fault injection: no run can be lost, whatever is stopped, killed or cut short.

    pytest evidence/test_faults.py --all -n 2              # all: about two hours
    pytest evidence/test_faults.py --all -k "signals or writes"

Each trial is the shipped recipe on the job of evidence/job.py (20 steps over two epochs, 12 rows
per step, 18 steps per epoch) with faults of evidence/faults.py, on CPU ranks under the shipped YAML
files. It is compared with the same job without a fault. "Equal" means bit for bit: every line of
metrics.jsonl, except for speed and memory, and every final weight. A row has the figure of its
trial in the unit of its group.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from common import Exit
from core.checkpoint import checkpoints_in, find_damage
from faults import Fault
from job import ENVIRONMENT, ROOT, Run, make_model, read_steps, read_weights, rehearsal
from net import CUT, data_of, figures, read_json
from test_parity import configs, on_mesh, ranks_of, reference_of, runs_on_meshes

TIMEOUT = 600  # seconds for a launch: a run that hangs is not as promised
MOST_LAUNCHES = 9  # times that the same command is started in a row
STEPS, EPOCH, ROWS = 20, 18, 210  # of the job; EPOCH: steps of the first epoch
ROWS_PER_STEP, ROWS_OF_EVALUATION, ROWS_OF_SECOND_EPOCH, SEED = 12, 21, 24, 42
ASYNC = ("--async_save",)


def make_job(
    config: str = "single", ranks: int = 2, weights: str = "full", recipe: str = "llama"
) -> Run:
    """Return the job under a YAML, with dropout where there are adapters."""
    ranks = ranks_of(config, ranks)
    flags = () if weights == "full" else ("--lora_dropout", "0.1")
    if recipe == "vlm":
        flags += ("--dataloader_num_workers", "2")  # Processes that decode images
    return Run("", config, ranks, *CUT[ranks], weights, flags, recipe)


def jobs_on_meshes() -> list[Run]:
    """Return a job for each YAML of a mesh, in the sizes that are its own."""
    chosen: dict[str, Run] = {}
    for run in runs_on_meshes():
        if run.config != "single" and run.weights == "full" and not run.sizes:
            chosen.setdefault(run.config, run)
    return list(chosen.values())


# ---- How runs are started ----


class Launch:
    """A started run, whose output is in a file beside its folder."""

    def __init__(self, command: list, environment: dict[str, str], folder: Path) -> None:
        self.folder = folder
        self._log = folder.with_name(f"{folder.name}.txt")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "w") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end, at most this long; return whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None

    def end(self) -> "Launch":
        """Wait for the end, kill any remaining processes, and keep the code, None if it hung."""
        self.code = self.process.returncode if self.ends_within(TIMEOUT) else None
        self.kill()
        self.output = self._log.read_text(errors="replace")
        return self

    def kill(self) -> None:
        """Kill all processes of this run at once (kill -9)."""
        while found := processes_of(self.folder):
            for process in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.01)
        self.process.wait()

    def expect(self, *codes: int) -> None:
        """Assert that it ended with one of these codes."""
        assert self.code in codes, f"ended with {self.code}: {self.output[-2500:]}"


class Lab:
    """A folder for models, rows and runs, and how runs are started in it."""

    def __init__(self, folder: Path, once: Callable) -> None:
        self.folder = folder
        self._once = once
        folder.mkdir(exist_ok=True)

    def tiny_of(self, job: Run) -> Path:
        """Return the folder with a job's tiny model and rows, which are made once."""
        return make_model(self.folder / "tiny" / "-".join(job.maker), job.maker)

    def start(self, job: Run, folder: Path, faults=(), flags=(), before=(), **variables) -> Launch:
        """Start the recipe into a folder.

        Args:
            faults: planted in the recipe.
            flags: further flags of the recipe, which override those of the job.
            before: words that precede the command.
            variables: of the environment, that differ from this process's.
        """
        command = [sys.executable]
        if job.config != "single":
            command = rehearsal(job.config, job.ranks)
        command += [ROOT / "evidence" / "faults.py", ROOT / "recipes" / f"{job.recipe}.py"]
        command += [*job.arguments, *data_of(self.tiny_of(job)), *flags, "--output_dir", folder]
        planted = json.dumps([dataclasses.asdict(fault) for fault in faults], default=str)
        environment = os.environ | ENVIRONMENT | {"FAULT": planted, "TRIAL": str(folder)}
        return Launch([*before, *command], environment | variables, folder)

    def run(self, job: Run, folder: Path, *faults: Fault, **options) -> Launch:
        """Run the recipe to its end; the options are those of `start`."""
        return self.start(job, folder, faults, **options).end()

    def whole(self, job: Run) -> Path:
        """Return the folder of a job that nothing interrupted; it is run once."""

        def fill(folder: Path) -> None:
            begun = time.monotonic()
            self.run(job, folder / "run").expect(0)
            (folder / "seconds").write_text(f"{time.monotonic() - begun}")

        return self._once(f"whole-{job.name}", fill) / "run"

    def resume(self, folder: Path, job: Run, *faults: Fault, flags=()) -> int:
        """Run the same command until it does not end as stopped, and compare with a whole run.

        Returns:
            How many lines and weights differ: 0.
        """
        last = self.run(job, folder, *faults, flags=flags)
        for _ in range(MOST_LAUNCHES):
            if last.code == Exit.STOPPED:
                last = self.run(job, folder, *faults, flags=flags)
        last.expect(0)
        return none_unequal(folder, self.whole(job))


@pytest.fixture(scope="session")
def lab(shared, once):
    return Lab(shared / "faults", once)


@pytest.fixture
def python(group, request):
    """Start the launches of a trial warm, but for those that must look like a user's."""
    if group not in STARTED_COLD:
        request.getfixturevalue("warm_starts")


# ---- Processes of a trial ----


def processes_of(folder: Path) -> list[int]:
    """Return the ids of all processes that run for a trial's folder.

    A zombie no longer has an environment, so that it is not among them.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"TRIAL={folder}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


# ---- What runs have left ----


def last_step(folder: Path) -> int:
    """Return the last step in metrics.jsonl or 0; the last line may be incomplete."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    steps = re.findall(r'^{"step": (\d+),.*}$', text, re.MULTILINE)
    return max((int(step) for step in steps), default=0)


def verified(folder: Path) -> list[int]:
    """Return the steps of the checkpoints that can be trusted."""
    checkpoints = checkpoints_in(folder)
    return [step for step, path in checkpoints.items() if find_damage(path) is None]


def hash_of_state(folder: Path, step: int) -> dict:
    """Return sizes and hashes of weights and optimizer state in the checkpoint of a step."""
    manifest = json.loads((folder / f"checkpoint-{step}" / "manifest.json").read_text())
    return {name: manifest[name] for name in manifest if name.startswith("state")}


def none_unequal(folder: Path, whole: Path) -> int:
    """Assert that two finished runs are equal, except for speed and memory; return 0."""
    lines, others = figures(folder), figures(whole)
    assert lines and lines == others
    ours, theirs = read_weights(folder), read_weights(whole)
    assert ours and ours.keys() == theirs.keys()
    assert [name for name in ours if not np.array_equal(ours[name], theirs[name])] == []
    return 0


def difference_in_loss(folder: Path, whole: Path) -> float:
    """Return the largest relative difference in the loss of a step."""
    pairs = zip(read_steps(folder), read_steps(whole), strict=True)
    return max(abs(ours["loss"] - theirs["loss"]) / theirs["loss"] for ours, theirs in pairs)


# ---- Stopped by a signal, and continued ----

IN_EACH_STEP = "skip_if_not_finite"  # every rank of every recipe calls it before its update


def stop_and_resume(lab, folder, job, steps, at="summed_loss"):
    """SIGTERM to the last rank in each of these steps: the run stops, saves, resumes exactly."""
    faults = [Fault("SIGTERM", at, rank=job.ranks - 1, step=step) for step in steps]
    for _ in steps:
        lab.run(job, folder, *faults).expect(Exit.STOPPED)
    lab.run(job, folder, *faults).expect(0)
    return none_unequal(folder, lab.whole(job))


@dataclass(frozen=True)
class Place:
    """Where in a run something happens, and the step after which it is saved; 0 for none."""

    at: str
    saved: int = 0
    step: int | None = None
    flags: tuple[str, ...] = ()


IN_BACKGROUND = ("--save_steps", "5", *ASYNC)
SIGNAL_PLACES = {
    "data preparation": Place("load_data"),
    "the first step": Place("summed_loss", 1, step=1),
    "training": Place("summed_loss", 7, step=7),
    "evaluation": Place("evaluate_perplexity", EPOCH),
    "saving": Place("save", 6, flags=("--save_steps", "5")),
    "saving in the background": Place("save", 6, flags=IN_BACKGROUND),
    "the step beside a save": Place("summed_loss", 6, step=6, flags=IN_BACKGROUND),
}
LAST_WORDS = ("again to continue", "command again")  # of a stopped run
GRACE = 30  # seconds that torchrun gives its ranks


def stop_by_signal(lab, folder, job, name, rank, place):
    """A signal to one rank, or to all: the run stops, saves, prints how to resume, and resumes."""
    at = SIGNAL_PLACES[place]
    ended = lab.run(job, folder, Fault(name, at.at, rank=rank, step=at.step), flags=at.flags)
    # Before the first step a rank ends at once, and the launcher may see first what others miss
    ended.expect(Exit.STOPPED, *[Exit.FAILED] * (at.saved == 0))
    assert read_json(folder / "status.json")["state"] == "stopped"
    assert any(words in ended.output for words in LAST_WORDS), ended.output
    assert max(verified(folder), default=0) == at.saved
    return lab.resume(folder, job, flags=at.flags)


def kill_while_saving(lab, folder, config, change, in_background=False):
    """A second signal while the checkpoint of the first one is saved, and then kill -9."""
    job = make_job(config)
    flags = ("--save_steps", "3", *(ASYNC if in_background else ()))
    at = {"at": "whole save", "rank": 0, "call": 4}
    if in_background:
        at = {"at": "write_share", "rank": 0, "call": 3}
    crash = Fault("crash at change", **at, number=change, lasting=in_background)
    stop = Fault("SIGTERM", "summed_loss", rank=0, step=8)
    again = Fault("SIGTERM", "save", rank=0, call=3)
    ended = lab.run(job, folder, stop, again, crash, flags=flags)
    assert (
        ended.code not in (0, Exit.STOPPED)
        and read_json(folder / "status.json")["state"] != "stopped"
    )
    assert 6 in verified(folder)
    return lab.resume(folder, job, flags=flags)


# ---- Ranks and launchers that are lost ----

DDP_TIMEOUT = 10  # seconds after which a rank that hangs is detected
MOST_SECONDS = GRACE + 5  # after the loss of a rank, or after that time limit
IN_TRAINING = {"at": "summed_loss", "step": 7}
KILL_PLACES = {
    "training": Place(**IN_TRAINING),
    "evaluation": Place("evaluate_perplexity"),
    "saving": Place("write_share"),
    "a save in the background": Place("write_share", flags=ASYNC),
}


def lose_a_process(lab, folder, job, fault, flags=()):
    """A rank or the launcher is killed, or a rank suspended; return how soon all have ended.

    The launcher ends the other ranks, or --ddp_timeout does, with stacks. Without a launcher the
    ranks save and stop, and the same command continues the run.
    """
    mark = folder.with_name("lost")
    launch = lab.start(job, folder, [dataclasses.replace(fault, file=mark)], flags)
    while not mark.exists() and not launch.ends_within(0.1):
        pass
    lost = time.monotonic()
    while processes_of(folder) and time.monotonic() < lost + TIMEOUT:
        time.sleep(0.05)
    seconds = time.monotonic() - lost
    launch.end()
    if fault.to == "launcher":
        assert read_json(folder / "status.json")["state"] == "stopped", launch.output
        lab.resume(folder, job)
        return seconds
    if fault.do == "SIGSTOP":
        seconds -= DDP_TIMEOUT
        assert "most recent call first" in launch.output
    assert launch.code not in (0, None) and seconds <= MOST_SECONDS, (seconds, launch.output)
    return seconds


def kill_at_random(lab, folder, job, save_steps, seed, in_background=False):
    """Kill everything (kill -9) at five uniformly random moments of a run, then resume it.

    A run that waits for its saves loses at most the steps of one interval between saves: it is
    killed before a step's checkpoint is whole, and the one before it is. With --async_save it loses
    at most two: the next save begins only when the one before it is whole. A run that finishes
    first must be equal to the uninterrupted one, and another is started.
    """
    flags = ("--save_steps", save_steps, *(ASYNC if in_background else ()))
    whole = lab.whole(job)
    seconds = float((whole.parent / "seconds").read_text())
    dice = random.Random(seed)
    most_lost = 0
    has_saved = False
    kills_left = KILLS_PER_TRIAL
    while kills_left:
        launch = lab.start(job, folder, flags=flags)
        if launch.ends_within(dice.uniform(0, seconds)):
            launch.end().expect(0)
            none_unequal(folder, whole)
            shutil.rmtree(folder)
            has_saved = False
            continue
        launch.kill()
        kills_left -= 1
        has_saved = has_saved or any(folder.glob("checkpoint-*/manifest.json"))
        saved = verified(folder)
        assert saved or not has_saved
        most_lost = max(most_lost, last_step(folder) - max(saved, default=0))
    lab.resume(folder, job, flags=flags)
    assert most_lost <= (2 * save_steps if in_background else save_steps)
    return most_lost


# ---- Saves that are interrupted, and disks that are full ----

# Changes of the file system in one save with one older checkpoint to delete, or of the thread that
# writes one. A trial at one more change is not killed, which shows that none is missed.
CHANGES, CHANGES_IN_BACKGROUND = 17, 16
STATE_SIZE = 27_062_484  # bytes of the state file
CHECKPOINT_SIZE = 27_100_000  # bytes of a checkpoint, rounded up
SECOND_SAVE = {"at": "whole save", "call": 3}
SECOND_WRITE = {"at": "write_share", "call": 2}  # the thread's part of it
# Runs a command with its output folder on a small tmpfs, and keeps what was written there.
ON_SMALL_DISK = (
    'mount -t tmpfs -o size=$1 tmpfs "$2" || exit 99; disk=$2; keep=$3; shift 3; "$@"; code=$?; '
    'rm -f "$disk/filler"; mkdir -p "$keep"; cp -a "$disk/." "$keep"; exit $code'
)


def save_in_danger(lab, folder, fault, code, more=()):
    """A fault in the second save, which is about to replace the only checkpoint."""
    job = make_job()
    flags = ("--save_steps", "3", "--save_total_limit", "1", *more)
    lab.run(job, folder, fault, flags=flags).expect(code)
    assert code == 0 or {3, 6}.intersection(verified(folder))
    if code == Exit.CANNOT_WRITE:
        assert last_step(folder) <= 9  # when the next save finds that this one has failed
    return lab.resume(folder, job, flags=flags)


def fill_the_disk(lab, folder, quarter, more=()):
    """On a small disk the second checkpoint does not fit: the run says so and keeps the first.

    Args:
        quarter: free quarters of a checkpoint's size; None: the disk is too small from the start.
    """
    if not can_mount():
        pytest.skip("nothing can be mounted")
    job = make_job()
    flags = ("--save_steps", "3", "--save_total_limit", "2", *more)
    disk = folder.with_name("disk")
    disk.mkdir()
    faults, size = [], CHECKPOINT_SIZE * 3 // 2
    if quarter is not None:
        size = CHECKPOINT_SIZE * 4
        free = CHECKPOINT_SIZE * quarter // 4
        faults = [Fault("fill disk", **SECOND_WRITE, file=disk / "filler", number=free)]
    before = ["unshare", "-rm", "sh", "-c", ON_SMALL_DISK, "sh", size, disk, folder]
    ended = lab.run(job, disk, *faults, flags=flags, before=before)
    ended.expect(Exit.CANNOT_WRITE)
    assert "No space left" in ended.output, ended.output
    assert verified(folder) == [3]
    assert quarter == 0 or read_json(folder / "status.json")["exit_code"] == Exit.CANNOT_WRITE
    return lab.resume(folder, job, flags=flags)


def can_mount() -> bool:
    """Return whether a file system can be mounted here, in a namespace of its own."""
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return bool(shutil.which("unshare")) and subprocess.run(command).returncode == 0


# ---- Secrets ----

SECRETS = "HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY MY_PASSWORD ACCELERATE_MY_TOKEN".split()


def keep_secrets(lab, folder):
    """No value of a secret in the environment is printed or written."""
    secrets = {name: f"planted-{name.lower()}-7391" for name in SECRETS}
    ended = lab.run(make_job("ddp"), folder, flags=("--save_steps", "5"), **secrets)
    ended.expect(0)
    files = [path for path in folder.rglob("*") if path.is_file()]
    texts = [ended.output.encode(), *(path.read_bytes() for path in files)]
    assert not [text for text in texts for value in secrets.values() if value.encode() in text]
    return 0


# ---- Numbers that are not finite ----

STEP = 9  # whose loss or gradient is not finite
SKIP = ("--nonfinite", "skip")
POLICIES = {
    "skipped": SKIP,
    "stopped": ("--nonfinite", "stop"),
    "stopped when the budget is used up": (*SKIP, "--nonfinite_budget", "0"),
}


def row_of_step(step: int) -> int:
    """Return a row (from 1) that only this step of the job has, and no evaluation."""
    first, second = (np.random.default_rng((SEED, epoch)).permutation(ROWS) for epoch in (0, 1))
    end = ROWS_PER_STEP * step
    own = set(first[end - ROWS_PER_STEP : end].tolist()) - set(second[:ROWS_OF_SECOND_EPOCH])
    return 1 + next(row for row in sorted(own) if row > ROWS_OF_EVALUATION)


def nothing_changes(lab, folder, job, do, policy):
    """A batch of one rank gives nan, inf or an infinite gradient in one step.

    Its rows are named, weights and optimizer state stay as they are, and the run continues or ends,
    as its policy says.
    """
    row = row_of_step(STEP)
    flags = ("--save_steps", "1", "--save_total_limit", "30", *POLICIES[policy])
    ended = lab.run(job, folder, Fault(do, "summed_loss", row=row), flags=flags)
    ended.expect(0 if policy == "skipped" else Exit.NOT_FINITE)
    text = (folder / "nonfinite_rows.jsonl").read_text()
    (reported,) = [json.loads(line) for line in text.splitlines()]
    named = [row for rows in reported["rows_by_rank"].values() for row in rows]
    assert reported["step"] == STEP and row in named
    # A loss belongs to one micro-batch; a gradient is only known for the whole step.
    what, most = ("gradient", ROWS_PER_STEP) if "gradient" in do else ("loss", 3)
    assert reported["what"] == what and len(named) <= most
    if policy == "skipped":
        assert hash_of_state(folder, STEP) == hash_of_state(folder, STEP - 1)
    assert max(verified(folder)) == (STEPS if policy == "skipped" else STEP - 1)
    for path in folder.rglob("*.safetensors"):
        assert all(np.isfinite(array).all() for array in load_file(path).values()), path
    return 0


# ---- Other numbers of ranks and other strategies ----

MOST_DIFFERENCE = 1e-4  # relative, in the loss of a step: sums in another order, over 20 steps


def resume_elsewhere(lab, folder, jobs, stops, at="summed_loss"):
    """Stop in these steps, resume as another job each time: the loss of each step is the same."""
    whole = lab.whole(make_job() if at == "summed_loss" else reference_of(jobs[0]))
    faults = [Fault("SIGTERM", at, rank=0, step=step) for step in stops]
    for job in jobs[:-1]:
        lab.run(job, folder, *faults).expect(Exit.STOPPED)
    lab.run(jobs[-1], folder, *faults).expect(0)
    worst = difference_in_loss(folder, whole)
    assert worst <= MOST_DIFFERENCE
    return worst


# ---- All trials ----

KILLS_PER_TRIAL = 5
SIGNALS = ("SIGTERM", "SIGUSR1")
ENGINES = ("ddp", "fsdp2_full_shard", "deepspeed_zero2")
NONFINITE = (
    "single ddp fsdp1_full_shard fsdp2_full_shard deepspeed_zero0 deepspeed_zero1 deepspeed_zero2 "
    "deepspeed_zero3"
).split()
STRATEGIES = (
    "single ddp fsdp1_full_shard deepspeed_zero3 fsdp2_full_shard deepspeed_zero1 "
    "fsdp1_shard_grad_op deepspeed_zero2 fsdp2_shard_grad_op deepspeed_zero0 fsdp1_no_shard"
).split()


def stops():
    """Yield the trials that stop once under every YAML, in every step, and five times."""
    jobs = [make_job(name) for name in configs()]
    jobs += [make_job(name, 2, "LoRA") for name in configs() if name != "fsdp1_no_shard"]
    quantized = ("single", "fsdp2_full_shard", "deepspeed_zero3")
    jobs += [make_job(name, 2, "nf4 LoRA") for name in quantized]
    # Three ranks, over which weights are split into parts of different sizes. Under DDP the order
    # in which three gradients are added depends on their place in a bucket.
    jobs += [make_job(name, 3) for name in ("deepspeed_zero3", "fsdp2_full_shard", "ddp")]
    for job, step in zip(jobs, itertools.cycle(range(1, 20, 3)), strict=False):
        what = f"stopped and continued, {job.weights}"
        attempt = partial(stop_and_resume, job=job, steps=[step])
        yield "resume", what, f"{job.name}, step {step}", attempt
    for config, step in zip(ENGINES, (4, 11, 19), strict=True):
        job = make_job(config, recipe="vlm")
        attempt = partial(stop_and_resume, job=job, steps=[step])
        yield "resume", "stopped and continued, images", f"{job.name}, step {step}", attempt
    for job, step in zip(jobs_on_meshes(), itertools.cycle(range(2, 20, 3)), strict=False):
        attempt = partial(stop_and_resume, job=job, steps=[step], at=IN_EACH_STEP)
        yield "resume", "stopped and continued, meshes", f"{job.name}, step {step}", attempt
    for config, step in zip(("single", *ENGINES), (3, 8, 13, 18), strict=True):
        job = dataclasses.replace(make_job(config), recipe="llama_grpo")
        attempt = partial(stop_and_resume, job=job, steps=[step], at=IN_EACH_STEP)
        yield "resume", "stopped and continued, full", f"{job.name}, step {step}", attempt
    in_steps = [("single", range(1, STEPS)), ("ddp", range(1, STEPS, 3))]
    for config, steps in [*in_steps, ("fsdp2_full_shard", range(2, STEPS, 3))]:
        for step in steps:
            attempt = partial(stop_and_resume, job=make_job(config), steps=[step])
            yield "every step", f"stopped in each step, {config}", f"step {step}", attempt
    for config in ("single", "ddp", "deepspeed_zero2"):
        attempt = partial(stop_and_resume, job=make_job(config), steps=(2, 5, 9, 12, 16))
        yield "five", "five interruptions in one epoch", config, attempt


def elsewhere():
    """Yield the trials that resume on other ranks, under other strategies and meshes."""
    for config in ("ddp", "fsdp2_full_shard", "fsdp1_full_shard", *STRATEGIES[7:2:-4]):
        for order in ([1, 2, 3, 4], [4, 3, 2, 1], [2, 4, 1, 3]):
            jobs = [make_job(config if ranks > 1 else "single", ranks) for ranks in order]
            attempt = partial(resume_elsewhere, jobs=jobs, stops=[5, 10, 15])
            yield "elastic", "other numbers of ranks", f"{config} {order}", attempt
    for first in (0, 4, 8):
        turn = STRATEGIES[first:] + STRATEGIES[:first]
        jobs = [make_job(config) for config in turn]
        attempt = partial(resume_elsewhere, jobs=jobs, stops=range(2, 21, 2))
        yield "strategies", "another strategy every 2 steps", " > ".join(turn), attempt
    turns: dict[tuple, list[Run]] = {}
    for job in jobs_on_meshes():
        turn = turns.setdefault(tuple(job.maker), [reference_of(job)])
        turn += [job, on_mesh("fsdp2_full_shard", 2, recipe=job.model, layers=job.layers)]
    for turn in turns.values():
        detail = " > ".join(job.config for job in turn)
        attempt = partial(resume_elsewhere, jobs=turn, stops=range(1, len(turn)), at=IN_EACH_STEP)
        yield "strategies", "another mesh in each step", detail, attempt


def signals():
    """Yield every signal in every place under DDP, one in four elsewhere, and those in a row."""
    kinds = itertools.product(
        ("ddp", "fsdp2_full_shard", "deepspeed_zero3"), SIGNALS, (None, 0, 1), SIGNAL_PLACES
    )
    for number, (config, name, rank, place) in enumerate(kinds):
        if config == "ddp" or number % 4 == 0:
            job = make_job(config)
            attempt = partial(stop_by_signal, job=job, name=name, rank=rank, place=place)
            to = "all ranks" if rank is None else f"only rank {rank}"
            yield "signals", f"{name} in {place}", f"{config}, {to}", attempt
    for config in ("single", "ddp"):
        for change in (1, 3, 8, 15):
            attempt = partial(kill_while_saving, config=config, change=change)
            detail = f"{config}, change {change} of the save"
            yield "twice", "two signals, then kill -9", detail, attempt
        for change in (1, 8):
            attempt = partial(kill_while_saving, config=config, change=change, in_background=True)
            detail = f"{config}, change {change} in the background"
            yield "twice", "two signals, then kill -9, --async_save", detail, attempt


def losses():
    """Yield the trials that lose each of two and of three ranks, the launcher, or all at random."""
    for config, ranks in itertools.product(ENGINES, (2, 3)):
        job = make_job(config, ranks)
        for rank, (name, place) in itertools.product(range(ranks), KILL_PLACES.items()):
            fault = Fault("SIGKILL", place.at, rank=rank, step=place.step)
            flags = ("--save_steps", "4", *place.flags)
            attempt = partial(lose_a_process, job=job, fault=fault, flags=flags)
            detail = f"{config}, rank {rank} of {ranks}"
            yield "dead ranks", f"kill -9 of a rank in {name}", detail, attempt
        fault = Fault("SIGKILL", **IN_TRAINING, rank=0, to="launcher")
        attempt = partial(lose_a_process, job=job, fault=fault)
        yield "dead ranks", "kill -9 of the launcher", f"{config}, {ranks} ranks", attempt
        for rank in (0, ranks - 1):
            fault = Fault("SIGSTOP", **IN_TRAINING, rank=rank)
            flags = ("--ddp_timeout", str(DDP_TIMEOUT))
            attempt = partial(lose_a_process, job=job, fault=fault, flags=flags)
            detail = f"{config}, rank {rank} of {ranks}"
            yield "dead ranks", "a stopped rank, after --ddp_timeout", detail, attempt
    # 150 kills of one process and 50 of two ranks, and a fifth of that with --async_save
    background = ", --async_save"
    for suffix, config, trials in (
        ("", "single", 30),
        ("", "ddp", 10),
        (background, "single", 6),
        (background, "ddp", 2),
    ):
        what = f"kill -9 of all processes at random{suffix}, {config}"
        for seed in range(trials):
            steps = {"single": 1, "ddp": 2}[config]
            job = make_job(config)
            attempt = partial(kill_at_random, job=job, save_steps=steps, seed=seed)
            if suffix:
                attempt = partial(attempt, in_background=True)
            yield f"random kills{suffix}", what, f"seed {seed}", attempt


def writes():
    """Yield a kill before each change of a file, faults in each write, and disks that are full."""
    for more, suffix, at, last in (
        ((), "", SECOND_SAVE, CHANGES),
        (ASYNC, ", in the background", SECOND_WRITE, CHANGES_IN_BACKGROUND),
    ):
        what = f"crash before each change of the file system{suffix}"
        for change in range(1, last + 2):
            fault = Fault("crash at change", **at, number=change, lasting=bool(more))
            code = -signal.SIGKILL if change <= last else 0
            attempt = partial(save_in_danger, fault=fault, code=code, more=more)
            name = what if change <= last else f"no change is left out{suffix}"
            if change <= last or not more:
                yield "writes", name, f"change {change}", attempt
        for do, code in (("crash", -signal.SIGXFSZ), ("refuse", Exit.CANNOT_WRITE)):
            places = [("", STATE_SIZE * quarter // 4) for quarter in range(4)]
            places += [("progress.json", byte) for byte in (0, 400, 800, 1200)]
            places += [("manifest.json", byte) for byte in (0, 50, 100, 150)]
            for file, byte in places:
                fault = Fault(f"{do} at byte", **SECOND_WRITE, file=file, number=byte)
                attempt = partial(save_in_danger, fault=fault, code=code, more=more)
                detail = f"{file or 'state-00001.safetensors'}, byte {byte}"
                yield "writes", f"{do} in the middle of a write{suffix}", detail, attempt
    for quarter in (None, 0, 1, 2, 3):
        detail = "before the save" if quarter is None else f"{quarter}/4 of the save"
        yield "disk", "the disk is full", detail, partial(fill_the_disk, quarter=quarter)
        if quarter is not None:
            attempt = partial(fill_the_disk, quarter=quarter, more=ASYNC)
            yield "disk", "the disk is full, in the background", detail, attempt


def others():
    """Yield the trials of secrets, and of numbers that are not finite."""
    yield "secrets", "no secret is written", "ddp", keep_secrets
    for policy, config in itertools.product(POLICIES, NONFINITE):
        for do in ("nan", "inf", "inf gradient"):
            attempt = partial(nothing_changes, job=make_job(config), do=do, policy=policy)
            yield "numbers", policy, f"{do}, {config}", attempt


SHORT = (
    "signals-SIGTERM in training-ddp, only rank 1",
    "writes-crash before each change of the file system-change 12",
)


# They look for ranks among the processes, kill all of them, or start in a file system of their own
STARTED_COLD = ("dead ranks", "random kills", "random kills, --async_save", "disk")


TRIALS = [*stops(), *elsewhere(), *signals(), *losses(), *writes(), *others()]
NAMES = ["-".join(words) for *words, _ in TRIALS]


@pytest.mark.parametrize(("group", "what", "detail", "attempt"), TRIALS, ids=NAMES)
@pytest.mark.usefixtures("python")
def test_fault(group, what, detail, attempt, lab, tmp_path, record):
    count = KILLS_PER_TRIAL if group.startswith("random kills") else 1
    figure = attempt(lab, tmp_path / "run")
    record(group=group, what=what, detail=detail, count=count, figure=figure)
