# SPDX-License-Identifier: Apache-2.0
"""How all ranks end a run together."""

import sys
from collections.abc import Callable
from typing import NoReturn

from accelerate import Accelerator

from components.long_calls import call_on_rank_0
from components.status import Ending, process_status, report_to_launcher
from core import workarounds
from core.exits import Exit

Problem = tuple[Exit, str]  # the code with which the run has to end, and why


def conclude(
    accelerator: Accelerator,
    ending: Ending,
    at_last: Callable[[], Problem | None] | None = None,
) -> Problem | None:
    """Record how the run ended, and then do what is left to do. Every rank takes part.

    Whoever ends the processes meanwhile, such as a batch system whose grace period is over, finds
    in status.json how the run ended. The ranks watch each other until nothing is left to do; from
    then on a rank that exits is not reported as lost.

    Args:
        at_last: what rank 0 does after that, for any length of time, such as uploads.

    Returns:
        On every rank what `at_last` returned, or None.
    """
    accelerator.wait_for_everyone()
    status = process_status()
    status.decide(ending)
    problem = None
    if at_last is not None:
        problem = call_on_rank_0(accelerator, at_last)
    status.state = ending.state
    accelerator.wait_for_everyone()
    return problem


def leave_group(accelerator: Accelerator) -> None:
    """Finish what is tracked, and destroy the process group. Every rank takes part."""
    workarounds.keep_group_until_exit()
    accelerator.end_training()


def end_all_ranks(
    accelerator: Accelerator,
    code: int,
    message: str,
    at_last: Callable[[], Problem | None] | None = None,
) -> NoReturn:
    """End all ranks with the same exit code, and print the message last. Every rank takes part.

    Args:
        at_last: as for `conclude`; its failure does not change how the run ends.
    """
    ending = Ending.failed(code, message)
    stream = sys.stderr
    if code == Exit.STOPPED:
        ending = Ending.stopped(message)
        stream = sys.stdout
    conclude(accelerator, ending, at_last)
    leave_group(accelerator)
    accelerator.print(ending.text, file=stream, flush=True)
    report_to_launcher(ending)
    sys.exit(code)


def end_as_done(accelerator: Accelerator, message: str) -> NoReturn:
    """End all ranks with 0, since an earlier call has finished the run. Every rank takes part."""
    process_status().state = "done"  # From here on a rank that exits is not reported as lost.
    accelerator.wait_for_everyone()
    leave_group(accelerator)
    accelerator.print(message, flush=True)
    sys.exit(Exit.DONE)
