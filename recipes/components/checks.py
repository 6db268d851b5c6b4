# SPDX-License-Identifier: Apache-2.0
"""Find what makes a run impossible before anything is loaded: all problems at once, with fixes.

What is wrong with the arguments alone, core/cli.py has refused. core/engine.py checks them
together with the launch; core/model.py follows once the model is there.
"""

from collections.abc import Iterator
from pathlib import Path

from components.hub_ids import find_missing
from core import extras
from core.arguments import (
    CommonArguments,
    MixtureArguments,
)
from core.config_names import find_launch_faults
from core.data import FILE_TYPES
from core.engine import Layout, find_faults
from core.exits import Exit, fail
from core.metrics import find_missing_tracker


def check_launch(args: CommonArguments) -> None:
    """End with 64 if the launcher's config file has faults, or a GPU is missing.

    Faults are keys that accelerate would ignore, or under which the recipes do not run. Every rank
    calls this before it makes its Accelerator, and finds the same faults.
    """
    errors = list(find_launch_faults())
    if not errors:
        for before_accelerator in extras.hooks(args.EXTRAS, "before_accelerator"):
            errors.extend(before_accelerator(args))
    if errors:
        fail(Exit.USAGE, *errors)


def find_problems(args: CommonArguments, layout: Layout) -> list[str]:
    """Return a line for the user for each problem that makes the run impossible."""
    return [
        *find_faults(args, layout),
        *find_missing_tracker(args),
    ]


def find_missing_data(args: CommonArguments) -> Iterator[str]:
    """Yield a line for each file or folder of data that does not exist.

    A run would find that too, but only after it has looked for the model on the hub.
    """
    names = [args.dataset_name]
    if isinstance(args, MixtureArguments):
        names = list(args.dataset_name)
    if args.eval_dataset_name and args.eval_strategy != "no":
        names.append(args.eval_dataset_name)
    for name in names:
        if Path(name).suffix in FILE_TYPES and not Path(name).exists():
            yield f"{name}: no such file"
        elif missing := find_missing(name, "dataset"):
            yield missing
