# SPDX-License-Identifier: Apache-2.0
"""Run a recipe and record each time that Python waits for a number on the device.

    python tests/count_syncs.py OUT.json recipes/llama.py ...

A record is a step and the file that asked. What makes a GPU's queue run dry is an operation whose
result Python needs: item and what calls it (bool, float, int, an `if` on a tensor), tolist, numpy,
cpu, nonzero and masks as indices. They are the same operations on a CPU, so they can be counted
there. Collating a batch is not counted: it works on arrays of the host.
"""

import functools
import importlib
import json
import sys
import traceback
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that torch dispatches, and methods of a tensor, that read from the device
READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "is_nonzero"}
PEAK = 1e12  # FLOPs a second, as if this CPU were a card that is known
METHODS = ("tolist", "numpy", "cpu")


class Reads(TorchDispatchMode):
    """Collects a record of each read, as long as the mode is entered."""

    def __init__(self):
        super().__init__()
        self.found = []
        self.run = None  # from its start on

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.overloadpacket.__name__ in READS:
            self.note()
        return function(*arguments, **(options or {}))

    def note(self):
        """Record who asked: the innermost frame that is neither torch's nor of this file."""
        frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
        if any(frame.name == "__call__" and "packing" in frame.filename for frame in frames):
            return  # a batch is collated
        asked = [frame for frame in frames if frame.filename != __file__][-1]
        step = self.run.step + 1 if self.run else 0
        self.found.append({"step": step, "file": "/".join(Path(asked.filename).parts[-2:])})


def before(function, call):
    """A function before which another one is called with the same arguments."""

    @functools.wraps(function)
    def both(*arguments, **options):
        call(*arguments, **options)
        return function(*arguments, **options)

    return both


def main():
    """Run the recipe as `python RECIPE ...` would, and write down what was found."""
    out, recipe, *arguments = sys.argv[1:]
    sys.argv = [recipe, *arguments]
    sys.path[0] = str(Path(recipe).resolve().parent)
    module = importlib.import_module(Path(recipe).stem)
    reads = Reads()
    importlib.import_module("core.run").peak_flops = lambda device: PEAK
    module.train = before(module.train, lambda args, run: setattr(reads, "run", run))
    for name in METHODS:
        noted = before(getattr(torch.Tensor, name), lambda *_, **__: reads.note())
        setattr(torch.Tensor, name, noted)
    with reads:
        module.main()
    Path(out).write_text(json.dumps(reads.found))


if __name__ == "__main__":
    main()
