# SPDX-License-Identifier: Apache-2.0
"""The job of evidence/parity.py at half its size, for tests that launch many strategies.

It keeps what makes the job hard. Its steps still cross the end of an epoch, and the rows do not
divide by the global batch of 12 either: the last window of an epoch has 6 rows.
"""

from dataclasses import replace

from proof.jobs import CUT, Run, all_runs, ranks_of

# What a table of YAMLs and kinds of weights says of a pair: it works, or what the refusal says
WORKS = "works"
NO_INT8_FSDP = "use --load_in_4bit, or int8 with ddp.yaml"
ROWS = 102
STEPS = 10  # 9 of them in the first epoch
FLAGS = ("--max_steps", str(STEPS))
# Bytes depend on the ranks: some full weights are shown on 4, the rest on 2; evidence/parity.py
# runs all on both
ON_FOUR = ("fsdp1_full_shard", "fsdp2_full_shard", "deepspeed_zero3")


def short(run):
    """A run of evidence/parity.py, made short."""
    assert run in all_runs()
    return replace(run, flags=(*run.flags, *FLAGS))


def short_run(config, kind):
    """The short run of recipes/llama.py under a YAML, with a kind of weights."""
    ranks = ranks_of(config, 4 if kind == "full" and config in ON_FOUR else 2)
    return short(Run("strategies", config, ranks, *CUT[ranks], kind))
