"""How a run is called and what becomes of it: wrong calls, status.json, and the last words that a launcher prints.

A recipe imports this file before all that takes seconds to import, so that a wrong flag is told at once.

    OUTPUT_DIR/status.json    starting, running, done, stopped or failed, and why;
                              what a call on a finished run met is its later_call
"""

import contextlib
import difflib
import json
import math
import os
import re
import sys
import time
from pathlib import Path

import psutil

RANK, HOST = int(os.environ.get("RANK", 0)), os.uname().nodename
RUN = {
    "state": "starting",
    "step": 0,
    "saved": 0,
    "sign_of_life": math.inf,
}  # shared by loop, signal handler and thread
TIME_FORMAT = "%Y-%m-%d %H:%M:%S"  # texts of it sort as the times do


# ---- The call ----
def add_arguments(parser):
    """Add what is only there with this file. The recipe copied alone knows none of it."""
    parser.add_argument(
        "--save_steps",
        type=int,
        default=500,
        help="optimizer steps between checkpoints; 0: only when the run is stopped",
    )
    parser.add_argument("--save_total_limit", type=int, default=2, help="newest checkpoints kept")
    parser.add_argument(
        "--resume_from_checkpoint",
        default="auto",
        help="auto (the newest that verifies), none (start anew) or a checkpoint's folder",
    )
    parser.add_argument(
        "--allow_change",
        nargs="+",
        default=[],
        type=lambda name: name.lstrip("-"),
        help="arguments that may differ from the checkpoint's although they change the run",
    )
    parser.add_argument(
        "--nonfinite",
        default="stop",
        choices=["stop", "skip"],
        help="at a step whose loss or gradient is not finite; it never changes the weights",
    )
    parser.add_argument(
        "--nonfinite_budget", type=int, default=10, help="steps that --nonfinite skip may leave out"
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="check arguments, strategy, data and disk, print the start summary and how to plan the memory, and stop; no weights are loaded",
    )


def meant(message, parser):
    """Return what a wrong flag, the third word of argparse's message, could have meant, as lines for the user."""
    return [
        f"did you mean {flag}?"
        for flag in difflib.get_close_matches(
            [*message.split(), "", ""][2].split("=")[0], parser._option_string_actions, 1
        )
    ]


def fail(code, *problems):
    """Print the problems, record them in status.json and end this process with `code`; the launcher then ends the other ranks."""
    time.sleep(10 * (RANK > 0))  # rank 0 meets the same problem: let it speak first
    text = "\n".join(f"error: {problem}" for problem in problems)
    print(text, file=sys.stderr, flush=True)
    if "output_dir" not in RUN:
        begin_status_of_wrong_call()
    set_status("failed", code, problems[0])
    tell_launcher("failed", code, problems[0], text)
    sys.exit(code)


def begin_status_of_wrong_call():
    """Choose the status.json in which a call that argparse refused is recorded: no status of the run before may stay.
    A dry run leaves no trace, and a run that is going on in that folder keeps its own status."""
    given = re.findall("--output_dir[=\0]([^\0]+)", "\0".join(sys.argv))
    if not given or "--dry_run" in sys.argv:
        return
    RUN["output_dir"] = Path(given[-1])  # of several argparse takes the last
    if is_going_on(read_status()):
        RUN["output_dir"] = None
    elif RANK == 0:
        forget_later_call()
        set_status("starting")


def is_going_on(status):
    """Whether the process that wrote a status.json on this host has not come to its end."""
    active = status.get("state") in ("starting", "running") and status.get("host") == HOST
    return active and status["process"] != os.getpid() and psutil.pid_exists(status["process"])


# ---- status.json ----
def set_status(state, code=None, why=None):
    """Say in OUTPUT_DIR/status.json what became of the run. Of several failures the first counts.

    A finished run stays done until it trains again. What a later call met before that, such as
    wrong arguments, is recorded beside it as `later_call`."""
    in_training = RUN["state"] != "starting"
    RUN["state"] = state
    if not RUN.get("output_dir"):
        return
    before = read_status()
    if state == "failed" and how_it_ended(before).get("state") == "failed":
        return
    facts = {"state": state, "exit_code": code, "why": why, "step": RUN["step"]}
    facts |= {"rank": RANK, "host": HOST, "process": os.getpid()}
    facts["time"] = time.strftime(TIME_FORMAT)
    if before.get("state") == "done" and not in_training:
        if state == "starting":
            return
        if state in ("failed", "stopped"):
            facts = before | {"later_call": facts}
    write_status(facts)


def write_status(facts):
    """Write status.json, as far as that is possible."""
    path, text = RUN["output_dir"] / "status.json", json.dumps(facts, indent=2)
    # A full disk mostly has room in place of the old text; exit code and message tell anyway
    for write in (write_file, Path.write_text):
        with contextlib.suppress(OSError):
            return write(path, text)


def read_status():
    """Return what status.json says, {} if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        status = json.loads((RUN["output_dir"] / "status.json").read_text())
        if isinstance(status, dict):
            return status
    return {}


def how_it_ended(status):
    """Return the part of a status that is about the last call."""
    return status.get("later_call", status)


def forget_later_call():
    """Take what an earlier call met out of the status of a run that is done."""
    status = read_status()
    if "later_call" in status:
        del status["later_call"]
        write_status(status)


def write_file(path, text):
    """Replace a file as a whole, on the disk: at no instant is there a part of it."""
    with open(f"{path}.{RANK}.tmp", "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


# ---- Last words ----
def tell_launcher(state, code, why, text, later=0):
    """Leave a text in the file from which torchrun, and with it accelerate's launcher, reads why a
    process ended. The launcher's report then ends with that text, and the other processes of this
    host read there what happened. The first text of a process counts.

    state, code, why: as in status.json. later: seconds to add to the time, since the report ends
    with the text of the earliest time. The form of the file is that of torch's ErrorHandler
    (torch/distributed/elastic/multiprocessing/errors); the launcher prints its `py_callstack`."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()) + later)}
    told = {"message": {"message": text, "extraInfo": extra}}
    told |= {"state": state, "exit_code": code, "why": why}
    with contextlib.suppress(OSError):
        write_file(path, json.dumps(told))


def told_by_others():
    """Return what another process of this run has told of its end, {"state", "exit_code", "why"}, or {}.

    On this host `tell_launcher` has written it, for each rank in a folder beside ours, whether or
    not the output folder exists. Of other hosts, and without torchrun, only status.json tells."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    for found in sorted(Path(path).parent.parent.glob("*/error.json")) if path else []:
        with contextlib.suppress(OSError, ValueError):
            told = json.loads(found.read_text())
            if "state" in told:  # else torch's own
                return told
    told = how_it_ended(read_status()) if RUN.get("output_dir") else {}
    of_this_run = told.get("time", "") >= RUN.get(
        "began", ""
    )  # rank 0 may not have replaced it yet
    return told if of_this_run and told.get("state") in ("failed", "stopped") else {}
