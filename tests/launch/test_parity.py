"""However a global batch is cut, recomputed or attended to, the numbers are those of one process.

These are some of scripts/parity.py's own runs; tests/launch/test_strategies.py has every YAML, and
the script itself all of them (results/README.md).
"""

import json

import pytest
from proof.jobs import CHECKPOINTING, CUT, EAGER, Run, all_runs, run_on_ranks
from proof.parity_table import measure

# YAML, ranks, rows per device, accumulation; the first has no padding at all
CUTS = [
    ("single", 1, 1, 12),
    ("ddp", 2, 6, 1),
    ("deepspeed_zero2", 2, 1, 6),
    ("fsdp2_full_shard", 4, 1, 3),
]
SHORT_FORM = [Run("cuts", *cut) for cut in CUTS]
SHORT_FORM += [
    run_on_ranks("strategies", "fsdp1_no_shard", 2),
    Run("checkpointing", "single", flags=CHECKPOINTING),
    run_on_ranks("checkpointing", "fsdp2_full_shard", 2, flags=CHECKPOINTING),
]
# ZeRO-0, whose engine steps before the first step
SHORT_FORM.append(run_on_ranks("bf16", "deepspeed_zero0", 2, precision="bf16"))
SHORT_FORM.append(Run("attention", "single", flags=EAGER))


@pytest.mark.parametrize("run", SHORT_FORM, ids=lambda run: f"{run.group}-{run.name}")
def test_the_numbers_are_those_of_one_process(run, tiny, one_process, tmp_path):
    assert run in all_runs()
    row = measure(run, tiny, tmp_path / "run", one_process(run.weights))
    assert row["verdict"] == "ok", row
    if run.group == "attention":
        text = (tmp_path / "run" / "run.json").read_text()
        summary = json.loads(text)["summary"]
        assert summary["kernels"] == "attention eager"


def test_a_rank_without_a_supervised_token_is_among_the_cuts(tiny):
    # 210 rows in windows of 12: the last window of an epoch has 6, two batches of 3 for four ranks
    text = (tiny / "data" / "train.jsonl").read_text()
    rows = len(text.splitlines())
    assert rows % 12 == 6 and CUT[4] == (3, 1)
    assert rows // 12 + 1 <= 20
