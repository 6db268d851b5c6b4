# SPDX-License-Identifier: Apache-2.0
"""Time and memory of short pieces of work on a device."""

import time
from collections.abc import Callable

import torch

Work = Callable[[], object]


def synchronize(device: str) -> None:
    """Wait for all work of a GPU; on a CPU there is nothing to wait for."""
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(work: Work, device: str, repeats: int = 20, warmup: int = 3) -> float:
    """Return the mean time of calling `work`, in milliseconds, including the device's work."""
    for _ in range(warmup):
        work()
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - begun) / repeats * 1e3


def peak_mib(work: Work, device: str) -> float | None:
    """Return the most MiB that tensors took during a call of `work`, above those before.

    Returns None on a CPU, where `work` is called too.
    """
    if device != "cuda":
        work()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
