"""Time and memory of short pieces of work on a device."""

import time

import torch


def synchronize(device):
    """Wait for all work of a GPU; a CPU has none that is waited for."""
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(work, device, repeats=20, warmup=3):
    """Return the mean time of calling `work`, in milliseconds, the device's work included."""
    for _ in range(warmup):
        work()
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - begun) / repeats * 1e3


def peak_mib(work, device):
    """Return the most MiB that tensors took during a call of `work`, above those before.

    Returns None on a CPU, where the work is done all the same.
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
