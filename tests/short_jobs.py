# SPDX-License-Identifier: Apache-2.0
"""The job of scripts/parity.py at half its size, for tests that launch many strategies.

It keeps what makes the job hard. Its steps still cross the end of an epoch, and the rows do not
divide by the global batch of 12 either: the last window of an epoch has 6 rows.
"""

from dataclasses import replace

from proof.jobs import all_runs

ROWS = 102
STEPS = 10  # 9 of them in the first epoch
FLAGS = ("--max_steps", str(STEPS))


def short(run):
    """A run of scripts/parity.py, made short."""
    assert run in all_runs()
    return replace(run, flags=(*run.flags, *FLAGS))
