# SPDX-License-Identifier: Apache-2.0
"""Make the Accelerator of a recipe, or end with one line for each reason why it cannot run."""

import transformers
from accelerate import Accelerator

from components.checks import check_launch, find_missing_data, find_problems
from core.arguments import CommonArguments
from core.engine import Layout, make_layout, new_accelerator, set_up_engine
from core.exits import Exit, fail


def make_accelerator(args: CommonArguments) -> tuple[Accelerator, Layout]:
    """Return the Accelerator, which has to exist before the model is loaded, and its layout.

    Ends with 64 if YAML, launcher and arguments request something that it cannot run, or with 65 if
    the only problem is a missing data set.
    """
    check_launch(args)
    try:
        accelerator = new_accelerator(args)
        layout = make_layout(args, accelerator)
    except (RuntimeError, ValueError, ImportError) as error:
        fail(Exit.USAGE, f"accelerate cannot run what the launch requests: {error!s:.300}")
    problems = find_problems(args, layout)
    missing = list(find_missing_data(args))
    if problems or missing:
        fail(Exit.USAGE if problems else Exit.DATA, *problems, *missing)
    set_up_engine(args, accelerator)
    if not accelerator.is_local_main_process:
        hide_progress_bars()
    return accelerator, layout


def hide_progress_bars() -> None:
    """Have this rank show no progress of loading: one line per host, and not one per rank."""
    import datasets  # A plan of the memory needs this module, but not datasets.

    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
