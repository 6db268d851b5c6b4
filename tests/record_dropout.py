# SPDX-License-Identifier: Apache-2.0
"""Run a recipe and record, for each dropout of this rank, from which numbers it draws.

    accelerate launch ... tests/record_dropout.py OUT RECIPE ...

Two calls with the same digest draw the same, since it is that of the generator's state before the
call. A rank writes one line for each optimizer step into OUT.RANK.
"""

import hashlib
import json
import os
import runpy
import sys
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


def main():
    """Be what `python RECIPE ...` would be, and write down what was recorded."""
    out, recipe, *arguments = sys.argv[1:]
    sys.argv = [recipe, *arguments]
    sys.path[0] = str(Path(recipe).resolve().parent)
    drop = torch.nn.functional.dropout
    digests = []

    def recorded(input, p=0.5, training=True, inplace=False):
        if training and p > 0:
            state = torch.get_rng_state().numpy().tobytes()
            digests.append(hashlib.sha256(state).hexdigest())
        return drop(input, p, training, inplace)

    def write_before_step(optimizer, arguments, options):
        with open(f"{out}.{os.environ['RANK']}", "a") as file:
            file.write(json.dumps(digests) + "\n")
        digests.clear()

    torch.nn.functional.dropout = recorded
    register_optimizer_step_pre_hook(write_before_step)
    runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    main()
