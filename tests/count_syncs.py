"""Run a recipe and record each time that Python waits for a number on the device.

A record has the step, the file and the line.

    python tests/count_syncs.py OUT.json recipes/llama.py ...

What makes a GPU's queue run dry is an operation whose result Python needs: item and what calls it
(bool, float, int, an `if` on a tensor), tolist, numpy, cpu, nonzero and masks as indices. They are
the same operations on a CPU, so they can be counted there. Collating a batch is not counted: it
works on arrays of the host.
"""

import json
import sys
import traceback
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
from proof.faults import load

READS = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "masked_select",
    "unique_dim",
    "_unique2",
    "is_nonzero",
}
found = []


def note():
    """Who asked: the innermost frame that is neither torch nor this file."""
    frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
    frame = next(frame for frame in reversed(frames) if frame.filename != __file__)
    if not any(frame.name == "__call__" and "packing" in frame.filename for frame in frames):
        from components.status import process_status

        step = process_status().step
        found.append(
            {"step": step, "file": "/".join(Path(frame.filename).parts[-2:]), "line": frame.line}
        )


class Reads(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.overloadpacket.__name__ in READS:
            note()
        return function(*arguments, **(options or {}))


def noted(method):
    def call(*arguments, **options):
        note()
        return method(*arguments, **options)

    return call


def main():
    out, sys.argv = sys.argv[1], sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    recipe = load(sys.argv[0])
    for name in ("tolist", "numpy", "cpu"):
        setattr(torch.Tensor, name, noted(getattr(torch.Tensor, name)))
    with Reads():
        recipe.main(recipe.start(recipe.Arguments, ""))
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
