# SPDX-License-Identifier: Apache-2.0
"""In a rank of a rehearsal: the peak of all live tensors during an optimizer step."""

import gc
import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch._C._distributed_c10d import FakeWork, Work
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from rehearsal.step_hooks import around_steps, when_prepared

STEPS = 3  # steps that the recipe takes; the last one is tracked


class TensorTracker(MemTracker):
    """torch's tracker without its hooks on modules and parameters, which must be leaves for it.

    FSDP1's views of flat parameters are not, nor are ZeRO-3's empty parameters. What gloo holds
    itself is not counted either: see `run_on_copies`.
    """

    def __enter__(self) -> Self:
        self._fake_mode_on_entry = None
        self._track_resize()
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore_resize()
        TorchDispatchMode.__exit__(self, *error)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if is_blocking_collective(func, args):
            func = partial(run_on_copies, func)
        elif is_functional_collective(func):
            func = partial(wait_at_once, func)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def peak(self) -> int:
        """Return the bytes at the peak, of all devices together; tensors on meta have none."""
        snapshots = self.get_tracker_snapshot("peak").items()
        return sum(snapshot["Total"] for device, snapshot in snapshots if device.type != "meta")


def is_blocking_collective(op: Any, args: tuple) -> bool:
    """Return whether an op is a collective that its caller waits for at once."""
    if op.namespace != "c10d":
        return False
    names = [argument.name for argument in op._schema.arguments]
    return dict(zip(names, args, strict=False)).get("async_op") is False


def is_functional_collective(op: Any) -> bool:
    """Return whether an op is a collective that returns a new tensor, as DTensor's are."""
    if op.namespace != "_c10d_functional":
        return False
    name = op.name().rpartition(":")[2]
    return not name.startswith(("wait", "_wrap"))  # which return their argument


def wait_at_once(collective: Callable[..., Any], *args: Any) -> Any:
    """Run a functional collective to its end on copies; return copies of what it returns.

    As in `run_on_copies`, a gloo thread would hold the tensors of both sides for a while.
    """

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()

    result = collective(*tree_map_only(torch.Tensor, copy_of, args))
    return tree_map_only(
        torch.Tensor, lambda tensor: copy_of(torch.ops._c10d_functional.wait_tensor(tensor)), result
    )


def run_on_copies(collective: Callable[..., Any], *args: Any) -> Any:
    """Run a collective to its end on copies of its tensors; return what it returns.

    A gloo thread releases a collective's tensors only after it has signaled to the caller that
    they are ready. On a busy machine that takes longer than the caller needs to drop them and to
    allocate the next ones, and both would be counted. gloo also copies what it reduces and
    scatters. NCCL does neither. Ops in this function are not tracked, so that neither counts.
    """
    copied: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().clone()
        copied.append((tensor, copy))
        return copy

    result = collective(*tree_map_only(torch.Tensor, copy_of, args))
    returns_tensors = isinstance(result, tuple)
    work = result[-1] if returns_tensors else result
    Work.unbox(work).wait()
    # An output may overlap an input. It comes first among the arguments, hence it is written last.
    for tensor, copy in reversed(copied):
        tensor.data.copy_(copy)  # `data`, since a collective leaves autograd's version as it is
    done = FakeWork().boxed()
    return (args[0], done) if returns_tensors else done


class Probe:
    """Tracks from just before the optimizer of the second to last step to the end of the last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tracker = TensorTracker()
        self.steps = 0

    def before(self, zero: Any, base: Any) -> None:
        """Begin before the second to last step of the optimizer."""
        self.steps += 1
        if self.steps == STEPS - 1:
            self.tracker.track_external(*live_tensors())
            self.tracker.__enter__()

    def after(self, zero: Any, base: Any) -> None:
        """End after the last step of the optimizer."""
        if self.steps == STEPS:
            self.tracker.__exit__(None, None, None)
            self.path.write_text(json.dumps({"peak": self.tracker.peak()}))


def track(path: Path) -> None:
    """Make this rank write what it finds to `path`. Call it before the recipe starts."""
    probe = Probe(path)

    def watch(model: Any, optimizer: Any, _: Any) -> None:
        around_steps(model, optimizer, probe.before, probe.after)

    when_prepared(watch)


def live_tensors() -> list[torch.Tensor]:
    """Return every real tensor that Python tracks in this process.

    DDP's buckets are among them, as gradients.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Some objects warn when they are inspected.
        tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    return [
        tensor
        for tensor in tensors
        if tensor.device.type == "cpu" and type(tensor).__name__ != "FakeTensor"
    ]
