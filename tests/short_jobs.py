# SPDX-License-Identifier: Apache-2.0
"""The job of evidence/test_parity.py at half its size."""

from dataclasses import replace

from job import CUT, Run
from test_parity import all_runs, ranks_of

ROWS = 102
FLAGS = ("--max_steps", "10")


def short_run(config, kind):
    """The run of recipes/llama.py under a YAML, with a kind of weights, made short."""
    ranks = ranks_of(config, 2)
    run = Run("strategies", config, ranks, *CUT[ranks], kind)
    assert run in all_runs()
    return replace(run, flags=(*run.flags, *FLAGS))
