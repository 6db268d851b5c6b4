# SPDX-License-Identifier: Apache-2.0
"""CPU ranks that are forks of the test's process, so that they start without importing anything."""

import multiprocessing
import os
import socket
import traceback
from contextlib import ExitStack
from datetime import timedelta

TIMEOUT = 120  # seconds; a function takes a few
CPU_ONLY = {"ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def on_ranks(function, count=1, prepare=None, **environment):
    """Return what a function returned on each of some ranks.

    What it changes in libraries and in the environment ends with its rank.

    Args:
        prepare: a function of the number of ranks, called on each before they make their group.
        environment: variables, with which accelerate's launcher names the engine.
    """
    import deepspeed  # noqa: F401  here, once, and not in each rank
    import torch._dynamo  # noqa: F401  of FSDP2
    import torch.distributed.fsdp  # noqa: F401

    fork = multiprocessing.get_context("fork")
    port = free_port()
    places = [{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count} for rank in range(count)]
    pipes = [fork.Pipe(duplex=False) for _ in places]
    processes = []
    for place, (_, sender) in zip(places, pipes, strict=True):
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": count}
        variables = CPU_ONLY | environment | place | address
        process = fork.Process(target=be_rank, args=(function, prepare, sender, variables))
        process.start()
        sender.close()
        processes.append(process)
    try:
        return [received(receiver) for receiver, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def free_port():
    """A port on which no process listens."""
    return free_ports(1)[0]


def free_ports(number):
    """Ports on which no process listens."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def received(receiver):
    """What a rank sent; an error of it fails the test."""
    assert receiver.poll(TIMEOUT), "a rank did not end in time"
    error, result = receiver.recv()
    assert error is None, error
    return result


def be_rank(function, prepare, sender, variables):
    """Make a process group, call the function, and send what it returned or how it failed."""
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        import torch.distributed as dist
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)  # forget earlier tests
        GradientState._reset_state()
        if prepare is not None:
            prepare(int(variables["WORLD_SIZE"]))
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
        sender.send((None, function()))
    except BaseException:
        sender.send((traceback.format_exc(), None))
