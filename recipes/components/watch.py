# SPDX-License-Identifier: Apache-2.0
"""Signals to this process, exceptions in it, and the other ranks of the run.

Without this a rank that dies would leave the others waiting forever in a collective call, and a
run that is preempted would lose what it did since its last checkpoint.
"""

import contextlib
import dataclasses
import errno
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType, TracebackType
from typing import TextIO

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError

from components.hosts import SECONDS_BETWEEN_BEATS, Host, HostWatch, is_broken_connection, this_node
from components.status import HOST, RANK, Ending, process_status, report_to_launcher
from components.write_errors import WriteError
from core.exits import Exit

CANNOT_WRITE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES),
    *(errno.EIO, errno.ESTALE),
)
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_FOR_MAIN_THREAD = 5  # It handles a signal within these if it can.
# The first rank of a host reads within these how a rank of another host has ended, and prints it.
SECONDS_FOR_FIRST_RANK = 3 * SECONDS_BETWEEN_BEATS
SECONDS_FOR_OTHER_RANKS = 2  # A rank that failed first has reported it after these.


class Watch:
    """Everything outside the loop that can end a run.

    Attributes:
        stop_requested: whether this process was asked to stop.
        sign_of_life: when the main thread last showed one, in seconds of time.monotonic().
        peers: {file descriptor of a process: (rank, process id)} of the other ranks of this host.
        hosts: the watch over the other hosts.
    """

    def __init__(self, output_dir: str) -> None:
        self.stop_requested = False
        self.sign_of_life = math.inf
        self.peers: dict[int, tuple[int, int]] = {}
        self._status = process_status()
        self.hosts = HostWatch(self._status)
        self._output_dir = output_dir
        self._woken = -1
        # torchrun, which ends its ranks unless it is killed
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        # On a GPU: the answer of the previous vote, which needs no waiting, and its event
        self._last_vote: tuple[torch.Tensor, torch.Event] | None = None

    # ---- Signals ----
    def take_signals(self) -> None:
        """Have SIGTERM, SIGINT and SIGUSR1 request a stop, on which the ranks agree."""
        self._woken, wakes = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        # Processes that load or prepare data must not take these signals for requests: this process
        # ends them with SIGTERM.
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self.on_signal)
        os.register_at_fork(after_in_child=leave_signals_to_parent)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Request a stop after the current step; end at once if no step has begun."""
        self.stop_requested = True
        if self._status.state != "starting":
            return
        code: int = Exit.STOPPED
        try:
            code = self._report_end_before_first_step(number)
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):  # It has ended already.
                    child.kill()
        finally:
            # Without cleaning up: a pool of processes that prepares rows would wait forever for a
            # lock that a killed process held.
            os._exit(code)

    def _report_end_before_first_step(self, number: int) -> int:
        """Report why a signal ends this process before its first step. Returns the exit code."""
        report = self._status.reported_by_others()
        gone = self.gone_peers()
        if report:  # The launcher ends all ranks when one has ended, and that one said why.
            text = "ended by the launcher, since another rank had ended"
            report_to_launcher(dataclasses.replace(report, text=text), later=1)
            return report.exit_code
        if gone:  # The peer was killed: if it had been stopped, it would have reported that.
            rank, process = gone[0]
            why = f"rank {rank} (process {process}) is gone on {HOST}"
            ending = Ending.failed(Exit.FAILED, why)
            stream = sys.stderr
        else:
            name = signal.Signals(number).name
            ending = Ending.stopped(
                f"Stopped by {name} before the first step: run the same command again"
            )
            stream = sys.stdout
        self._status.announce(ending)  # Before the text, whose reader may be gone
        print(ending.text, file=stream, flush=True)
        return ending.exit_code

    def vote(self, accelerator: Accelerator, *counts: int) -> list[int]:
        """Return how many ranks were asked to stop, and the sums over all ranks of these counts.

        Every rank takes part. It is a sign of life. On a GPU nothing is waited for: the answer, on
        which all ranks agree, is that of the previous call.
        """
        self.show_life()
        votes = [int(self.stop_requested), *counts]
        if accelerator.num_processes == 1:
            return votes
        mine = torch.tensor(votes, device=accelerator.device)
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

    def show_life(self) -> None:
        """Show that the main thread does not hang."""
        self.sign_of_life = time.monotonic()

    # ---- The other ranks ----
    def join(self, accelerator: Accelerator, timeout: float) -> None:
        """Record exceptions, and watch the other ranks. Every rank takes part.

        Args:
            timeout: seconds without a sign of life after which this rank ends.
        """
        # Not earlier: torch wraps the hook that it finds when ranks join, and then keeps other
        # threads from writing to stderr.
        sys.excepthook = self.on_exception
        for rank, node, process in gather_object([(RANK, this_node(), os.getpid())]):
            if node == this_node() and rank != RANK:
                with contextlib.suppress(OSError):  # It is in another container of the same name.
                    self.peers[os.pidfd_open(process)] = rank, process
        self.hosts.join(accelerator)
        self._status.tell_other_hosts_by(self.hosts.telling)
        threading.Thread(target=self._look_after_ranks, args=(timeout,), daemon=True).start()

    def gone_peers(self) -> list[tuple[int, int]]:
        """Return (rank, process id) of the ranks of this host that have ended."""
        if not self.peers:
            return []
        ended = wait(list(self.peers), 0)
        return [peer for descriptor, peer in self.peers.items() if descriptor in ended]

    def _look_after_ranks(self, timeout: float) -> None:
        """End this rank when a peer is gone, or after `timeout` seconds without a sign of life."""
        while self._status.is_training:
            ready = wait([*self.peers, self._woken], SECONDS_BETWEEN_LOOKS)
            gone = [self.peers[descriptor] for descriptor in ready if descriptor in self.peers]
            if self._launcher not in (None, os.getppid()):
                self._stop_without_launcher()
            if self._woken in ready and not gone:
                self._take_signal_for_main_thread()
            hangs = time.monotonic() - self.sign_of_life > timeout
            if gone or hangs:
                self._end_this_rank(gone, hangs, timeout)
            lost = self.hosts.lost()
            if lost or self.hosts.report:
                self._end_with_other_hosts(lost)

    def _stop_without_launcher(self) -> None:
        """Request a stop once the launcher was killed.

        This rank would continue, and hold the device and the folder that the next call needs.
        """
        print(
            f"error: the launcher (process {self._launcher}) is gone", file=sys.stderr, flush=True
        )
        self._launcher = None
        self.on_signal(signal.SIGTERM, None)

    def _take_signal_for_main_thread(self) -> None:
        """Handle a signal while the main thread is in C++, where Python runs no handlers."""
        number = os.read(self._woken, 1)[0]
        if signal.getsignal(number) != self.on_signal:
            return
        if self._status.state == "starting":
            time.sleep(SECONDS_FOR_MAIN_THREAD)
        self.on_signal(number, None)

    def _end_this_rank(self, gone: list[tuple[int, int]], hangs: bool, timeout: float) -> None:
        """End this process with one line for all ranks; return if the run has ended meanwhile."""
        if hangs:
            why = f"no sign of life for {timeout} s"
            faulthandler.dump_traceback()
            for _, process in self.peers.values():
                with contextlib.suppress(ProcessLookupError):  # It has ended meanwhile.
                    os.kill(process, signal.SIGCONT)  # A suspended rank shows its stacks too.
            time.sleep(1)
        else:
            rank, process = gone[0]
            why = f"rank {rank} (process {process}) is gone"
        time.sleep(0.05 * (RANK % 16))  # The first rank reports, and the others see its report.
        if not self._status.is_training:
            return
        report = self._status.reported_by_others()
        if report is None:
            text = (
                f"error: {why} on {HOST} in step {self._status.step}; "
                "the same command continues from the newest checkpoint"
            )
            self._status.announce(
                Ending.failed(Exit.FAILED, f"{why} on {HOST}", text, has_place=True)
            )
            print_if_possible(text)
            os._exit(Exit.FAILED)
        if report.state == "stopped":  # The peer was stopped before its first step.
            print_if_possible(report.text, sys.stdout)
        os._exit(report.exit_code)

    def _end_with_other_hosts(self, lost: list[Host]) -> None:
        """End this rank as a rank of another host has ended, or since hosts are lost.

        The first rank of each host prints the line, since hosts have logs of their own.
        """
        ending = self.hosts.report or self._ending_without(lost)
        if not self._status.is_training:
            return
        if not self.hosts.is_leader:
            # The first rank learns it up to a beat later, and prints why. When it has ended, the
            # launcher ends the others.
            time.sleep(SECONDS_FOR_FIRST_RANK)
            os._exit(ending.exit_code)
        others = contextlib.nullcontext()
        if lost:  # Those that are not may still answer.
            others = self.hosts.telling(ending)
        with others:
            self._status.end(ending)
            report_to_launcher(ending)
            print_if_possible(ending.text)
        os._exit(ending.exit_code)

    def _ending_without(self, lost: list[Host]) -> Ending:
        """Return how a rank ends since hosts are lost."""
        why = self.hosts.why_lost(lost)
        text = (
            f"error: {why}: rank {RANK} on {HOST} ends in step {self._status.step}; "
            "the same command continues from the newest checkpoint"
        )
        return Ending.failed(Exit.FAILED, why, text, has_place=True)

    # ---- Exceptions ----
    def on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Record what ended this rank, and end it, without a traceback if one line explains it."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # The launcher sends it to end all ranks.
        if os.environ.get("WORLD_SIZE", "1") != "1":
            time.sleep(SECONDS_FOR_OTHER_RANKS)  # This may only follow from another rank's end.
        if is_broken_connection(error):
            # If a host is lost, the thread that looks after ranks notices it and ends this process.
            time.sleep(self.hosts.note_broken_connection())
        report = self._status.reported_by_others()
        # Another rank, or a process that loads data, failed.
        if report is not None and report.state == "failed":
            os._exit(report.exit_code)
        why = f"{kind.__name__}: {error}"
        code, text = self._explain(error)
        if code == Exit.FAILED:
            sys.__excepthook__(kind, error, trace)
        else:
            print(text, file=sys.stderr)
        self._status.announce(Ending.failed(code, why, text))
        sys.stdout.flush()
        os._exit(code)

    def _explain(self, error: BaseException) -> tuple[Exit, str]:
        """Return the exit code for an exception, and the line that reports it."""
        name = type(error).__name__
        if name == "NoMatchingPeftModuleError":
            return Exit.USAGE, f"error: --lora_target_modules: {error}"
        if is_about_a_file(error, self._output_dir):
            return Exit.CANNOT_WRITE, f"error: cannot read or write: {WriteError.of(error)}"
        return Exit.FAILED, f"error: {name}: {error}"


def print_if_possible(text: str, stream: TextIO | None = None) -> None:
    """Print a last line, on stderr by default, from a thread that has to end the process after it.

    The program that reads the output may have ended, and then nothing can be printed.
    """
    with contextlib.suppress(OSError, ValueError):
        print(text, file=stream or sys.stderr, flush=True)


def leave_signals_to_parent() -> None:
    """Have a forked process ignore requests to stop, and end on SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def is_about_a_file(error: BaseException, output_dir: str) -> bool:
    """Return whether an exception means that a file could not be read or written.

    That is any file for lack of space or permission or since its disk or server has failed, or a
    file in the output folder for any reason.
    """
    if isinstance(error, SafetensorError) or getattr(error, "errno", None) in CANNOT_WRITE:
        return True
    named = getattr(error, "filename", None)
    if not isinstance(error, OSError) or not isinstance(named, str | bytes):
        return False
    path = Path(os.path.abspath(os.fsdecode(named)))
    return path.is_relative_to(os.path.abspath(output_dir))
