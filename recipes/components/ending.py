# SPDX-License-Identifier: Apache-2.0
"""How all ranks end a run together."""

import sys
from typing import NoReturn

from accelerate import Accelerator

from components.exits import Exit
from components.status import process_status, report_to_launcher
from components.upstream import keep_group_until_exit


def conclude(accelerator: Accelerator, state: str, code: int, why: str | None = None) -> None:
    """Record how the run ended. Every rank takes part.

    From here on a rank that exits is not reported as lost. A rank may come much later than the
    others, since it uploads a checkpoint: until then all of them watch each other.
    """
    accelerator.wait_for_everyone()
    status = process_status()
    if accelerator.is_main_process:
        status.set(state, code, why)
    else:
        status.state = state
    accelerator.wait_for_everyone()


def leave_group(accelerator: Accelerator) -> None:
    """Finish what is tracked, and destroy the process group. Every rank takes part."""
    keep_group_until_exit()
    accelerator.end_training()


def end_all_ranks(accelerator: Accelerator, code: int, message: str) -> NoReturn:
    """End all ranks with the same exit code, and print the message last. Every rank takes part."""
    stopped = code == Exit.STOPPED
    state = "stopped" if stopped else "failed"
    text = message if stopped else f"error: {message}"
    conclude(accelerator, state, code, message)
    leave_group(accelerator)
    accelerator.print(text, file=sys.stdout if stopped else sys.stderr, flush=True)
    report_to_launcher(state, code, message, text)
    sys.exit(code)


def end_as_done(accelerator: Accelerator, message: str) -> NoReturn:
    """End all ranks with 0, since an earlier call has finished the run. Every rank takes part."""
    process_status().state = "done"  # From here on a rank that exits is not reported as lost.
    accelerator.wait_for_everyone()
    leave_group(accelerator)
    accelerator.print(message, flush=True)
    sys.exit(Exit.DONE)
