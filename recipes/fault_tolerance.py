"""What keeps a run from being lost: checkpoints, resume, signals, dead and hanging ranks, numbers that are not finite.

Every recipe uses this file when it lies beside it; a recipe that was copied alone trains without. One checkpoint is

    OUTPUT_DIR/checkpoint-STEP/state.safetensors   trained weights and optimizer state, whole tensors by name
                               progress.json       steps done, schedule, arguments of the run, ranks, strategy
                               manifest.json       size and hash of both
    OUTPUT_DIR/latest                              the name of the newest
    OUTPUT_DIR/status.json                         starting, running, done, stopped or failed, and why;
                                                   what a call on a finished run met is its later_call

Whole tensors, so that a checkpoint does not depend on strategy or number of ranks. JSON and safetensors, so that nothing
is unpickled. No random state and no place in the data: both are functions of the seed and the step. The protocol is
staged, hashed, flushed, renamed, pointer moved, pruned last: at no instant is there less than one whole checkpoint.
"""

import contextlib
import errno
import faulthandler
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import psutil
import torch
import xxhash
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from run_status import (
    HOST,
    RANK,
    RUN,
    TIME_FORMAT,
    fail,
    forget_later_call,
    read_status,
    set_status,
    tell_launcher,
    told_by_others,
    write_file,
)
from whole_state import (
    first_nonfinite,
    gather_state,
    loss_scale,
    master_weights,
    restore_state,
    strategy_in_force,
    zero_stage,
)

FILES, NONFINITE = ("state.safetensors", "progress.json"), "nonfinite_rows.jsonl"
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
# Files that a run writes into its output folder, besides checkpoints and the result
WRITTEN = ("status.json", "run.json", "metrics.jsonl", "latest", NONFINITE)


# ---- How a run ends ----
def conclude(accelerator, state, code, why=None):
    """Record how the run ended, at a point on which all ranks agree: from here on none is missed."""
    set_status(state, code, why) if accelerator.is_main_process else RUN.update(state=state)
    accelerator.wait_for_everyone()


def leave(accelerator, code, message):
    """End all ranks alike: 64 other arguments, 70 not finite, 73 cannot write, 75 stopped and saved. The message comes last."""
    stopped = code == 75
    state = "stopped" if stopped else "failed"
    text = message if stopped else f"error: {message}"
    conclude(accelerator, state, code, message)
    accelerator.end_training()
    if "bar" in RUN:
        RUN["bar"].close()
    accelerator.print(text, file=sys.stdout if stopped else sys.stderr, flush=True)
    tell_launcher(state, code, message, text)
    sys.exit(code)


# ---- Signals, exceptions, dead and hanging ranks ----
def start_run(args):
    """Take signals and record how the run ends. Every rank calls it, before it makes its Accelerator."""
    check_output_dir(args)
    RUN["began"] = time.strftime(TIME_FORMAT)
    RUN["output_dir"] = (
        Path(args.output_dir) if not args.dry_run else None
    )  # which leaves no trace in the folder of a run
    if RANK == 0 and not args.dry_run:
        forget_later_call()
        set_status("starting")
    RUN["woken"], wakes = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    # Processes that load or tokenise data are ended by this one, with SIGTERM; to be asked for a stop is not for them
    for number, of_children in (
        (signal.SIGINT, signal.SIG_IGN),
        (signal.SIGUSR1, signal.SIG_IGN),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        signal.signal(number, on_signal)
        os.register_at_fork(after_in_child=lambda pair=(number, of_children): signal.signal(*pair))


def watch_ranks(accelerator, args):
    """Record exceptions and watch the other ranks of this host, in a thread. Every rank takes part."""
    sys.excepthook = on_exception  # not before: torch wraps what it finds when ranks join, and keeps stderr from other threads
    peers = {}
    for rank, host, pid in gather_object([(RANK, HOST, os.getpid())]):
        if host == HOST and rank != RANK:
            with contextlib.suppress(OSError):  # in another container of the same host name
                peers[os.pidfd_open(pid)] = rank, pid
    RUN["peers"] = peers
    threading.Thread(
        target=watch, args=(peers, args.ddp_timeout, RUN["woken"]), daemon=True
    ).start()


def on_signal(number, frame):
    """Ask for a stop, on which the ranks agree after the step; before the first one there is nothing to save."""
    RUN["stop"] = True
    if RUN["state"] == "starting":
        code = 75
        try:
            told = told_by_others()
            if told:  # the launcher ends all ranks when one has ended, and that one has said why
                code = told["exit_code"] or 1
                text = "ended by the launcher, since another rank had ended"
                tell_launcher(told["state"], code, told["why"], text, later=1)
            elif gone := gone_peers():  # killed: one that was stopped would have told
                code, why = 1, "rank {} (process {}) is gone on {}".format(*gone[0], HOST)
                print(f"error: {why}", file=sys.stderr, flush=True)
                set_status("failed", code, why)
                tell_launcher("failed", code, why, f"error: {why}")
            else:
                name = signal.Signals(number).name
                message = f"Stopped by {name} before the first step: run the same command again"
                set_status("stopped", code, message)
                print(message, flush=True)
                tell_launcher("stopped", code, message, message)
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it was gone already
                    child.kill()
        finally:
            os._exit(
                code
            )  # at once: a pool of processes that tokenise waits without end for a lock that a dead one of them held


def gone_peers():
    """Return (rank, process) of the ranks of this host that have ended since `watch_ranks`."""
    peers = RUN.get("peers", {})
    return [peers[descriptor] for descriptor in wait(list(peers), 0)] if peers else []


def stop_asked(accelerator):
    """Whether any rank was asked to stop. Every rank takes part; also a sign of life.
    A GPU is not waited for: the answer is that of the call before, on which all ranks agree."""
    RUN["sign_of_life"] = time.monotonic()
    if accelerator.num_processes == 1:
        return "stop" in RUN
    answer = accelerator.reduce(torch.full((), float("stop" in RUN), device=accelerator.device)).to(
        "cpu", non_blocking=True
    )
    if accelerator.device.type != "cuda":
        return bool(answer)
    (before, event), RUN["answer"] = (
        RUN.get("answer", (False, None)),
        (answer, torch.cuda.current_stream().record_event()),
    )
    if event:
        event.synchronize()
    return bool(before)


def on_exception(kind, error, trace):
    """Record what ended this rank; 73 and one line where a file could be neither read nor written, 64 where peft found no such layers."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher, which ends all when one ended
    time.sleep(
        2 * (os.environ.get("WORLD_SIZE", "1") != "1")
    )  # the end of another rank is for `watch` to tell
    told = told_by_others()
    if (
        told.get("state") == "failed"
    ):  # a process of this one, such as one that loads data, or another rank has told why
        os._exit(told.get("exit_code") or 1)
    why = f"{kind.__name__}: {error}"
    if kind.__name__ == "NoMatchingPeftModuleError":
        code, text = 64, f"error: --lora_target_modules: {error}"
    elif is_about_a_file(error):
        code, text = 73, f"error: cannot read or write: {error}"
    else:
        code, text = 1, f"error: {why}"
    if code == 1:
        sys.__excepthook__(kind, error, trace)
    else:
        print(text, file=sys.stderr)
    set_status("failed", code, why)
    tell_launcher("failed", code, why, text)
    sys.stdout.flush()
    os._exit(code)


def is_about_a_file(error):
    """Whether an exception says that a file could not be read or written: any file for lack of room
    or permission, or a file in the output folder for any reason."""
    if isinstance(error, SafetensorError) or getattr(error, "errno", None) in CANNOT_WRITE:
        return True
    named = getattr(error, "filename", None)
    if not isinstance(error, OSError) or not isinstance(named, str | bytes) or "folder" not in RUN:
        return False
    return Path(os.path.abspath(os.fsdecode(named))).is_relative_to(os.path.abspath(RUN["folder"]))


def watch(peers, timeout, woken):
    """End this rank when one of its peers is gone, or when there was no sign of life for `timeout` seconds.
    peers: {pidfd: (rank, process)} of this host. woken: the pipe of signal.set_wakeup_fd, for a main thread that waits in C++ and takes no signal."""
    while RUN["state"] in ("starting", "running"):
        ready = wait([*peers, woken], 0.2)
        gone = [peers[descriptor] for descriptor in ready if descriptor in peers]
        if (
            woken in ready
            and not gone
            and signal.getsignal(number := os.read(woken, 1)[0]) is on_signal
        ):
            time.sleep(
                5 * (RUN["state"] == "starting")
            )  # in which the main thread takes it if it can
            on_signal(number, None)
        hangs = time.monotonic() - RUN["sign_of_life"] > timeout
        if not (gone or hangs):
            continue
        why = (
            f"no sign of life for {timeout} s"
            if hangs
            else "rank {} (process {}) is gone".format(*gone[0])
        )
        if hangs:
            faulthandler.dump_traceback()
            for _, pid in peers.values():
                os.kill(pid, signal.SIGCONT)  # a stopped rank shows its stacks too
        time.sleep(hangs + 0.05 * (RANK % 16))  # so that one of them speaks
        if RUN["state"] not in ("starting", "running"):
            return  # all ended as they should
        told = told_by_others()
        if told.get("state") == "stopped":  # the peer was, before the first step
            print(told["why"], flush=True)
        elif not told:
            ending = f"error: {why} on {HOST} in step {RUN['step']}; "
            ending += "the same command goes on from the newest checkpoint"
            print(ending, file=sys.stderr, flush=True)
            set_status("failed", 1, f"{why} on {HOST}")
            tell_launcher("failed", 1, f"{why} on {HOST}", ending)
        os._exit(told.get("exit_code") or 1)


# ---- The output folder ----
def check_output_dir(args):
    """Fail with 73 if the path of the output folder leads nowhere: it goes through a file, is too
    long, is circular or forbidden. Nothing is made yet."""
    RUN["folder"] = Path(args.output_dir)
    try:
        os.stat(args.output_dir)
    except FileNotFoundError:
        if os.path.islink(args.output_dir):
            target = os.readlink(args.output_dir)
            fail(73, f"--output_dir {args.output_dir}: is a link to {target}, which is not there")
    except OSError as error:
        fail(73, f"--output_dir {args.output_dir}: {error.strerror}")


def make_output_dir(accelerator, args):
    """Make the output folder; end all ranks with 73 if a run cannot write there. A dry run makes
    none, and looks at the folder in which it would be made. Every rank takes part."""
    found = gather_object([problem_of_output_dir(Path(args.output_dir), args.dry_run)])
    problems = [problem for problem in found if problem]
    if problems:
        leave(accelerator, 73, problems[0])


def problem_of_output_dir(folder, dry_run):
    """Make a folder, unless this is a dry run, and return why a run cannot write there, or None.
    Files stay as they are."""
    path = folder
    try:
        if dry_run:
            path = nearest_folder(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        for path in [folder / name for name in WRITTEN]:
            if path.exists():
                with open(path, "ab"):
                    pass
    except OSError as error:
        return f"--output_dir {folder}: cannot write to {path}: {error.strerror}"
    return None


def nearest_folder(path):
    """Return a folder itself if it is there, or else the nearest one above it that is."""
    path = Path(path)
    while not path.exists():
        path = path.parent
    return path


def has_result(folder):
    """Whether a folder has the weights that a finished run leaves: of adapters, in one file, or in all of its shards."""
    if any(
        (folder / name).is_file() for name in ("adapter_model.safetensors", "model.safetensors")
    ):
        return True
    try:
        shards = json.loads((folder / "model.safetensors.index.json").read_text())[
            "weight_map"
        ].values()
    except (OSError, ValueError, LookupError):  # a damaged one is written again
        return False
    return all((folder / name).is_file() for name in set(shards))


def end_if_done(accelerator, args, progress, total_steps):
    """End all ranks with 0 if the run in the output folder is done and no step is left, and write
    nothing. Every rank takes part."""
    folder = Path(args.output_dir)
    done = accelerator.is_main_process and not args.dry_run and read_status().get("state") == "done"
    done = done and has_result(folder)
    if progress["step"] < total_steps or not broadcast_object_list([done])[0]:
        return
    name = "max_steps" if args.max_steps > 0 else "num_train_epochs"
    if name == "num_train_epochs" and "max_train_tokens" in args and not args.num_train_epochs:
        name = "max_train_tokens"
    done = f"Nothing is left to do: all {total_steps} steps are done, and the model is in {folder}."
    further = f"To train further, pass a larger --{name} and --allow_change {name}"
    end_as_done(accelerator, f"{done} {further}; for a new run, another --output_dir.")


def end_as_done(accelerator, message):
    """End all ranks with 0, of a run that an earlier call has finished."""
    RUN["state"] = "done"  # from here on no rank is missed
    accelerator.wait_for_everyone()
    accelerator.end_training()
    accelerator.print(message, flush=True)
    sys.exit(0)


def keep_finished_model(accelerator, args):
    """End all ranks where a run is done whose checkpoints are gone: it would begin anew and replace its model. With 0
    if the call is that of the run, else with 64. Every rank takes part."""
    folder, difference = Path(args.output_dir), None
    if accelerator.is_main_process and args.resume_from_checkpoint == "auto" and not args.dry_run:
        if read_status().get("state") == "done" and has_result(folder):
            difference = difference_from_finished_run(folder, args)
    difference = broadcast_object_list([difference])[0]
    if difference is None:
        return
    anew = "For a new run pass another --output_dir, or --resume_from_checkpoint none to replace the model."
    if difference:
        leave(
            accelerator,
            64,
            f"the finished run in {folder} {difference}, and no checkpoint is left to go on from. {anew}",
        )
    end_as_done(
        accelerator, f"Nothing is left to do: the run is done, and the model is in {folder}. {anew}"
    )


def difference_from_finished_run(folder, args):
    """Return in which arguments a call differs from the run that wrote run.json, in words; "" if it is the same call."""
    try:
        before = json.loads((folder / "run.json").read_text())["arguments"]
    except (OSError, ValueError, LookupError):
        return "has no run.json that can be read"
    now = json.loads(json.dumps(vars(args)))
    changed = [
        name for name in now if now[name] != before.get(name, now[name]) and name != "allow_change"
    ]
    return f"had other values of {', '.join(changed)}" if changed else ""


# ---- Checkpoints ----
def flush(path):
    """Bring a file, or the names in a folder, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def hash_of(path):
    """xxh3, 128 bits, of a file. It finds damage, not forgery."""
    return xxhash.xxh3_128_hexdigest(np.memmap(path, mode="r"))


def checkpoints_in(folder):
    """Return {step: folder} of what has a checkpoint's name, the newest first. Anything else is not ours."""
    found = [
        path
        for path in Path(folder).glob("checkpoint-*")
        if re.fullmatch("checkpoint-[0-9]{1,18}", path.name)
    ]
    return dict(
        sorted(((int(path.name[11:]), path) for path in found if path.is_dir()), reverse=True)
    )


def problem_of(checkpoint):
    """Return why a checkpoint cannot be trusted, or None: both files are as the manifest says and what they are named."""
    name = "manifest.json"
    try:
        manifest = json.loads((checkpoint / name).read_text())
        for name, size, xxh3 in [
            (file, manifest[file]["size"], manifest[file]["xxh3_128"]) for file in FILES
        ]:
            if (now := (checkpoint / name).stat().st_size) != size:
                return f"{name} has {now:,} bytes, not the {size} that were written"
            if not size or hash_of(checkpoint / name) != xxh3:
                return f"{name} is not what was written"
        json.loads((checkpoint / name).read_text())["step"]
        name = FILES[0]
        with safe_open(checkpoint / name, "pt"):
            return None
    except OSError as error:
        return f"{name}: {error.strerror}"
    except (ValueError, LookupError, TypeError, RecursionError, SafetensorError):
        return f"{name} is damaged"


def publish(folder, state, progress, limit):
    """Write a checkpoint. Raises OSError or SafetensorError if that fails; those before it are then as they were."""
    final, staging = (
        folder / f"checkpoint-{progress['step']}{suffix}" for suffix in ("", ".staging")
    )
    shutil.rmtree(staging, ignore_errors=True)  # of a save that was killed
    if sum(tensor.nbytes for tensor in state.values()) > shutil.disk_usage(folder).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    staging.mkdir()
    save_file(state, staging / "state.safetensors")
    (staging / "progress.json").write_text(json.dumps(progress, indent=2))
    manifest = {
        name: {"size": (staging / name).stat().st_size, "xxh3_128": hash_of(staging / name)}
        for name in FILES
    }
    (staging / "manifest.json").write_text(json.dumps(manifest, indent=2))
    for path in (*staging.iterdir(), staging):
        flush(path)
    staging.rename(final)
    write_file(folder / "latest", final.name)
    flush(folder)
    ours = [path for path in checkpoints_in(folder).values() if (path / "manifest.json").is_file()]
    for old in ours[
        limit:
    ]:  # the manifest last: what is left of a killed deletion is still known as ours
        for path in [*(old / name for name in FILES), old / "manifest.json"]:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            old.rmdir()  # with files of others in it, it stays


def save_checkpoint(accelerator, model, optimizer, args, progress):
    """Publish a checkpoint after progress["step"] steps, every rank takes part; all end with 73 if it cannot be written,
    with 70 if a weight is not finite."""
    state, problem, folder = (
        gather_state(accelerator, model, optimizer),
        None,
        Path(args.output_dir),
    )
    counted = {
        name: int(count) for name, count in progress.items() if isinstance(count, torch.Tensor)
    }  # such as the tokens seen
    progress = (
        progress
        | counted
        | {
            "loss_scale": loss_scale(accelerator, optimizer, {}),
            "ranks": accelerator.num_processes,
            "strategy": strategy_in_force(accelerator)[0],
        }
    )
    broken = first_nonfinite(state)
    if broken:
        problem = 70, f"{broken} is not finite after step {progress['step']}: that is not saved"
    elif accelerator.is_main_process:
        try:
            publish(folder, state, progress, args.save_total_limit)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder / f"checkpoint-{progress['step']}.staging", ignore_errors=True)
            need, free = (
                sum(tensor.nbytes for tensor in state.values()),
                shutil.disk_usage(folder).free,
            )
            problem = (
                73,
                f"the checkpoint after step {progress['step']} could not be finished: {error}: it needs {need:,} bytes, {free:,} are free in {folder}; older checkpoints, if there are any, are whole",
            )
    if problem := broadcast_object_list([problem])[0]:
        leave(accelerator, *problem)
    RUN["saved"] = progress["step"]


def keep(accelerator, model, optimizer, args, progress, bar):
    """Between two steps: save if it is due, or if a stop is asked for on any rank, and then end with 75.
    bar: the tqdm whose total is the number of steps; closed at the end, so that the last line is how to go on."""
    step, total_steps, asked = progress["step"], bar.total, stop_asked(accelerator)
    RUN["bar"] = bar
    due = args.save_steps and (step % args.save_steps == 0 or step == total_steps)
    if RUN["state"] == "starting":
        set_status("running") if accelerator.is_main_process else RUN.update(state="running")
    if asked or due or step % args.logging_steps == 0 or step == total_steps:
        handle_nonfinite(accelerator, model, optimizer, args, progress)
    if (
        (asked or due) and step > RUN["saved"] and progress["schedule_steps"]
    ):  # before the first update there is no state
        save_checkpoint(accelerator, model, optimizer, args, progress)
    if asked:
        leave(
            accelerator,
            75,
            f"Stopped and saved after step {RUN['saved']} of {total_steps}: run the same command again to go on",
        )
    RUN.update(step=min(step + 1, total_steps), before=dict(progress))
    if step == total_steps:
        RUN["sign_of_life"] = (
            math.inf
        )  # the model is written now; one process may take as long as it wants


def give_up(accelerator, model, optimizer, args, progress, code, message):
    """Save the last step and end all ranks with `code`: what comes next cannot be learnt from. Every rank takes part."""
    handle_nonfinite(accelerator, model, optimizer, args, progress)
    if progress["step"] > RUN["saved"] and progress["schedule_steps"]:
        save_checkpoint(accelerator, model, optimizer, args, progress)
    leave(accelerator, code, message)


def keep_table(accelerator, path, compute, resumed):
    """Return the tensor that is in `path`, if this run goes on, or else what `compute` returns, and have it there. Every rank takes part."""
    if resumed and path.is_file():  # every host sees it, as it does the checkpoint
        return load_file(path)["table"].to(accelerator.device)
    table = compute()
    if accelerator.is_main_process:
        save_file({"table": table.cpu()}, staged := f"{path}.tmp")
        flush(staged)
        os.replace(staged, path)
    return table


# ---- Resume ----
def find_checkpoint(accelerator, args, progress):
    """Return the newest checkpoint that verifies, with its progress, or None and `progress`. Every host must see the files."""
    found = broadcast_object_list(
        [search_checkpoint(args) if accelerator.is_main_process else None]
    )[0]
    if found is None:
        keep_finished_model(accelerator, args)
        return None, progress
    if missing := [
        host for host, there in gather_object([(HOST, (found / FILES[0]).is_file())]) if not there
    ]:
        leave(
            accelerator,
            64,
            f"{found} is not on {missing[0]}: --output_dir must be on a file system that all hosts share",
        )
    progress = json.loads((found / "progress.json").read_text())
    RUN.update(saved=progress["step"], step=progress["step"])
    return found, progress


def search_checkpoint(args):
    """Say what is passed over and why; fail with 65 if nothing there can be trusted, with 64 where an older run would be lost."""
    folder, wish, passed = Path(args.output_dir), args.resume_from_checkpoint, []
    there = checkpoints_in(folder)
    candidates = {"auto": list(there.values()), "none": []}.get(wish, [Path(wish)])
    if (
        wish not in ("auto", "none") and Path(wish).resolve().parent != folder.resolve()
    ):  # then this run began there and went on here
        candidates = [*there.values(), Path(wish)]
    while candidates and (problem := problem_of(candidates[0])):
        print(f"passed over {candidates[0]}: {problem}", file=sys.stderr, flush=True)
        passed.append(candidates.pop(0))
    if passed and not candidates:
        fail(
            65,
            f"no checkpoint can be trusted: choose another --output_dir to start anew, or move {passed[0]} away",
        )
    found, step = (
        (candidates[0], json.loads((candidates[0] / "progress.json").read_text())["step"])
        if candidates
        else (None, 0)
    )
    if wish != "auto" and any(
        number > step and path not in passed for number, path in there.items()
    ):
        fail(
            64,
            f"--resume_from_checkpoint {wish}: {folder} has checkpoint-{max(there)} of a run that went further: go on from that with auto, choose another --output_dir, or move it away",
        )
    for path in passed if not args.dry_run else []:
        path.rename(f"{path}.damaged-{time.time_ns()}")  # the run will come to that step again
    return found


def resume(accelerator, model, optimizer, schedule, args, checkpoint, progress):
    """Put state, schedule and loss scale back, and metrics.jsonl to the same step: the next step is the one that would have come."""
    if not restore_state(
        accelerator, model, optimizer, load_file(checkpoint / "state.safetensors")
    ):
        fail(65, "not all of the checkpoint came back as it was saved: nothing was trained")
    for _ in range(progress["schedule_steps"]):
        schedule.step()
    loss_scale(accelerator, optimizer, progress.get("loss_scale", {}))
    paths = [
        path
        for path in (Path(args.output_dir, "metrics.jsonl"), Path(args.output_dir, NONFINITE))
        if path.exists()
    ]
    for path in (
        paths if accelerator.is_main_process else []
    ):  # what steps wrote that are lost, whole or torn, goes
        lines = [
            (re.match(r'{"step": ([0-9]+), "(eval_)?.*}\n$', line), line)
            for line in path.read_text().splitlines(keepends=True)
        ]
        write_file(
            path,
            "".join(
                line
                for found, line in lines
                if found
                and int(found[1]) <= progress["step"] - bool(found[2] and not progress["evaluated"])
            ),
        )
    accelerator.print(
        f"Going on from {checkpoint}, made with {progress['strategy']} on {progress['ranks']} ranks",
        flush=True,
    )


# ---- Numbers that are not finite ----
def check_gradients(accelerator, optimizer):
    """Leave out a step of ZeRO-0 whose gradients are not finite; before `prepare`. Only its engine steps inside of backward unchecked; it reads `overflow`."""

    def drop_nonfinite(optimizer, *_):
        gradients = [
            weight.grad
            for group in optimizer.param_groups
            for weight in group["params"]
            if weight.grad is not None
        ]
        optimizer.overflow = not torch.nn.utils.get_total_norm(gradients).isfinite().item()
        if optimizer.overflow:
            optimizer.zero_grad()  # without gradients nothing is stepped

    if zero_stage(accelerator) == 0:
        optimizer.overflow = False
        optimizer.register_step_pre_hook(drop_nonfinite)


def undo_allocating_step(accelerator, model, optimizer):
    """Undo AdamW's step with zero gradients by which DeepSpeed allocates its state under ZeRO-0 in bf16 or fp16; after `prepare`.

    That step decays the master weights, and it is counted: the bias correction of the first real step would be that of
    a second one and shorten it to 0.74 of its length (deepspeed 0.19, runtime/fp16/unfused_optimizer.py,
    initialize_optimizer_states). The moments are zero after it. Without such master weights nothing is done.
    """
    if zero_stage(accelerator) != 0:
        return
    for weight, master in master_weights(model, optimizer.optimizer).values():
        master.data.copy_(weight)
        entry = optimizer.optimizer.optimizer.state[master]
        entry["step"] = entry["step"] * 0  # a tensor of torch's, a number of bitsandbytes'


def hold_back(accelerator, optimizer, grad_norm, step, micro_batches, losses):
    """Have the optimizer change nothing where the gradient is not finite, and note the step; before optimizer.step.
    Return whether it changes anything as far as is known: the device is not waited for where torch's fused kernels decide."""
    norm, known = (
        grad_norm,
        zero_stage(accelerator) >= 0 and accelerator.optimizer_step_was_skipped,
    )  # DeepSpeed has stepped
    if isinstance(norm, torch.Tensor):
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if optimizer.optimizer.defaults.get("fused") and not accelerator.scaler:
            weight = optimizer.param_groups[0]["params"][
                0
            ]  # on the host where that is offloaded to
            optimizer.optimizer.grad_scale, optimizer.optimizer.found_inf = (
                None,
                (1.0 - norm.isfinite().float()).to(weight.device),
            )
        elif not math.isfinite(norm):
            optimizer.zero_grad()  # without gradients nothing is stepped
            known = True
    RUN.setdefault("unchecked", []).append(
        (step, norm, known, [batch["row"] for batch in micro_batches], losses)
    )
    return not known and (isinstance(norm, torch.Tensor) or norm is None or math.isfinite(norm))


def handle_nonfinite(accelerator, model, optimizer, args, progress):
    """Of the steps since the last call those that are not finite changed no weight on any rank: write their rows down, then
    go on or save and stop with 70. The rows are those of the losses that are not finite or, where only the gradient is not, all of the step."""
    path, stops = Path(args.output_dir, NONFINITE), None
    for step, norm, known, rows, losses in RUN.pop("unchecked", []):
        if not known and (norm is None or math.isfinite(norm)):
            continue
        bad = sum([rows[i] for i, loss in enumerate(losses) if not loss.isfinite()], [])
        ranks = gather_object([{"rank": RANK, "all": sum(rows, []), "loss": bad}])
        what = "loss" if any(rank["loss"] for rank in ranks) else "gradient"
        if what == "gradient" and accelerator.mixed_precision == "fp16":
            continue  # the loss scale was too large, as it has to be now and then
        if accelerator.is_main_process:
            with open(path, "a" if progress["nonfinite_steps"] or stops else "w") as file:
                file.write(
                    json.dumps(
                        {
                            "step": step,
                            "what": what,
                            "rows_by_rank": {
                                r["rank"]: r["loss" if what == "loss" else "all"] for r in ranks
                            },
                        }
                    )
                    + "\n"
                )
        message = f"the {what} of step {step} is not finite: no weight was changed; its rows are in {path}"
        if args.nonfinite == "skip" and progress["nonfinite_steps"] < args.nonfinite_budget:
            progress["nonfinite_steps"] += 1
            accelerator.print(f"skipped: {message}", flush=True)
        else:
            stops = stops or (step, message)
    if stops:  # a step that was the last is tried again when the run goes on
        progress = (
            RUN["before"] | {"nonfinite_steps": progress["nonfinite_steps"]}
            if stops[0] == progress["step"]
            else progress
        )
        if progress["step"] > RUN["saved"] and progress["schedule_steps"]:
            save_checkpoint(accelerator, model, optimizer, args, progress)
        leave(accelerator, 70, stops[1])
