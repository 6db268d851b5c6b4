"""Run a recipe and write down each time that Python waits for a number on the device.

    python tests/count_syncs.py OUT.json recipes/llama.py ...

What makes a GPU's queue run dry is an operation whose result Python needs: item and what calls it
(bool, float, int, an `if` on a tensor), tolist, numpy, cpu, nonzero and masks as indices. They are
the same operations on a CPU, so they can be counted there. Collating a batch is not counted: it
works on arrays of the host. Of each the step, the file and the line are written down.
"""

import json
import sys
import traceback
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
from proof.faults import current_step, load  # noqa: E402

READS = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "masked_select",
    "unique_dim",
    "_unique2",
    "is_nonzero",
}
METHODS = ("tolist", "numpy", "cpu")


class Reads:
    """Every wait of a recipe for a number."""

    def __init__(self, recipe):
        self.recipe = recipe
        self.found = []

    def note(self):
        """Note who asked: the innermost frame that is neither torch nor this file."""
        frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
        if any(frame.name == "collate" for frame in frames):
            return
        outside = [frame for frame in frames if frame.filename != __file__]
        place = "/".join(Path(outside[-1].filename).parts[-2:])
        step = current_step(self.recipe)
        self.found.append({"step": step, "file": place, "line": outside[-1].line})

    def noted(self, method):
        """The method of a tensor, noted when it is called."""

        def call(*arguments, **options):
            self.note()
            return method(*arguments, **options)

        return call


class Dispatch(TorchDispatchMode):
    """Notes the operations whose result Python needs."""

    def __init__(self, reads):
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.overloadpacket.__name__ in READS:
            self.reads.note()
        return function(*arguments, **(options or {}))


def main():
    """Be what `python RECIPE ...` would be, and write down what was read."""
    out, path, *arguments = sys.argv[1:]
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path(path).resolve().parent)
    recipe = load(path)
    reads = Reads(recipe)
    for name in METHODS:
        setattr(torch.Tensor, name, reads.noted(getattr(torch.Tensor, name)))
    with Dispatch(reads):
        recipe.main()
    Path(out).write_text(json.dumps(reads.found))


if __name__ == "__main__":
    main()
