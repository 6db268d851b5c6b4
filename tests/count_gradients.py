# SPDX-License-Identifier: Apache-2.0
"""Run a recipe and count, in each optimizer step, gradients and the storages in which they are.

    python -m torch.distributed.run --standalone --nproc_per_node 2 tests/count_gradients.py \\
        OUT.json RECIPE ...

A gradient that DDP copies into a bucket and back has a storage of its own; those that are views of
a bucket share one.
"""

import json
import os
import runpy
import sys
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_pre_hook


def count(optimizer):
    """The numbers of gradients and of their storages."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    storages = {gradient.untyped_storage().data_ptr() for gradient in gradients}
    return {"gradients": len(gradients), "storages": len(storages)}


def main():
    """Be what `python RECIPE ...` would be, and write down what was counted."""
    out, recipe, *arguments = sys.argv[1:]
    sys.argv = [recipe, *arguments]
    sys.path[0] = str(Path(recipe).resolve().parent)
    found = []

    def count_before_step(optimizer, arguments, options):
        found.append(count(optimizer))

    register_optimizer_step_pre_hook(count_before_step)
    runpy.run_path(recipe, run_name="__main__")
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
