"""What keeps a run from being lost: checkpoints, resume, signals, dead and hanging ranks, numbers that are not finite.

Every recipe uses this file when it lies beside it; a recipe that was copied alone trains without. One checkpoint is

    OUTPUT_DIR/checkpoint-STEP/state.safetensors   trained weights and optimizer state, whole tensors by name
                               progress.json       steps done, schedule, arguments of the run, ranks, strategy
                               manifest.json       size and hash of both
    OUTPUT_DIR/latest                              the name of the newest
    OUTPUT_DIR/status.json                         starting, running, done, stopped or failed, and why

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
import threading
import time
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import torch
import xxhash
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

RANK, HOST = int(os.environ.get("RANK", 0)), os.uname().nodename
RUN = {"state": "starting", "step": 0, "saved": 0, "sign_of_life": math.inf}  # shared by loop, signal handler and thread
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)
FILES, NONFINITE = ("state.safetensors", "progress.json"), "nonfinite_rows.jsonl"
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
# Arguments that may differ when a run goes on, since they change nothing that is learnt; the rows of a step stay equal
FREE_TO_CHANGE = frozenset("""
    output_dir resume_from_checkpoint allow_change save_steps save_total_limit nonfinite nonfinite_budget ddp_timeout eval_strategy eval_steps
    eval_dataset_name dataset_test_split per_device_eval_batch_size logging_steps report_to dataset_num_proc dataloader_num_workers
    per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing attn_implementation""".split())


# ---- How a run ends ----
def fail(code, *problems):
    """Print the problems, record them in status.json and end this process with `code`."""
    print("\n".join(f"error: {problem}" for problem in problems), file=sys.stderr, flush=True)
    set_status("failed", code, problems[0])
    sys.exit(code)


def conclude(accelerator, state, code, why=None):
    """Record how the run ended, at a point on which all ranks agree: from here on none is missed."""
    set_status(state, code, why) if accelerator.is_main_process else RUN.update(state=state)
    accelerator.wait_for_everyone()


def leave(accelerator, code, message):
    """End all ranks alike: 64 other arguments, 70 not finite, 73 cannot write, 75 stopped and saved. The message comes last."""
    stopped = code == 75
    conclude(accelerator, "stopped" if stopped else "failed", code, message)
    accelerator.end_training()
    if "bar" in RUN:
        RUN["bar"].close()
    accelerator.print(message if stopped else f"error: {message}", file=sys.stdout if stopped else sys.stderr, flush=True)
    sys.exit(code)


def set_status(state, code=None, why=None):
    """Say in OUTPUT_DIR/status.json what became of the run. Of several failures the first counts."""
    if RUN["state"] == "stopped" and state == "failed":
        sys.exit(75)  # a library put an exception of its own in the place of the stop's
    RUN["state"] = state
    if "output_dir" in RUN and not (state == "failed" and read_status().get("state") == "failed"):
        facts = {"state": state, "exit_code": code, "why": why, "step": RUN["step"], "rank": RANK, "host": HOST, "process": os.getpid()}
        path, text = RUN["output_dir"] / "status.json", json.dumps(facts | {"time": time.strftime("%Y-%m-%d %H:%M:%S")}, indent=2)
        for write in (write_file, Path.write_text):  # a full disk mostly has room in place; exit code and message tell anyway
            with contextlib.suppress(OSError):
                return write(path, text)


def read_status():
    with contextlib.suppress(OSError, ValueError):
        return json.loads((RUN["output_dir"] / "status.json").read_text())
    return {}


# ---- Signals, exceptions, dead and hanging ranks ----
def start_run(args):
    """Take signals and record how the run ends. Every rank calls it, before it makes its Accelerator."""
    RUN["output_dir"] = Path(args.output_dir)
    if RANK == 0:
        set_status("starting")
    RUN["woken"], wakes = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    # Processes that load or tokenise data are ended by this one, with SIGTERM; to be asked for a stop is not for them
    for number, of_children in ((signal.SIGINT, signal.SIG_IGN), (signal.SIGUSR1, signal.SIG_IGN), (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(number, on_signal)
        os.register_at_fork(after_in_child=lambda pair=(number, of_children): signal.signal(*pair))


def watch_ranks(accelerator, args):
    """Record exceptions and watch the other ranks of this host, in a thread. Every rank takes part."""
    sys.excepthook = on_exception  # not before: torch wraps what it finds when ranks join, and keeps stderr from other threads
    peers = {os.pidfd_open(pid): (rank, pid) for rank, host, pid in gather_object([(RANK, HOST, os.getpid())]) if host == HOST and rank != RANK}
    threading.Thread(target=watch, args=(peers, args.ddp_timeout, RUN["woken"]), daemon=True).start()


def on_signal(number, frame):
    """Ask for a stop, on which the ranks agree after the step; before the first one there is nothing to save."""
    RUN["stop"] = True
    if RUN["state"] == "starting":
        set_status("stopped", 75, message := f"Stopped by {signal.strsignal(number)} before the first step: run the same command again")
        print(message, flush=True)
        sys.exit(75) if threading.current_thread() is threading.main_thread() else os._exit(75)


def stop_asked(accelerator):
    """Whether any rank was asked to stop. Every rank takes part; also a sign of life."""
    RUN["sign_of_life"] = time.monotonic()
    if "stop" in RUN:
        accelerator.set_trigger()
    return accelerator.check_trigger()


def on_exception(kind, error, trace):
    """Record what ended this rank; 73 and one line where a file could be neither read nor written."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher, which ends all when one ended
    time.sleep(2 * (os.environ.get("WORLD_SIZE", "1") != "1"))  # the end of another rank is for `watch` to tell
    code = 73 if isinstance(error, SafetensorError) or getattr(error, "errno", None) in CANNOT_WRITE else 1
    print(f"error: cannot read or write: {error}", file=sys.stderr) if code == 73 else sys.__excepthook__(kind, error, trace)
    set_status("failed", code, f"{kind.__name__}: {error}")
    sys.stdout.flush()
    os._exit(code)


def watch(peers, timeout, woken):
    """End this rank when one of its peers is gone, or when there was no sign of life for `timeout` seconds.
    peers: {pidfd: (rank, process)} of this host. woken: the pipe of signal.set_wakeup_fd, for a main thread that waits in C++ and takes no signal."""
    while RUN["state"] in ("starting", "running"):
        ready = wait([*peers, woken], 0.2)
        gone = [peers[descriptor] for descriptor in ready if descriptor in peers]
        if woken in ready and not gone and signal.getsignal(number := os.read(woken, 1)[0]) is on_signal:
            time.sleep(5 * (RUN["state"] == "starting"))  # in which the main thread takes it if it can
            on_signal(number, None)
        hangs = time.monotonic() - RUN["sign_of_life"] > timeout
        if not (gone or hangs):
            continue
        why = f"no sign of life for {timeout} s" if hangs else "rank {} (process {}) is gone".format(*gone[0])
        if hangs:
            faulthandler.dump_traceback()
            for _, pid in peers.values():
                os.kill(pid, signal.SIGCONT)  # a stopped rank shows its stacks too
        time.sleep(hangs + 0.05 * (RANK % 16))  # so that one of them speaks
        if RUN["state"] not in ("starting", "running"):
            return  # all ended as they should
        if (status := read_status()).get("state") == "stopped":  # the peer was, before the first step
            print(status["why"], flush=True)
        elif status.get("state") != "failed":
            print(f"error: {why} on {HOST} in step {RUN['step']}; the same command goes on from the newest checkpoint", file=sys.stderr, flush=True)
            set_status("failed", 1, f"{why} on {HOST}")
        os._exit(read_status().get("exit_code") or 1)


# ---- State of model and optimizer ----
def zero_stage(accelerator):
    """ZeRO stage of DeepSpeed, -1 without it."""
    return getattr(accelerator.state.deepspeed_plugin, "zero_stage", -1)


def master_weights(model, zero):
    """{name: (weight, fp32 master weight)} of ZeRO-0 in bf16 or fp16, each rank whole; {} of everything else."""
    names = {weight: name.removeprefix("module.") for name, weight in model.named_parameters()}
    groups = zip(getattr(zero, "fp16_groups", []), getattr(zero, "fp32_groups", []), strict=True)
    return {names[weight]: (weight, master) for low, high in groups for weight, master in zip(low, high, strict=True)}


def gather_state(accelerator, model, optimizer):
    """Return {NAME: trained weight, state.NAME.KEY: its optimizer state} on rank 0, whole and on the host, {} elsewhere.
    Every rank takes part. KEY is the optimizer's: step, exp_avg, exp_avg_sq for AdamW. Weights are the engine's fp32 master weights, if any. Rank 0 needs 12 bytes of memory a trained parameter."""
    if zero_stage(accelerator) > 0:
        state = gather_zero_state(model, accelerator.is_main_process)
    elif pairs := master_weights(model, optimizer.optimizer):
        pairs = pairs if accelerator.is_main_process else {}  # all have the same
        entries = {name: optimizer.optimizer.optimizer.state[master] for name, (_, master) in pairs.items()}
        state = {name: master.detach().cpu() for name, (_, master) in pairs.items()} | flatten("state", entries)
    else:
        inner = model.module if zero_stage(accelerator) == 0 else model  # torch takes off the other wrappers
        fsdp1 = type(model).__name__ == "FullyShardedDataParallel"  # torch 2.13 then drops frozen weights on ranks that have none: KeyError
        weights, optimizer_state = get_state_dict(inner, optimizer.optimizer, options=replace(WHOLE, ignore_frozen_params=not fsdp1))
        entries = optimizer_state.get("state", {})
        state = {name: weights[name] for name in entries} | flatten("state", entries)
    state = state if accelerator.is_main_process else {}
    # bitsandbytes shares its small maps between weights, which safetensors refuses
    return {name: tensor.clone() if tensor.numel() <= 4096 else tensor.contiguous() for name, tensor in state.items()}


def restore_state(accelerator, model, optimizer, state):
    """Put a gathered state back, each rank its part, and fail with 65 unless all of it is there afterwards."""
    if zero_stage(accelerator) > 0:
        restore_zero_state(model, state)
    elif pairs := master_weights(model, optimizer.optimizer):
        for name, (weight, master) in pairs.items():
            master.data.copy_(state[name])
            weight.data.copy_(master.data)
            for key, tensor in optimizer.optimizer.optimizer.state[master].items():
                tensor.copy_(state[f"state.{name}.{key}"])
    else:  # rates and decay stay those of the command line
        inner = model.module if zero_stage(accelerator) == 0 else model
        _, now = get_state_dict(inner, optimizer.optimizer, options=StateDictOptions(ignore_frozen_params=True))
        entries = unflatten("state", now["state"], state)
        set_state_dict(inner, optimizer.optimizer, model_state_dict={n: state[n] for n in entries}, optim_state_dict=now | {"state": entries}, options=WHOLE)
    back = gather_state(accelerator, model, optimizer)
    if accelerator.is_main_process and not (back.keys() == state.keys() and all(torch.equal(back[n], state[n]) for n in state)):
        fail(65, "not all of the checkpoint came back as it was saved: nothing was trained")


def loss_scale(accelerator, optimizer, saved):
    """Put back what was saved of fp16's loss scale, which accelerate or DeepSpeed keeps, and return it; {} without fp16."""
    if accelerator.mixed_precision != "fp16":
        return {}
    if accelerator.scaler:
        accelerator.scaler.load_state_dict(saved if "scale" in saved else accelerator.scaler.state_dict())
        return accelerator.scaler.state_dict()
    scaler = vars(getattr(optimizer.optimizer, "loss_scaler", None) or optimizer.optimizer.loss_scale_config)
    scaler.update({name: value for name, value in saved.items() if name in scaler})
    return {name: scaler[name] for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis") if name in scaler}


def flatten(name, value):
    """{name.key.key: tensor} of nested optimizer state; bitsandbytes nests it, and counts steps in plain numbers."""
    if not isinstance(value, dict):
        return {name: torch.as_tensor(value)}
    return {key: leaf for inner in value for key, leaf in flatten(f"{name}.{inner}", value[inner]).items()}


def unflatten(name, like, state):
    """The inverse: the leaves of `state` in the form of `like`."""
    if isinstance(like, dict):
        return {key: unflatten(f"{name}.{key}", like[key], state) for key in like}
    return state[name] if isinstance(like, torch.Tensor) else state[name].item()


def zero_weights(model):
    """Return what ZeRO-1 to 3 train, by name, linked with its optimizer state.
    In ZeRO-1 and 2 DeepSpeed 0.19 links the first parameter group alone, and none before the first step."""
    if hasattr(model.optimizer, "_lazy_init_hp_params_optimizer_state"):
        model.optimizer._hp_optimizer_states_linked = False
        model.optimizer._lazy_init_hp_params_optimizer_state()
    return {name.removeprefix("module."): weight for name, weight in model.named_parameters() if weight.requires_grad}


def gather_zero_state(model, keep):
    """The same from ZeRO-1 to 3, which hold flat parts of the fp32 weights (deepspeed/utils/tensor_fragment.py)."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    state, step = {}, next(entry["step"] for entry in model.optimizer.optimizer.state.values() if "step" in entry)
    for name, weight in zero_weights(model).items():
        for key in ("", "exp_avg", "exp_avg_sq"):
            whole = safe_get_full_optimizer_state(weight, key) if key else safe_get_full_fp32_param(weight)
            if keep:
                state[f"state.{name}.{key}" if key else name] = whole.to("cpu", copy=True)
        state[f"state.{name}.step"] = torch.tensor(float(step))
    return state


def restore_zero_state(model, state):
    """Fill the flat parts, which have no optimizer state before the first step, and what is computed with."""
    import deepspeed
    zero, step = model.optimizer, next(tensor for name, tensor in state.items() if name.endswith(".step"))
    for flat in getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups:
        zero.optimizer.state[flat] = {"step": step.to(flat.device, copy=True)} | {key: torch.zeros_like(flat) for key in ("exp_avg", "exp_avg_sq")}
    for name, weight in zero_weights(model).items():
        for key, whole in ((None, state[name]), *((key, state[f"state.{name}.{key}"]) for key in ("exp_avg", "exp_avg_sq"))):
            if not hasattr(weight, "ds_tensor"):  # ZeRO-1 and 2
                weight.set_full_hp_param(whole.to(weight.device), key)
                continue
            # Part by part: DeepSpeed's function for the whole fails where the last part is padded
            size, rank = weight.ds_tensor.numel(), torch.distributed.get_rank(weight.ds_process_group)
            part = whole.flatten()[size * rank : size * (rank + 1)]
            zero.set_local_hp_param(torch.nn.functional.pad(part, (0, size - part.numel())), weight, key)
        if hasattr(weight, "ds_tensor"):
            with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
                weight.data.copy_(state[name].view(weight.shape))
    if hasattr(zero, "update_lp_params"):
        zero.update_lp_params()


# ---- Checkpoints ----
def write_file(path, text):
    """Replace a file as a whole, on the disk: at no instant is there a part of it."""
    with open(f"{path}.{RANK}.tmp", "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


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
    found = [path for path in Path(folder).glob("checkpoint-*") if re.fullmatch("checkpoint-[0-9]{1,18}", path.name)]
    return dict(sorted(((int(path.name[11:]), path) for path in found if path.is_dir()), reverse=True))


def problem_of(checkpoint):
    """Return why a checkpoint cannot be trusted, or None: both files are as the manifest says and what they are named."""
    name = "manifest.json"
    try:
        manifest = json.loads((checkpoint / name).read_text())
        for name, size, xxh3 in [(file, manifest[file]["size"], manifest[file]["xxh3_128"]) for file in FILES]:
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
    final, staging = (folder / f"checkpoint-{progress['step']}{suffix}" for suffix in ("", ".staging"))
    shutil.rmtree(staging, ignore_errors=True)  # of a save that was killed
    if sum(tensor.nbytes for tensor in state.values()) > shutil.disk_usage(folder).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    staging.mkdir()
    save_file(state, staging / "state.safetensors")
    (staging / "progress.json").write_text(json.dumps(progress, indent=2))
    manifest = {name: {"size": (staging / name).stat().st_size, "xxh3_128": hash_of(staging / name)} for name in FILES}
    (staging / "manifest.json").write_text(json.dumps(manifest, indent=2))
    for path in (*staging.iterdir(), staging):
        flush(path)
    staging.rename(final)
    write_file(folder / "latest", final.name)
    flush(folder)
    ours = [path for path in checkpoints_in(folder).values() if (path / "manifest.json").is_file()]
    for old in ours[limit:]:  # the manifest last: what is left of a killed deletion is still known as ours
        for path in [*(old / name for name in FILES), old / "manifest.json"]:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            old.rmdir()  # with files of others in it, it stays


def save_checkpoint(accelerator, model, optimizer, args, progress):
    """Publish a checkpoint after progress["step"] steps, every rank takes part; all end with 73 if it cannot be written,
    with 70 if a weight is not finite."""
    state, problem, folder = gather_state(accelerator, model, optimizer), None, Path(args.output_dir)
    progress = progress | {"loss_scale": loss_scale(accelerator, optimizer, {}), "ranks": accelerator.num_processes}
    broken = [name for name, tensor in state.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        problem = 70, f"{broken[0]} is not finite after step {progress['step']}: that is not saved"
    elif accelerator.is_main_process:
        try:
            publish(folder, state, progress, args.save_total_limit)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder / f"checkpoint-{progress['step']}.staging", ignore_errors=True)
            need, free = sum(tensor.nbytes for tensor in state.values()), shutil.disk_usage(folder).free
            problem = 73, f"the checkpoint after step {progress['step']} could not be finished: {error}: it needs {need:,} bytes, {free:,} are free in {folder}; those before it are whole"
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
    if (asked or due) and step > RUN["saved"] and progress["schedule_steps"]:  # before the first update there is no state
        save_checkpoint(accelerator, model, optimizer, args, progress)
    if asked:
        leave(accelerator, 75, f"Stopped and saved after step {RUN['saved']} of {total_steps}: run the same command again to go on")
    RUN["step"] = min(step + 1, total_steps)
    if step == total_steps:
        RUN["sign_of_life"] = math.inf  # the model is written now, however long that takes


# ---- Resume ----
def find_checkpoint(accelerator, args, progress):
    """Return the newest checkpoint that verifies, with its progress, or None and `progress`. Every host must see the files."""
    found = broadcast_object_list([search_checkpoint(args) if accelerator.is_main_process else None])[0]
    if found is None:
        return None, progress
    if missing := [host for host, there in gather_object([(HOST, (found / FILES[0]).is_file())]) if not there]:
        leave(accelerator, 64, f"{found} is not on {missing[0]}: --output_dir must be on a file system that all hosts share")
    progress = json.loads((found / "progress.json").read_text())
    RUN.update(saved=progress["step"], step=progress["step"])
    return found, progress


def search_checkpoint(args):
    """Say what is passed over and why; fail with 65 if nothing there can be trusted, with 64 where an older run would be lost."""
    folder, wish, passed = Path(args.output_dir), args.resume_from_checkpoint, []
    there = checkpoints_in(folder)
    candidates = {"auto": list(there.values()), "none": []}.get(wish, [Path(wish)])
    if wish not in ("auto", "none") and Path(wish).resolve().parent != folder.resolve():  # then this run began there and went on here
        candidates = [*there.values(), Path(wish)]
    while candidates and (problem := problem_of(candidates[0])):
        print(f"passed over {candidates[0]}: {problem}", file=sys.stderr, flush=True)
        passed.append(candidates.pop(0))
    if passed and not candidates:
        fail(65, f"no checkpoint can be trusted: choose another --output_dir to start anew, or move {passed[0]} away")
    found, step = (candidates[0], json.loads((candidates[0] / "progress.json").read_text())["step"]) if candidates else (None, 0)
    if wish != "auto" and any(number > step and path not in passed for number, path in there.items()):
        fail(64, f"--resume_from_checkpoint {wish}: {folder} has checkpoint-{max(there)} of a run that went further: go on from that with auto, choose another --output_dir, or move it away")
    for path in passed:
        path.rename(f"{path}.damaged-{time.time_ns()}")  # the run will come to that step again
    return found


def check_changes(accelerator, args, progress, facts):
    """List what differs from the checkpoint's run; fail with 64 at what changes the run and --allow_change does not name.
    facts: {"rows_per_step": rows of an optimizer step over all ranks, "data": hash of the training rows}"""
    before, now = progress["arguments"], vars(args) | facts
    changed = [name for name in now if now[name] != before.get(name, now[name])]
    for name in changed:
        accelerator.print(f"changed since step {progress['step']}: {name} {before[name]} -> {now[name]}", flush=True)
    rows, ranks = before["rows_per_step"], accelerator.num_processes
    if rows != now["rows_per_step"]:
        size = next((n for n in range(min(args.per_device_train_batch_size, rows), 0, -1) if rows % (n * ranks) == 0), None)
        fix = f"--per_device_train_batch_size {size} --gradient_accumulation_steps {rows // (size * ranks)}" if size else f"a number of ranks that divides {rows}"
        leave(accelerator, 64, f"a step of the checkpoint's run has {rows} rows, here it would have {now['rows_per_step']}: use {fix}")
    if unsafe := [name for name in changed if name not in FREE_TO_CHANGE and name not in args.allow_change]:
        leave(accelerator, 64, f"the checkpoint's run had other values of {', '.join(unsafe)}, listed above: use those, or --allow_change {' '.join(unsafe)}, or another --output_dir")


def resume(accelerator, model, optimizer, schedule, args, checkpoint, progress):
    """Put state, schedule and loss scale back, and metrics.jsonl to the same step: the next step is the one that would have come."""
    restore_state(accelerator, model, optimizer, load_file(checkpoint / "state.safetensors"))
    for _ in range(progress["schedule_steps"]):
        schedule.step()
    loss_scale(accelerator, optimizer, progress.get("loss_scale", {}))
    paths = [path for path in (Path(args.output_dir, "metrics.jsonl"), Path(args.output_dir, NONFINITE)) if path.exists()]
    for path in paths if accelerator.is_main_process else []:  # what steps wrote that are lost, whole or torn, goes
        lines = [(re.match(r'{"step": ([0-9]+), "(eval_)?.*}\n$', line), line) for line in path.read_text().splitlines(keepends=True)]
        write_file(path, "".join(line for found, line in lines if found and int(found[1]) <= progress["step"] - bool(found[2] and not progress["evaluated"])))
    accelerator.print(f"Going on from {checkpoint}, made with {progress['strategy']} on {progress['ranks']} ranks", flush=True)


# ---- Numbers that are not finite ----
def check_gradients(accelerator, optimizer):
    """Leave out a step of ZeRO-0 whose gradients are not finite; before `prepare`. Only its engine steps inside of backward unchecked; it reads `overflow`."""
    def drop_nonfinite(optimizer, *_):
        gradients = [weight.grad for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
        optimizer.overflow = not torch.nn.utils.get_total_norm(gradients).isfinite().item()
        if optimizer.overflow:
            optimizer.zero_grad()  # without gradients nothing is stepped

    if zero_stage(accelerator) == 0:
        optimizer.overflow = False
        optimizer.register_step_pre_hook(drop_nonfinite)


def handle_nonfinite(accelerator, model, optimizer, args, progress, micro_batches, losses):
    """A step that is not finite changed no weight on any rank: write its rows down, then skip it or save and stop with 70.
    The rows are those of the losses that are not finite or, where only the gradient is not, all of the step."""
    step, rows = progress["step"] + 1, [batch["row"].tolist() for batch in micro_batches]
    bad = sum([rows[i] for i, loss in enumerate(losses) if not loss.isfinite()], [])
    ranks = gather_object([{"rank": RANK, "all": sum(rows, []), "loss": bad}])
    what = "loss" if any(rank["loss"] for rank in ranks) else "gradient"
    if what == "gradient" and accelerator.mixed_precision == "fp16":
        return  # the loss scale was too large, as it has to be now and then
    path = Path(args.output_dir, NONFINITE)
    if accelerator.is_main_process:
        with open(path, "a" if progress["nonfinite_steps"] else "w") as file:
            file.write(json.dumps({"step": step, "what": what, "rows_by_rank": {r["rank"]: r["loss" if what == "loss" else "all"] for r in ranks}}) + "\n")
    message = f"the {what} of step {step} is not finite: no weight was changed; its rows are in {path}"
    if args.nonfinite == "skip" and progress["nonfinite_steps"] < args.nonfinite_budget:
        progress["nonfinite_steps"] += 1
        return accelerator.print(f"skipped: {message}", flush=True)
    if progress["step"] > RUN["saved"] and progress["schedule_steps"]:
        save_checkpoint(accelerator, model, optimizer, args, progress)
    leave(accelerator, 70, message)
