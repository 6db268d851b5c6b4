# SPDX-License-Identifier: Apache-2.0
"""However a global batch is cut, recomputed or attended to, the numbers are those of one process:
evidence/parity.py's own runs, in short; tests/launch/test_strategies.py has every YAML, and the
script itself all of them (results/README.md).
"""

import json

import pytest

from proof.jobs import CUT, Run
from proof.parity_table import measure
from short_jobs import STEPS, short

SHORT_FORM = [
    Run("strategies", "fsdp1_no_shard", 2, 3, 2),  # without adapters: not there on 2 ranks
    Run("cuts", "single", 1, 1, 12),  # no padding at all
    Run("cuts", "ddp", 2, 6, 1),
    Run("cuts", "deepspeed_zero2", 2, 1, 6),
    Run("cuts", "fsdp2_full_shard", 4, 1, 3),
    Run("checkpointing", "single", flags=("--gradient_checkpointing",)),
    Run("checkpointing", "fsdp2_full_shard", 2, 3, 2, flags=("--gradient_checkpointing",)),
    # Its engine steps before the first step.
    Run("bf16", "deepspeed_zero0", 2, 3, 2, precision="bf16"),
    Run("attention", "single", flags=("--attn_implementation", "eager")),
]


@pytest.mark.parametrize("run", SHORT_FORM, ids=lambda run: f"{run.group}-{run.name}")
def test_the_numbers_are_those_of_one_process(run, short_of, short_in_one_process, tmp_path):
    whole = short_in_one_process(run.weights)
    row = measure(short(run), short_of("llama"), tmp_path / "run", whole)
    assert row["verdict"] == "ok", row
    if run.group == "attention":
        record = json.loads((tmp_path / "run" / "run.json").read_text())
        assert record["summary"]["kernels"] == "attention eager"


@pytest.mark.parametrize("form", ["whole", "short"])
def test_a_rank_without_a_supervised_token_is_among_the_cuts(form, tiny, short_of):
    # In windows of 12 rows: the last window of an epoch has 6, two batches of 3 for four ranks
    folder, steps = {"whole": (tiny, 20), "short": (short_of("llama"), STEPS)}[form]
    rows = len((folder / "data" / "train.jsonl").read_text().splitlines())
    assert rows % 12 == 6 and CUT[4] == (3, 1) and rows // 12 + 1 <= steps
