"""Run a recipe and write down, for each optimizer step, the number of gradients and of storages in which they lie.

    python -m torch.distributed.run --standalone --nproc_per_node 2 tests/count_gradients.py OUT.json RECIPE ...

A gradient that DDP copies into a bucket and back has a storage of its own; those that are views of a bucket share one.
"""

import json
import os
import runpy
import sys
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_pre_hook

found = []


def count(optimizer, arguments, options):
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    storages = {gradient.untyped_storage().data_ptr() for gradient in gradients}
    found.append({"gradients": len(gradients), "storages": len(storages)})


def main():
    out, sys.argv = sys.argv[1], sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    register_optimizer_step_pre_hook(count)
    runpy.run_path(sys.argv[0], run_name="__main__")
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
