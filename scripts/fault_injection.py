"""Fault injection: no run can be lost, whatever is stopped, killed, cut short or damaged.

    python scripts/fault_injection.py                                  # all groups: over three hours on two cores
    python scripts/fault_injection.py --groups resume signals --limit 2  # some of them; --list names all trials
    python scripts/fault_injection.py --groups --report docs/fault_injection.md  # the report of what is in --json

Each trial is the shipped recipe on the job of scripts/parity.py (20 steps over two epochs, 12 rows a step, 18 steps an
epoch) with faults planted by scripts/faults.py, on CPU ranks under the shipped YAML files, against the same job
without a fault. "Equal" is bit for bit: every line of metrics.jsonl, but for speed and memory, and every final weight.
The results of a group go to --json when it is done, in place of older ones of that group; with --only in place of
older ones of the same trials.

Exit code: 0 all as promised, 1 not, 64 for a wrong call.
"""

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock
from paths import CONFIGS, ROOT
from proof import compare, damage, launch
from proof import jobs as parity
from proof.markdown import table
from safetensors.numpy import load_file
from usage import Parser

sys.path.append(str(ROOT / "recipes"))
import fault_tolerance  # noqa: E402  from recipes/

RECIPE = ROOT / "recipes" / "llama.py"
CUT = parity.CUT | {3: (2, 2)}  # 12 rows a step
TIMEOUT = 300  # seconds for a launch: a run that hangs is not as promised
STEPS, EPOCH = 20, 18
CHANGES = 24  # of the file system in one save with one older checkpoint to delete: the trial after it is not killed
LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "safetensors")
UNITS = dict.fromkeys(
    ("resume", "every step", "five", "signals", "twice", "writes", "disk"), "lines, tensors unequal"
)
UNITS |= dict.fromkeys(("elastic", "strategies"), "relative difference of the loss")
UNITS |= {
    "dead ranks": "seconds",
    "random kills": "steps lost",
    "damage": "not found",
    "foreign": "not as promised",
    "numbers": "not as promised",
    "hashing": "of the save",
}


class Result(NamedTuple):
    ok: bool
    figure: float = 0
    note: str = ""
    count: int = 1  # what was tried in it


class Trial(NamedTuple):
    what: str  # its row of the table
    detail: str
    do: Callable  # of a Lab and a folder of its own, returns a Result


class Done(NamedTuple):
    code: int | None  # None: it did not end
    output: str
    seconds: float


# ---- Launches ----


def job(config="single", ranks=2, weights="full"):
    """The job of scripts/parity.py under a YAML, with dropout where there are adapters."""
    ranks = parity.ranks_of(config, ranks)
    flags = () if weights == "full" else ("--lora_dropout", "0.1")
    return parity.Run("", config, ranks, *CUT[ranks], weights, flags)


class Lab:
    """A folder for models, rows and runs, and how runs are started in it."""

    def __init__(self, folder, tiny=None):
        self.folder, self.tiny = folder.resolve(), tiny or folder.resolve() / "tiny"
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        if not self.tiny.exists():
            launch.make_model(self.tiny)

    def start(self, job, folder, faults=(), flags=(), before=(), model=None, **environment):
        """Start the recipe. `before`: words of the command before it. The output is collected in the background."""
        command = [sys.executable]
        if job.config != "single":
            command += [
                ROOT / "scripts" / "rehearse.py",
                "--device",
                "cpu",
                "--num_processes",
                job.ranks,
            ]
            command += ["--config_file", CONFIGS / f"{job.config}.yaml"]
        command += [
            ROOT / "scripts" / "proof" / "faults.py",
            RECIPE.with_stem(job.recipe),
            *job.arguments,
            *flags,
        ]
        command += [*launch.data_of(self.tiny), *(["--model_name_or_path", model] if model else [])]
        command += ["--output_dir", folder]
        environment = (
            os.environ
            | {
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(self.folder / "tmp"),
                "TRIAL": str(folder),
                "FAULT": json.dumps(list(faults), default=str),
            }
            | environment
        )
        process = subprocess.Popen(
            [str(word) for word in [*before, *command]],
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            errors="replace",
        )
        process.lines = []
        process.reader = threading.Thread(
            target=lambda: process.lines.extend(process.stdout), daemon=True
        )
        process.reader.start()
        return process

    def run(self, *arguments, **options):
        """Run the recipe to its end."""
        start = time.monotonic()
        return end(self.start(*arguments, **options), arguments[1], start)

    def go_on(self, job, folder, faults=(), **options):
        """Run the same command until it does not end with 75; returns the ends."""
        ends = [self.run(job, folder, faults, **options)]
        while ends[-1].code == 75 and len(ends) < 9:
            ends.append(self.run(job, folder, faults, **options))
        return ends

    def whole(self, job, faults=(), flags=()):
        """The folder of the job that nothing stopped, run once."""
        folder = self.folder / "whole" / "-".join([job.name, *map(str, flags)])
        folder.parent.mkdir(parents=True, exist_ok=True)
        changed = max(path.stat().st_mtime for path in RECIPE.parent.glob("*.py"))
        with FileLock(f"{folder}.lock"):
            if not (folder / "seconds").exists() or (folder / "seconds").stat().st_mtime < changed:
                shutil.rmtree(folder, ignore_errors=True)
                done = self.run(job, folder, faults, flags)
                if done.code != 0:
                    raise RuntimeError(
                        f"{job.name} without a fault ended with {done.code}: {done.output[-1500:]}"
                    )
                (folder / "seconds").write_text(f"{done.seconds}")
        return folder


def end(process, folder, start):
    try:
        code = process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        code = None
    kill_all(folder)
    process.wait()
    process.reader.join()
    return Done(code, "".join(process.lines), time.monotonic() - start)


def processes_of(folder):
    """{process: its RANK or None} of all that runs for a folder; what is a zombie has no environment any more."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "environ").read_bytes().split(b"\0")
            if f"TRIAL={folder}".encode() in words:
                found[int(path.name)] = next(
                    (int(word[5:]) for word in words if word.startswith(b"RANK=")), None
                )
    return found


def kill_all(folder):
    """kill -9, all at one moment; returns when all are gone."""
    while found := processes_of(folder):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


# ---- What is compared ----


def lines_of(folder):
    """metrics.jsonl without speed and memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if not k.endswith(("_per_second", "_memory_gib"))}
        for line in lines
    ]


def unequal(folder, whole):
    """The number of lines of metrics.jsonl and of final weights in which two finished runs differ."""
    pairs = list(itertools.zip_longest(lines_of(folder), lines_of(whole)))
    ours, theirs = compare.read_weights(folder), compare.read_weights(whole)
    names = ours.keys() | theirs.keys()
    weights = [
        name in ours and name in theirs and np.array_equal(ours[name], theirs[name])
        for name in names
    ]
    return sum(a != b for a, b in pairs) + weights.count(False) + (not pairs) + (not names)


def apart(folder, whole):
    """The largest relative difference of the loss of a step."""
    ours, theirs = compare.read_steps(folder), compare.read_steps(whole)
    return max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(ours, theirs, strict=True))


def verified(folder):
    """The steps of the checkpoints that can be trusted."""
    there = fault_tolerance.checkpoints_in(folder)
    return [step for step, path in there.items() if fault_tolerance.problem_of(path) is None]


def status_of(folder):
    return json.loads((folder / "status.json").read_text())


def goes_on(lab, job, folder, wrong="", faults=(), flags=(), whole=None):
    """The result of a trial whose run is continued by the same command: nothing wrong so far, and the end equal."""
    ends = lab.go_on(job, folder, faults, flags=flags)
    if ends[-1].code != 0:
        return Result(
            False, 0, f"{wrong} the next run ended with {ends[-1].code}: {ends[-1].output[-1500:]}"
        )
    found = unequal(folder, whole or lab.whole(job))
    return Result(not found and not wrong, found, wrong)


def last_line(output):
    """The last line of the recipe itself, without those of rehearsal and launcher behind it."""
    launchers = re.compile(
        r"[WEI]\d{4} |Traceback|  |torch\.distributed|[=-]{5}|\S+ FAILED|Root|Fail|\[\d\]|<NO_"
    )
    lines = output.split("shard report:")[0].splitlines()
    return [line for line in lines if line.strip() and not launchers.match(line)][-1]


# ---- Groups: each returns its trials ----


def stop_and_go_on(job, *steps):
    """Stop by SIGTERM to the last rank in these steps; the same command again and again."""

    def do(lab, folder):
        whole = lab.whole(job)
        faults = [
            {"do": "SIGTERM", "at": "summed_loss", "step": step, "rank": job.ranks - 1}
            for step in steps
        ]
        ends = lab.go_on(job, folder, faults)
        if (codes := [done.code for done in ends]) != [75] * len(steps) + [0]:
            return Result(False, 0, f"exit codes {codes}: {ends[-1].output[-1500:]}")
        found = unequal(folder, whole)
        return Result(found == 0, found)

    return do


def resume(args):
    kinds = {
        "full": parity.configs(),
        "LoRA": [name for name in parity.configs() if name != "fsdp1_no_shard"],
        "nf4 LoRA": ["single", "fsdp2_full_shard", "deepspeed_zero3"],
    }
    jobs = [job(config, 2, weights) for weights, configs in kinds.items() for config in configs]
    jobs += [
        job("deepspeed_zero3", 3),
        job("fsdp2_full_shard", 3),
    ]  # on which weights have parts of other sizes
    return [
        Trial(
            f"stopped and continued, {job.weights}",
            f"{job.name}, step {step}",
            stop_and_go_on(job, step),
        )
        for job, step in zip(jobs, itertools.cycle(range(1, 20, 3)), strict=False)
    ]


def every_step(args):
    steps = {
        "single": range(1, STEPS),
        "ddp": range(1, STEPS, 3),
        "fsdp2_full_shard": range(2, STEPS, 3),
    }
    return [
        Trial(f"stopped in each step, {config}", f"step {step}", stop_and_go_on(job(config), step))
        for config in steps
        for step in steps[config]
    ]


def five(args):
    return [
        Trial(
            "five interruptions in one epoch", config, stop_and_go_on(job(config), 2, 5, 9, 12, 16)
        )
        for config in ("single", "ddp", "deepspeed_zero2")
    ]


def change_often(jobs, stops):
    """Go on under another strategy or number of ranks after each stop: each row once an epoch, the loss the same."""

    def do(lab, folder):
        faults = [{"do": "SIGTERM", "at": "summed_loss", "step": step, "rank": 0} for step in stops]
        faults += [{"do": "record rows", "at": "summed_loss", "file": folder / "rows"}]
        whole = lab.whole(job("single"))
        for job_now, code in zip(jobs, [75] * len(stops) + [0], strict=True):
            done = lab.run(job_now, folder, faults)
            if done.code != code:
                return Result(
                    False, 0, f"{job_now.name} ended with {done.code}: {done.output[-1500:]}"
                )
        records = [
            json.loads(line)
            for path in folder.glob("rows.*")
            for line in path.read_text().splitlines()
        ]
        seen = sorted(
            row for record in records if record["step"] <= EPOCH for row in record["rows"] if row
        )
        worst = apart(folder, whole)
        once = seen == list(range(1, 211))
        return Result(once and worst <= 1e-4, worst, "" if once else "not each row exactly once")

    return do


def refuse_other_rows(config):
    """A cut with other rows a step refuses, and names the flags that fit."""

    def do(lab, folder):
        lab.run(job("single"), folder, [{"do": "SIGTERM", "at": "summed_loss", "step": 2}])
        done = lab.run(replace(job(config), batch=5, accumulation=1), folder)
        words = ("12 rows", "--per_device_train_batch_size", "--gradient_accumulation_steps")
        ok = done.code == 64 and all(word in done.output for word in words)
        return Result(ok, 0, "" if ok else f"{done.code}: {done.output[-1500:]}")

    return do


def elastic(args):
    trials = []
    for config in (
        "ddp",
        "fsdp2_full_shard",
        "fsdp1_full_shard",
        "deepspeed_zero2",
        "deepspeed_zero3",
    ):
        for order in ([1, 2, 3, 4], [4, 3, 2, 1], [2, 4, 1, 3]):
            jobs = [job(config if ranks > 1 else "single", ranks) for ranks in order]
            trials.append(
                Trial(
                    "other numbers of ranks", f"{config} {order}", change_often(jobs, [5, 10, 15])
                )
            )
        trials.append(Trial("other rows a step are refused", config, refuse_other_rows(config)))
    return trials


def strategies(args):
    order = [
        "single",
        "ddp",
        "fsdp1_full_shard",
        "deepspeed_zero3",
        "fsdp2_full_shard",
        "deepspeed_zero1",
        "fsdp1_shard_grad_op",
        "deepspeed_zero2",
        "fsdp2_shard_grad_op",
        "deepspeed_zero0",
        "fsdp1_no_shard",
    ]
    stops = list(range(2, 21, 2))
    turns = [order[i:] + order[:i] for i in (0, 4, 8)]
    return [
        Trial(
            "another strategy every 2 steps",
            " > ".join(turn),
            change_often([job(config) for config in turn], stops),
        )
        for turn in turns
    ]


PLACES = {  # where a signal comes: the function, further flags, and the step after which it is saved
    "data preparation": ({"at": "load_data"}, (), 0),
    "the first step": ({"at": "summed_loss", "step": 1}, (), 1),
    "training": ({"at": "summed_loss", "step": 7}, (), 7),
    "evaluation": ({"at": "evaluate"}, (), 18),
    "saving": ({"at": "save_checkpoint"}, ("--save_steps", "5"), 6),
}


def signal_and_go_on(job, number, rank, place, whole=None):
    """A signal at this place to one rank, or to all: stopped, saved, the last line says how to go on, and it does."""
    fault, flags, step = PLACES[place]
    faults = [{"do": number, **fault} | ({} if rank is None else {"rank": rank})]

    def do(lab, folder):
        done = lab.run(job, folder, faults, flags=flags)
        found, last = status_of(folder), last_line(done.output)
        ok = (
            done.code == 75
            and found["state"] == "stopped"
            and last.endswith(("again to go on", "command again"))
            and max(verified(folder), default=0) == step
        )
        wrong = (
            "" if ok else f"code {done.code}, {found}, last line {last}, saved {verified(folder)}"
        )
        return goes_on(lab, job, folder, wrong, flags=flags, whole=whole)

    return do


def signal_a_rank_that_waits(number):
    """While rank 0 prepares data, the rank that waits for it, in C++, gets a signal."""

    def do(lab, folder):
        start, mark = time.monotonic(), lab.folder / f"{folder.name}_waits"
        fault = {"do": "wait", "at": "load_data", "rank": 0, "file": mark, "seconds": 60}
        process = lab.start(job("ddp"), folder, [fault])
        while not mark.exists() and process.poll() is None:
            time.sleep(0.1)
        time.sleep(5)
        sent = time.monotonic()
        for pid in (pid for pid, rank in processes_of(folder).items() if rank == 1):
            os.kill(pid, getattr(signal, number))
        done = end(process, folder, start)
        seconds = time.monotonic() - sent
        ok = (
            done.code == 75 and status_of(folder)["state"] == "stopped" and seconds < 30
        )  # of torchrun's grace
        wrong = "" if ok else f"{done.code} after {seconds:.0f} s: {done.output[-1500:]}"
        return goes_on(lab, job("ddp"), folder, wrong)

    return do


def signal_a_group_that_tokenises(number):
    """A signal to a process and the two that tokenise its rows, of which one has done its share and holds a lock."""

    def do(lab, folder):
        start, mark = time.monotonic(), lab.folder / f"{folder.name}_tokenises"
        fault = {"do": "wait", "at": "row_to_messages", "file": mark, "seconds": 20}
        cache = {
            "HF_DATASETS_CACHE": str(lab.folder / f"{folder.name}_cache")
        }  # else nothing is left to tokenise
        process = lab.start(job("single"), folder, [fault], ("--dataset_num_proc", "2"), **cache)
        while not mark.exists() and process.poll() is None:
            time.sleep(0.1)
        time.sleep(2)  # for the other to come to its end
        os.killpg(process.pid, getattr(signal, number))
        done = end(process, folder, start)
        ok = (
            done.code == 75
            and status_of(folder)["state"] == "stopped"
            and "error:" not in done.output
        )
        return goes_on(
            lab, job("single"), folder, "" if ok else f"{done.code}: {done.output[-1500:]}"
        )

    return do


def signal_a_group(job, number):
    """A signal to all processes of a rank's group, those that load its data included."""

    def do(lab, folder):
        flags = ("--dataloader_num_workers", "1")
        done = lab.run(
            job,
            folder,
            [{"do": number, "at": "summed_loss", "step": 7, "rank": 0, "group": True}],
            flags,
        )
        wrong = (
            ""
            if done.code == 75 and verified(folder) == [7]
            else f"{done.code}: {done.output[-1500:]}"
        )
        return goes_on(lab, job, folder, wrong, flags=flags)

    return do


def signals(args):
    every = [
        (config, number, rank, place)
        for config in ("ddp", "fsdp2_full_shard", "deepspeed_zero3")
        for number in ("SIGTERM", "SIGUSR1")
        for rank in (None, 0, 1)
        for place in PLACES
    ]
    chosen = [each for i, each in enumerate(every) if each[0] == "ddp" or i % 4 == 0]
    trials = [
        Trial(
            f"{number} in {place}",
            f"{config}, {'all ranks' if rank is None else f'rank {rank} alone'}",
            signal_and_go_on(job(config), number, rank, place),
        )
        for config, number, rank, place in chosen
    ]
    trials += [
        Trial(
            f"{number} to a group with loaders of data", config, signal_a_group(job(config), number)
        )
        for config in ("single", "ddp")
        for number in ("SIGTERM", "SIGUSR1", "SIGINT")
    ]
    trials += [
        Trial(
            f"{number} in data preparation",
            "single, two processes that tokenise",
            signal_a_group_that_tokenises(number),
        )
        for number in ("SIGTERM", "SIGUSR1", "SIGINT")
    ]
    waits = Trial(
        "SIGTERM in data preparation", "ddp, a rank that waits", signal_a_rank_that_waits("SIGTERM")
    )
    return [*trials, waits]


def twice(args):
    """A second signal while the first one's checkpoint is saved, and then kill -9."""

    def trial(config, change):
        faults = [
            {"do": "SIGTERM", "at": "summed_loss", "step": 8, "rank": 0},
            {"do": "SIGTERM", "at": "publish", "call": 3, "rank": 0},
            {"do": "crash at change", "at": "publish", "call": 3, "rank": 0, "change": change},
        ]

        def do(lab, folder):
            flags = ("--save_steps", "3")
            done = lab.run(job(config), folder, faults, flags=flags)
            killed = done.code not in (0, 75) and status_of(folder)["state"] != "stopped"
            wrong = (
                "" if killed and 6 in verified(folder) else f"code {done.code}, {verified(folder)}"
            )
            return goes_on(lab, job(config), folder, wrong, flags=flags)

        return Trial("two signals, then kill -9", f"{config}, change {change} of the save", do)

    def evaluated_once(config):
        def do(lab, folder):
            stopped = lab.run(job(config), folder, [{"do": "SIGTERM", "at": "evaluate", "rank": 0}])
            killed = lab.run(
                job(config), folder, [{"do": "SIGKILL", "at": "summed_loss", "step": 20, "rank": 0}]
            )
            wrong = (
                ""
                if stopped.code == 75 and killed.code not in (0, 75)
                else f"{stopped.code}, {killed.code}"
            )
            return goes_on(lab, job(config), folder, wrong)

        return Trial("a signal in an evaluation, then kill -9 after it", config, do)

    return [
        *(trial(config, change) for config in ("single", "ddp") for change in (1, 3, 8, 15)),
        *(evaluated_once(config) for config in ("single", "ddp")),
    ]


def state_of(pid):
    """The letter of /proc: R, S, D, T stopped, and Z if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


def lose_a_rank(job, rank, fault, flags=(), stopped=False):
    """Kill or stop one rank; measure until all are gone, or how much later than the time limit that is."""

    def do(lab, folder):
        start = time.monotonic()
        process = lab.start(
            job, folder, [{"do": "SIGSTOP" if stopped else "SIGKILL", "rank": rank} | fault], flags
        )
        pids = {}
        while len(pids) < job.ranks and process.poll() is None:
            pids = {
                number: pid for pid, number in processes_of(folder).items() if number is not None
            }
            time.sleep(0.05)
        while process.poll() is None and state_of(pids[rank]) not in "ZTX":
            time.sleep(0.01)
        lost = time.monotonic()
        while (
            any(state_of(pid) not in "ZX" for pid in pids.values())
            and time.monotonic() < lost + TIMEOUT
        ):
            time.sleep(0.01)
        seconds = time.monotonic() - lost - (10 if stopped else 0)
        done, status = end(process, folder, start), status_of(folder)
        why = (
            "no sign of life for 10 s" if stopped else f"rank {rank} (process {pids[rank]}) is gone"
        )
        said = re.search(
            rf"{re.escape(why)} on {os.uname().nodename} in step {status['step']}", done.output
        )
        stacks = done.output.count("Current thread 0x") if stopped else job.ranks
        ok = (
            done.code not in (0, None)
            and seconds <= 5
            and said
            and status["state"] == "failed"
            and why in status["why"]
            and stacks == job.ranks
        )
        wrong = "" if ok else f"{done.code}, {stacks} stacks, {status}: {done.output[-2500:]}"
        return Result(bool(ok), seconds, wrong)

    return do


def dead_ranks(args):
    trials = []
    for config, ranks in itertools.product(("ddp", "fsdp2_full_shard", "deepspeed_zero2"), (2, 3)):
        for rank in range(ranks):
            # broadcast_object_list: where the others wait for the end of a save
            saving = {
                "at": "broadcast_object_list" if rank else "publish",
                "call": 2 if rank else 1,
            }
            places = {
                "training": {"at": "summed_loss", "step": 7},
                "evaluation": {"at": "evaluate"},
                "saving": saving,
            }
            trials += [
                Trial(
                    f"kill -9 of a rank in {place}",
                    f"{config}, rank {rank} of {ranks}",
                    lose_a_rank(job(config, ranks), rank, fault, ("--save_steps", "4")),
                )
                for place, fault in places.items()
            ]
        trials += [
            Trial(
                "a stopped rank, after --ddp_timeout",
                f"{config}, rank {rank} of {ranks}",
                lose_a_rank(
                    job(config, ranks),
                    rank,
                    {"at": "summed_loss", "step": 7},
                    ("--ddp_timeout", "10"),
                    stopped=True,
                ),
            )
            for rank in (0, ranks - 1)
        ]
    return trials


def kill_at_random(job, save_steps, kills, seed):
    """kill -9 of everything at moments spread evenly over the wall time of a run, then the same command."""
    flags = ("--save_steps", save_steps)

    def do(lab, folder):
        whole, dice, lost, left, published = lab.whole(job), random.Random(seed), 0, kills, False
        seconds = float((whole / "seconds").read_text())
        while left:
            start, process = time.monotonic(), lab.start(job, folder, flags=flags)
            try:
                process.wait(dice.uniform(0, seconds))
                done = end(process, folder, start)
                if done.code != 0 or unequal(folder, whole):
                    return Result(
                        False, lost, f"seed {seed}: {done.code}, not equal: {done.output[-1500:]}"
                    )
                shutil.rmtree(folder)
                published = False
                continue
            except subprocess.TimeoutExpired:
                kill_all(folder)
                end(process, folder, start)
            left -= 1
            published |= (folder / "latest").exists()
            steps, reached = verified(folder), last_step(folder)
            if published and not steps:
                return Result(False, lost, f"seed {seed}: no checkpoint can be trusted")
            lost = max(lost, reached - max(steps, default=0))
        result = goes_on(lab, job, folder, flags=flags)
        return Result(result.ok and lost <= save_steps, lost, result.note, kills)

    return do


def last_step(folder):
    """The last step in metrics.jsonl, whose last line may be cut."""
    text = (folder / "metrics.jsonl").read_text() if (folder / "metrics.jsonl").exists() else ""
    return max(map(int, re.findall(r'^{"step": (\d+),.*}$', text, re.MULTILINE)), default=0)


def random_kills(args):
    shares = {"single": (1, args.kills * 3 // 4), "ddp": (2, args.kills // 4)}  # save_steps, kills
    return [
        Trial(
            f"kill -9 of all at random, {config}",
            f"seed {seed}",
            kill_at_random(job(config), every, 5, seed),
        )
        for config, (every, kills) in shares.items()
        for seed in range(kills // 5)
    ]


def save_in_danger(fault, code, what):
    """A fault in the second save, which is about to replace the only checkpoint."""
    flags = ("--save_steps", "3", "--save_total_limit", "1")

    def do(lab, folder):
        done = lab.run(job(), folder, [fault], flags=flags)
        wrong = (
            ""
            if done.code == code
            else f"ended with {done.code}, not {code}: {done.output[-1500:]}"
        )
        if code and not set(verified(folder)) & {3, 6}:
            wrong += f" {what}: no checkpoint can be trusted"
        return goes_on(lab, job(), folder, wrong, flags=flags)

    return do


def writes(args):
    killed, second = -signal.SIGKILL, {"at": "publish", "call": 2}
    trials = [
        Trial(
            "crash before each change of the file system",
            f"change {n}",
            save_in_danger({"do": "crash at change", "change": n, **second}, killed, f"change {n}"),
        )
        for n in range(1, CHANGES + 1)
    ]
    trials.append(
        Trial(
            "no change is left out",
            f"change {CHANGES + 1}",
            save_in_danger({"do": "crash at change", "change": CHANGES + 1, **second}, 0, ""),
        )
    )
    size = 27_062_484  # of the state file
    places = [
        ("state.safetensors", {**second, "byte": size * quarter // 4}) for quarter in (0, 1, 2, 3)
    ]
    places += [
        ("progress.json", {"at": "save_file", "call": 2, "after": True, "byte": byte})
        for byte in (0, 400, 800, 1200)
    ]
    places += [
        ("manifest.json", {"at": "hash_of", "call": 4, "byte": byte}) for byte in (0, 50, 100, 150)
    ]
    for do, code in (("crash", -signal.SIGXFSZ), ("refuse", 73)):
        trials += [
            Trial(
                f"{do} in the middle of a write",
                f"{name}, byte {fault['byte']}",
                save_in_danger({"do": f"{do} at byte", **fault}, code, name),
            )
            for name, fault in places
        ]
    return trials


def fill_the_disk(quarter):
    """On a tmpfs the second checkpoint has room for some quarters of its size; None: too little from the start."""
    flags, size = ("--save_steps", "3", "--save_total_limit", "2"), 27_100_000

    def do(lab, folder):
        disk, faults = lab.folder / f"{folder.name}_disk", []
        disk.mkdir(exist_ok=True)
        if quarter is not None:
            faults = [
                {
                    "do": "fill disk",
                    "at": "save_file",
                    "call": 2,
                    "file": disk / "filler",
                    "free": size * quarter // 4,
                }
            ]
        script = (
            'mount -t tmpfs -o size=$1 tmpfs "$2" || exit 99; disk=$2; keep=$3; shift 3; "$@"; code=$?; '
            'rm -f "$disk/filler"; mkdir -p "$keep"; cp -a "$disk/." "$keep"; exit $code'
        )
        room = size * 3 // 2 if quarter is None else 4 * size
        before = ["unshare", "-rm", "sh", "-c", script, "sh", room, disk, folder]
        done = lab.run(job(), disk, faults, flags=flags, before=before)
        said = re.search(r"it needs ([\d,]+) bytes, ([\d,]+) are free", done.output)
        ok = (
            done.code == 73
            and said
            and verified(folder) == [3]
            and status_of(folder)["exit_code"] == 73
        )
        wrong = "" if ok else f"{done.code}, {verified(folder)}: {done.output[-1500:]}"
        return goes_on(lab, job(), folder, wrong, flags=flags)

    return do


def can_mount():
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") and subprocess.run(command, capture_output=True).returncode == 0


def disk(args):
    if not can_mount():
        return []
    return [
        Trial(
            "the disk is full",
            "before the save" if quarter is None else f"{quarter}/4 of the save",
            fill_the_disk(quarter),
        )
        for quarter in (None, 0, 1, 2, 3)
    ]


def in_process(function, *arguments, needs_checkpoint=True):
    """A function of damage.py on a small checkpoint."""

    def do(lab, folder):
        count, missed = function(
            damage.make_checkpoint(folder, 5) if needs_checkpoint else folder, *arguments
        )
        return Result(not missed, len(missed), "; ".join(missed[:5]), count)

    return do


def damages(args):
    return [
        Trial(
            "a flipped bit is found, the file named",
            "all files",
            in_process(damage.flipped_bits, 1000),
        ),
        Trial(
            "cut, empty, missing or foreign files are found",
            "",
            in_process(damage.cut_and_lost_files),
        ),
        Trial(
            "changed manifests never trusted, none raises",
            "",
            in_process(damage.mutated_manifests, 10_000),
        ),
        Trial(
            "the checkpoint before a damaged one is taken",
            "",
            in_process(damage.older_one_is_taken, needs_checkpoint=False),
        ),
        Trial(
            "foreign files stay and are not taken",
            "",
            in_process(damage.stray_files, needs_checkpoint=False),
        ),
    ]


def hash_share(lab, folder):
    """The time that hashing takes of a save of 400 MB; the median of five saves."""
    shares = sorted(damage.share_of_hashing(folder, 100_000_000) for _ in range(5))
    return Result(shares[2] <= 0.1, shares[2])


def hashing(args):
    return [Trial("at most a tenth of a save", "400 MB", hash_share)]


def pickles_in_a_checkpoint(forged):
    """A pickle in place of a file, with a manifest that fits, and beside the files of a checkpoint."""

    def do(lab, folder):
        mark, others = (
            lab.folder / f"{folder.name}_mark",
            [
                "optimizer.bin",
                "scheduler.bin",
                "random_states_0.pkl",
                "custom_checkpoint_0.pkl",
                "pytorch_model.bin",
            ],
        )
        lab.run(job(), folder, [{"do": "SIGTERM", "at": "summed_loss", "step": 2}])
        for path in [folder / "checkpoint-2", folder]:
            for name in [*others, "training_args.bin", "adapter_model.bin"]:
                damage.torch_pickle(path / name, mark)
        if forged == "latest":
            damage.plain_pickle(folder / "latest", mark)
            damage.plain_pickle(folder / "status.json", mark)
        elif forged == "manifest.json":
            damage.plain_pickle(folder / "checkpoint-2" / forged, mark)
        elif forged:
            damage.forge(folder / "checkpoint-2", forged, mark)
        done = lab.run(job(), folder)
        expected = {None: 0, "latest": 0}.get(forged, 65)
        return Result(
            done.code == expected and not mark.exists(), 0, f"{done.code}: {done.output[-700:]}"
        )

    return do


def pickles_in_a_model(name):
    """A model folder whose loader would meet foreign code: a pickle of weights, of a tokenizer, or a module."""

    def do(lab, folder):
        mark, model = lab.folder / f"{folder.name}_mark", lab.folder / f"{folder.name}_model"
        shutil.copytree(lab.tiny / "model", model, dirs_exist_ok=True)
        for other in ("training_args.bin", "optimizer.bin", "scheduler.bin", "tokenizer.pkl"):
            damage.torch_pickle(model / other, mark)
        config = json.loads((model / "config.json").read_text())
        if name.endswith(".py"):
            (model / name).write_text(f"import os\nos.system('touch {mark}')\n")
            owner = "tokenizer_config.json" if name.startswith("token") else "config.json"
            config = json.loads((model / owner).read_text())
            key = (
                {"AutoTokenizer": [None, "tokenization_x.X"]}
                if name.startswith("token")
                else {"AutoConfig": "modeling_x.X", "AutoModelForCausalLM": "modeling_x.X"}
            )
            (model / owner).write_text(json.dumps(config | {"auto_map": key}))
        elif name == "adapter_model.bin":
            (model / "adapter_config.json").write_text(
                json.dumps(
                    {
                        "peft_type": "LORA",
                        "task_type": "CAUSAL_LM",
                        "base_model_name_or_path": str(lab.tiny / "model"),
                        "r": 8,
                        "target_modules": ["q_proj"],
                    }
                )
            )
            damage.torch_pickle(model / name, mark)
        else:
            (model / "model.safetensors").unlink(missing_ok=name != "tokenizer.json")
            (damage.plain_pickle if name != "pytorch_model.bin" else damage.torch_pickle)(
                model / name, mark
            )
        done = lab.run(job(), folder, model=model, flags=("--max_steps", "1"))
        return Result(
            done.code in (0, 64) and not mark.exists(), 0, f"{done.code}: {done.output[-700:]}"
        )

    return do


def keep_secrets(lab, folder):
    """No value of a secret in the environment is printed or written."""
    names = (
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "MY_PASSWORD",
        "ACCELERATE_MY_TOKEN",
    )
    secrets = {name: f"planted-{name.lower()}-7391" for name in names}
    done = lab.run(job("ddp"), folder, flags=("--save_steps", "5"), **secrets)
    texts = [
        done.output.encode(),
        *(path.read_bytes() for path in folder.rglob("*") if path.is_file()),
    ]
    told = [
        name for name, value in secrets.items() if any(value.encode() in text for text in texts)
    ]
    return Result(
        done.code == 0 and not told,
        len(told),
        " ".join(told) if done.code == 0 else done.output[-1500:],
    )


def foreign(args):
    forged = (None, "latest", "manifest.json", "state.safetensors", "progress.json")
    models = (
        "pytorch_model.bin",
        "adapter_model.bin",
        "modeling_x.py",
        "tokenization_x.py",
        "tokenizer.json",
        "model.safetensors",
    )
    return [
        *(
            Trial(
                "a pickle in a checkpoint is never run",
                f"forged: {name}",
                pickles_in_a_checkpoint(name),
            )
            for name in forged
        ),
        *(
            Trial("foreign code in a model is never run", name, pickles_in_a_model(name))
            for name in models
        ),
        Trial("no secret is written", "ddp", keep_secrets),
    ]


def row_of_step(step):
    """A row (from 1) that only this step of the job has; rows 1 to 21 are numbers of the evaluation rows too."""
    order, again = (np.random.default_rng((42, epoch)).permutation(210) for epoch in (0, 1))
    return next(
        int(row) + 1
        for row in order[12 * (step - 1) : 12 * step]
        if row > 21 and row not in again[:24]
    )


def hash_of_state(folder, step):
    return json.loads((folder / f"checkpoint-{step}" / "manifest.json").read_text())[
        "state.safetensors"
    ]


def nonfinite_weights(folder):
    """Names in the checkpoints, and in the result, that are not finite."""
    return [
        f"{path.name}: {name}"
        for path in folder.rglob("*.safetensors")
        for name, array in load_file(path).items()
        if not np.isfinite(array).all()
    ]


def not_finite(job, do_what, policy, step=9):
    """A batch of one rank gives nan, inf or an infinite gradient: nothing changes on any rank."""
    row, what = row_of_step(step), "gradient" if "gradient" in do_what else "loss"
    flags = [
        "--save_steps",
        "1",
        "--save_total_limit",
        "30",
        "--nonfinite",
        "skip" if policy != "stop" else "stop",
    ]
    flags += ["--nonfinite_budget", "0"] if policy == "budget" else []

    def do(lab, folder):
        done = lab.run(job, folder, [{"do": do_what, "at": "summed_loss", "row": row}], flags)
        told = [
            json.loads(line) for line in (folder / "nonfinite_rows.jsonl").read_text().splitlines()
        ]
        rows = sum(told[0]["rows_by_rank"].values(), [])
        wrong = (
            []
            if len(told) == 1 and told[0]["step"] == step and row in rows
            else [f"told {told}, not row {row}"]
        )
        if what != told[0]["what"] or len(rows) > (3 if what == "loss" else 12):
            wrong.append(f"blamed {told[0]['what']}: {rows}")
        if done.code != (0 if policy == "skip" else 70):
            wrong.append(f"ended with {done.code}: {done.output[-1500:]}")
        if policy == "skip" and hash_of_state(folder, step) != hash_of_state(folder, step - 1):
            wrong.append("weights or optimizer changed")
        if max(verified(folder)) != (STEPS if policy == "skip" else step - 1):
            wrong.append(f"saved {verified(folder)}")
        wrong += nonfinite_weights(folder)[:3]
        return Result(not wrong, len(wrong), "; ".join(wrong))

    return do


def not_finite_at_first(job):
    """The first step is skipped, so there is nothing to save yet: saving changes nothing, and a stop neither."""

    def do(lab, folder):
        flags, fault = (
            ("--nonfinite", "skip"),
            {"do": "nan", "at": "summed_loss", "row": row_of_step(1)},
        )
        ends = [lab.run(job, folder / "whole", [fault], ("--save_steps", "0", *flags))]
        for step in (1, 3):
            stop = {"do": "SIGTERM", "at": "summed_loss", "step": step, "rank": 0}
            ends.append(lab.run(job, folder / "run", [fault, stop], ("--save_steps", "1", *flags)))
        ends.append(lab.run(job, folder / "run", [fault], ("--save_steps", "1", *flags)))
        if (codes := [done.code for done in ends]) != [0, 75, 75, 0]:
            return Result(False, 0, f"exit codes {codes}: {ends[-1].output[-1500:]}")
        found = unequal(folder / "run", folder / "whole")
        return Result(found == 0, found)

    return do


def numbers(args):
    configs = [
        "single",
        "ddp",
        "fsdp1_full_shard",
        "fsdp2_full_shard",
        *(f"deepspeed_zero{i}" for i in range(4)),
    ]
    policies = {"skip": "skipped", "stop": "stopped", "budget": "stopped for want of budget"}
    trials = [
        Trial(policies[policy], f"{what}, {config}", not_finite(job(config), what, policy))
        for policy in policies
        for config in configs
        for what in ("nan", "inf", "inf gradient")
    ]
    return trials + [
        Trial("skipped before there is anything to save", config, not_finite_at_first(job(config)))
        for config in configs
    ]


GROUPS = {
    "resume": resume,
    "every step": every_step,
    "five": five,
    "elastic": elastic,
    "strategies": strategies,
    "signals": signals,
    "twice": twice,
    "dead ranks": dead_ranks,
    "random kills": random_kills,
    "writes": writes,
    "disk": disk,
    "hashing": hashing,
    "damage": damages,
    "foreign": foreign,
    "numbers": numbers,
}


# ---- Running and reporting ----


def line_of(group, trial):
    return f"{group}: {trial.what}, {trial.detail}"


def attempt(lab, group, number, trial):
    """Do one trial in a folder of its own, which stays if it is not as promised."""
    folder = lab.folder / group.replace(" ", "_") / str(number)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = time.monotonic()
    try:
        result = trial.do(lab, folder)
    except Exception as error:  # a missing file, for one: not as promised
        kill_all(folder)
        result = Result(False, 0, f"{type(error).__name__}: {error}")
    print(
        f"{'ok' if result.ok else 'FAILED':>6}  {line_of(group, trial)} "
        f"({time.monotonic() - start:.0f} s, {UNITS[group]}: {result.figure:.3g})",
        flush=True,
    )
    if result.ok:
        shutil.rmtree(folder)
    else:
        print(result.note, flush=True)
    note = "" if result.ok else result.note.replace(str(lab.folder), "RUNS")
    return {
        "what": trial.what,
        "detail": trial.detail,
        **result._asdict(),
        "ok": bool(result.ok),
        "note": note,
    }


def entry(facts, done, before, names):
    """What --json holds of a group: its new trials and those of `before`, if there are such, that were not done again.
    names: (what, detail) of all trials that the group has now."""
    wanted = names - {(trial["what"], trial["detail"]) for trial in done}
    kept = [
        trial for trial in before.get("trials", []) if (trial["what"], trial["detail"]) in wanted
    ]
    if not kept:
        return {**facts, "trials": done}
    return {
        **facts,
        "command": f"{before['command']}`, then `{facts['command']}",
        "trials": kept + done,
    }


def rows_of(groups):
    """The lines of the table: one for each `what` of each group."""
    lines = []
    for group, found in groups.items():
        for what, trials in itertools.groupby(
            sorted(found["trials"], key=lambda t: t["what"]), lambda t: t["what"]
        ):
            trials = list(trials)
            count, good = (
                sum(t["count"] for t in chosen)
                for chosen in (trials, [t for t in trials if t["ok"]])
            )
            worst = max(t["figure"] for t in trials)
            lines.append([group, what, f"{count:,}", f"{good:,}", f"{worst:.3g} {UNITS[group]}"])
        if not found["trials"]:
            lines.append([group, "skipped: not possible on this machine", "0", "0", ""])
    return lines


def report(groups):
    """docs/fault_injection.md."""
    summary = table(["group", "what was done", "trials", "as promised", "worst"], rows_of(groups))
    parts = [
        "# Fault injection",
        "Written by `scripts/fault_injection.py`, which says what each group is.",
        summary,
    ]
    for group, found in groups.items():
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        facts = f"{found['date']}, {found['device']}, {versions}: `{found['command']}`"
        details = sorted({t["detail"] for t in found["trials"] if t["detail"]})
        cases = f"{len(details)} cases, among them {'; '.join(details[:: len(details) // 8 + 1])}."
        failed = [
            f"FAILED: {t['what']}, {t['detail']}: {t['note'][:300]}"
            for t in found["trials"]
            if not t["ok"]
        ]
        parts += [f"## {group}", facts, *[cases] * bool(details), *failed]
    return "\n\n".join(parts) + "\n"


def spread(trials, limit):
    """At most `limit` trials of each `what`, spread evenly."""
    chosen = []
    for what in dict.fromkeys(trial.what for trial in trials):
        same = [trial for trial in trials if trial.what == what]
        chosen += same[:: -(-len(same) // limit)] if limit else same
    return chosen


def parse_args():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--groups",
        nargs="*",
        choices=GROUPS,
        default=list(GROUPS),
        metavar="GROUP",
        help=f"what to try (default: all): {', '.join(GROUPS)}",
    )
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="trials whose line of --list has this"
    )
    parser.add_argument("--limit", type=int, default=0, help="trials of each kind at most")
    parser.add_argument("--kills", type=int, default=200, help="kill -9 at random moments")
    parser.add_argument("--list", action="store_true", help="print the trials and stop")
    parser.add_argument(
        "--jobs", type=int, default=1, help="trials at a time; more of them disturb the seconds"
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/fault_injection"), help="folder of all runs"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("results/fault_injection.json"), help="the results"
    )
    parser.add_argument(
        "--report", type=Path, metavar="PATH.md", help="write the table of all results here"
    )
    args = parser.parse_args()
    if args.jobs < 1 or args.limit < 0 or args.kills < 0:
        parser.error("--jobs must be at least 1, --limit and --kills 0 or more")
    return args


def main():
    args = parse_args()
    planned = {
        group: spread(
            [trial for trial in GROUPS[group](args) if re.search(args.only, line_of(group, trial))],
            args.limit,
        )
        for group in args.groups
    }
    planned = {group: trials for group, trials in planned.items() if trials or not args.only}
    if args.list:
        print("\n".join(line_of(group, trial) for group in planned for trial in planned[group]))
        return
    results = json.loads(args.json.read_text()) if args.json.exists() else {}
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "device": f"CPU, {os.cpu_count()} cores",
        "command": f"python {shlex.join(sys.argv)}",
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
    }
    lab = Lab(args.output_dir) if planned else None
    for group, trials in planned.items():
        with ThreadPoolExecutor(args.jobs) as pool:
            done = list(
                pool.map(lambda pair, group=group: attempt(lab, group, *pair), enumerate(trials))
            )
        names = {(trial.what, trial.detail) for trial in GROUPS[group](args)}
        results[group] = entry(facts, done, results.get(group, {}) if args.only else {}, names)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps({name: results[name] for name in GROUPS if name in results}, indent=1)
        )
    print(table(["group", "what was done", "trials", "as promised", "worst"], rows_of(results)))
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(report({name: results[name] for name in GROUPS if name in results}))
    sys.exit(
        any(not trial["ok"] for group in planned or results for trial in results[group]["trials"])
    )


if __name__ == "__main__":
    main()
