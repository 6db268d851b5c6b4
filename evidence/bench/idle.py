# SPDX-License-Identifier: Apache-2.0
"""Whether the machine is busy with something other than a run."""

import os
import time
from dataclasses import dataclass

from . import machine

MOST_LOAD = 1.8  # load average: the run itself is 1, and a second core must be nearly free
PATIENCE = 1800  # seconds to wait until the machine is idle


@dataclass(frozen=True)
class Use:
    """The use of the machine at one moment."""

    load: float  # load average of the host
    disturbs: bool  # whether something else uses what the run needs


def use_before(device: str) -> Use:
    """Return the machine's use before a run; on a CPU, wait for it to be idle first.

    On a GPU the host's load does not matter, and reading weights raises it anyway. What matters is
    another process on the GPU.

    device: "cpu" or "cuda", where the run computes.
    """
    if device == "cuda":
        return use_of_gpu()
    load = wait_until_idle()
    return Use(load, load > MOST_LOAD)


def use_after(device: str, ranks: int) -> Use:
    """Return the machine's use after a run of this many processes has ended."""
    if device == "cuda":
        return use_of_gpu()
    load = os.getloadavg()[0]
    return Use(load, load > MOST_LOAD + ranks - 1)


def use_of_gpu() -> Use:
    """Return the use of the machine, which is disturbed if another process is on the GPU."""
    return Use(os.getloadavg()[0], gpu_is_busy())


def wait_until_idle(limit: float = MOST_LOAD, patience: float = PATIENCE) -> float:
    """Wait until the load average is at most `limit`, `patience` seconds at most; return it."""
    end = time.monotonic() + patience
    load = os.getloadavg()[0]
    while load > limit and time.monotonic() < end:
        time.sleep(5)
        load = os.getloadavg()[0]
    return load


def gpu_is_busy(patience: float = 5) -> bool:
    """Return whether a process computes on the GPU.

    One that has just ended may be listed for a moment, so this waits for `patience` seconds.
    """
    end = time.monotonic() + patience
    while machine.gpu_processes():
        if time.monotonic() > end:
            return True
        time.sleep(0.5)
    return False
