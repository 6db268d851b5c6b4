# SPDX-License-Identifier: Apache-2.0
"""What ends a run from outside, and status.json, which says how it ended.

torchrun, which accelerate launch uses, ends the other ranks of a host when one has died. What is
added here: a signal stops all ranks after a step, a rank that waits too long for others prints its
stacks and ends, and ranks whose launcher was killed stop too.
"""

import contextlib
import ctypes
import errno
import faulthandler
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from safetensors import SafetensorError

from core.exits import RANK, End, Exit

HOST = os.uname().nodename
PR_SET_PDEATHSIG = 1  # linux/prctl.h
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
CANNOT_WRITE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES),
    *(errno.EIO, errno.ESTALE),
)


class Status:
    """OUTPUT_DIR/status.json: starting, running, done, stopped or failed, and why.

    Attributes:
        folder: of the file; None if the run is to leave no trace.
        step: the current step.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.step = 0

    def read(self) -> dict[str, Any]:
        """Return the content of the file, {} if it cannot be read."""
        if self.folder is not None:
            with contextlib.suppress(OSError, ValueError):
                return json.loads((self.folder / "status.json").read_text())
        return {}

    def write(self, state: str, code: int | None = None, why: str | None = None) -> None:
        """Replace the file, if that is possible: the exit code says how a run ended as well."""
        if self.folder is None:
            return
        facts = {"state": state, "exit_code": code, "why": why, "step": self.step}
        facts |= {"rank": RANK, "host": HOST, "process": os.getpid()}
        facts["time"] = time.strftime("%Y-%m-%d %H:%M:%S")
        staged = self.folder / f"status.json.{RANK}.tmp"  # No reader is to see a part of it
        with contextlib.suppress(OSError):
            staged.write_text(json.dumps(facts, indent=2))
            os.replace(staged, self.folder / "status.json")

    def end(self, end: End) -> bool:
        """Record how the run ends. Returns False if another rank has ended it before.

        What an earlier call has done stays done until the run trains again.
        """
        before = self.read().get("state")
        if before in ("failed", "stopped"):
            return False
        if before != "done" and (end.is_alone or RANK == 0):
            state = {Exit.DONE: "done", Exit.STOPPED: "stopped"}.get(Exit(end.code), "failed")
            self.write(state, end.code, end.why or None)
        return True


def explain(error: BaseException | None) -> End:
    """Return how a run ends with this exception, or without one."""
    if error is None:
        return End(Exit.DONE, "")
    if isinstance(error, End):
        return error
    if isinstance(error, SafetensorError) or getattr(error, "errno", None) in CANNOT_WRITE:
        return End(Exit.CANNOT_WRITE, f"cannot read or write: {error}", is_alone=True)
    return End(Exit.FAILED, f"{type(error).__name__}: {error}", is_alone=True)


class Watch:
    """Signals to this process, and a clock that ends it if it waits too long for other ranks.

    Attributes:
        stop_requested: whether this process was asked to stop.
        is_training: whether a signal is a request to stop after the step; before, it ends the
            process at once, since nothing would be lost.
    """

    def __init__(self, seconds: float, status: Status) -> None:
        """Take signals.

        Args:
            seconds: without `show_life` after which a rank prints its stacks and ends.
        """
        self.stop_requested = False
        self.is_training = False
        self._seconds = seconds
        self._status = status
        # On a GPU: the answer of the previous vote, which needs no waiting, and its event
        self._last_vote: tuple[torch.Tensor, torch.Event] | None = None
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        # Python calls that between its own instructions only, and a rank may wait for others in C++
        received, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno())
        self._ending = threading.RLock()
        threading.Thread(target=self._wait_for_signals, args=(received,), daemon=True).start()
        # Processes that load or prepare data must not take these signals for requests
        os.register_at_fork(after_in_child=leave_signals_to_parent)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # A signal to stop if the launcher is killed, which could not pass one on any more
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Request a stop after the current step; end at once if no step has begun."""
        self.stop_requested = True
        if not self.is_training:
            self._end(number)

    def _wait_for_signals(self, received: socket.socket) -> None:
        """Do the same while the rank is in C++. A thread runs this."""
        while True:
            number = received.recv(1)[0]
            if number in SIGNALS and not self.is_training:
                self._end(number)

    def _end(self, number: int) -> NoReturn:
        """End this process, and say why if no other rank has done so."""
        with self._ending:  # Both may come here, the first of which is to print
            name = signal.Signals(number).name
            why = f"Stopped by {name} before the first step: run the same command again"
            if self._status.end(End(Exit.STOPPED, why, is_alone=True)):
                print(why, flush=True)
            os._exit(Exit.STOPPED)

    def begin(self) -> None:
        """The loop begins."""
        self.is_training = True
        signal.set_wakeup_fd(-1)
        self.show_life()

    def show_life(self, more_seconds: float = 0) -> None:
        """Begin to count the seconds anew; some calls may take longer than others.

        A rank that hangs, in a library too, is ended by a thread of Python's.
        """
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # One process waits for nobody
            faulthandler.dump_traceback_later(self._seconds + more_seconds, exit=True)

    def rest(self) -> None:
        """Count no more: the ranks wait for each other for any length of time."""
        faulthandler.cancel_dump_traceback_later()

    def vote(self, accelerator: Accelerator, *counts: int) -> list[int]:
        """Return how many ranks were asked to stop, and the sums over all ranks of these counts.

        Every rank takes part. It is a sign of life. On a GPU nothing is waited for: the answer, on
        which all ranks agree, is that of the previous call.
        """
        self.show_life()
        votes = [int(self.stop_requested), *counts]
        if accelerator.num_processes == 1:
            return votes
        mine = torch.tensor(votes).to(accelerator.device, non_blocking=True)
        answer = accelerator.reduce(mine).to("cpu", non_blocking=True)
        if accelerator.device.type != "cuda":
            return answer.tolist()
        last_vote = self._last_vote
        self._last_vote = answer, torch.cuda.current_stream().record_event()
        if last_vote is None:
            return [0] * len(votes)
        last_answer, copied = last_vote
        copied.synchronize()
        return last_answer.tolist()


def leave_signals_to_parent() -> None:
    """Have a forked process ignore requests to stop, and end on SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
