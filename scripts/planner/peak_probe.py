"""In a rank of a rehearsal: the peak of all live tensors during an optimizer step."""

import gc
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from proof.step_hooks import around_steps, when_prepared

STEPS = 3  # of the recipe; the last one is tracked


class TensorTracker(MemTracker):
    """torch's tracker without its hooks on modules and parameters, which must be leaves for it.

    FSDP1's views of flat parameters are not, nor are ZeRO-3's empty parameters. The copy that gloo
    makes of what it reduces and scatters is not counted, since NCCL makes none. It is recognized by
    a split of a tensor that no op has made.
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
        is_split = func is torch.ops.aten.split.Tensor
        if is_split and args[0].untyped_storage() not in self._WINFO:
            return func(*args, **kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def peak(self) -> int:
        """Return the bytes at the peak, of all devices together."""
        snapshots = self.get_tracker_snapshot("peak").values()
        return sum(snapshot["Total"] for snapshot in snapshots)


class Probe:
    """Tracks from just before the optimizer of the second to last step to the end of the last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tracker = TensorTracker()
        self.steps = 0

    def before(self, zero: Any, base: Any) -> None:
        """Called before each step of the optimizer."""
        self.steps += 1
        if self.steps == STEPS - 1:
            self.tracker.track_external(*live_tensors())
            self.tracker.__enter__()

    def after(self, zero: Any, base: Any) -> None:
        """Called after each step of the optimizer."""
        if self.steps == STEPS:
            self.tracker.__exit__(None, None, None)
            self.path.write_text(json.dumps(self.tracker.peak()))


def track(path: Path) -> None:
    """Make this rank write its peak to `path`, in bytes. Call it before the recipe starts."""
    probe = Probe(path)
    when_prepared(
        lambda model, optimizer, _: around_steps(model, optimizer, probe.before, probe.after)
    )


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
