# SPDX-License-Identifier: Apache-2.0
"""In a rank of a rehearsal: say when the model is loaded and prepared, and then end the recipe."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import datasets  # noqa: F401  imported by the recipe otherwise, with 45 MB, after the beginning
from accelerate import Accelerator
from torch.nn import Module

from components import weights
from components.mesh import Mesh
from components.plugins import fsdp_plugin
from rehearsal.live_tensors import held, live_parameters

SETTLE_SECONDS = 2  # for samples of the ranks at rest, before loading and after each phase


class Moments:
    """What this rank says of itself, in a file that the measuring process reads meanwhile.

    Attributes:
        times: seconds of the machine's monotonic clock by name: "begin", "loaded", "prepared".
        held: bytes of the model's weights on this rank by the same names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.times: dict[str, float] = {}
        self.held: dict[str, int] = {}
        self.on_host = False  # whether what was loaded is a copy on the host on a GPU machine too

    def note(self, accelerator: Accelerator, name: str, model: Module | None = None) -> None:
        """Record a moment, at which all ranks wait for each other and for a few samples."""
        if model is not None:
            live = live_parameters(model)
            self.held[name] = held([*live, *model.buffers()])["bytes"]
        accelerator.wait_for_everyone()
        time.sleep(SETTLE_SECONDS)
        self.times[name] = time.monotonic()
        self.write()
        accelerator.wait_for_everyone()

    def write(self) -> None:
        """Write the file as a whole: the measuring process never sees a part of it."""
        content = {"pid": os.getpid(), "rank": int(os.environ.get("RANK", 0))}
        content |= {"times": self.times, "held": self.held, "on_host": self.on_host}
        staged = self.path.with_name(f".{self.path.name}")
        staged.write_text(json.dumps(content))
        staged.replace(self.path)


def loads_to_host(accelerator: Accelerator) -> bool:
    """Return whether the weights pass through the host on a machine with GPUs: only under FSDP.

    All others are loaded to where they stay, and so are the parts of tensor and expert parallelism.
    """
    mesh = Mesh.of(accelerator)
    return fsdp_plugin(accelerator) is not None and mesh.tp == mesh.ep == 1


def track(path: Path) -> None:
    """Make this rank write `Moments` to `path`, and end with 0 when the model is prepared.

    Where weights are loaded to where they stay, it ends before `prepare`. Call it before the recipe
    starts: it hooks into the function that loads weights.
    """
    moments = Moments(path)
    load = weights.load_pretrained
    prepare = Accelerator.prepare

    def load_and_note(auto_class: Any, accelerator: Accelerator, *args: Any, **options: Any) -> Any:
        moments.write()
        moments.note(accelerator, "begin")
        loaded = load(auto_class, accelerator, *args, **options)
        moments.on_host = loads_to_host(accelerator)
        moments.note(accelerator, "loaded", loaded[0])
        return loaded

    def prepare_and_end(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        result = prepare(self, *args, **kwargs) if moments.on_host else args
        if "loaded" not in moments.times:  # Something else was prepared before.
            return result
        if moments.on_host:
            prepared = [item for item in result if isinstance(item, Module)]
            moments.note(self, "prepared", prepared[0])
        sys.exit(0)

    weights.load_pretrained = load_and_note
    Accelerator.prepare = prepare_and_end
