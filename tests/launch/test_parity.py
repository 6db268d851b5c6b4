"""However a global batch is cut, recomputed or attended to, the numbers are those of one process:
scripts/parity.py's own runs, in short; tests/launch/test_strategies.py has every YAML, and the
script itself all of them (results/README.md).
"""

import json

import pytest

from proof.jobs import CUT, Run, all_runs
from proof.parity_table import measure

SHORT_FORM = [
    Run("strategies", "fsdp1_no_shard", 2, 3, 2),  # without adapters: not there on 2 ranks
    Run("cuts", "single", 1, 1, 12),  # no padding at all
    Run("cuts", "ddp", 2, 6, 1),
    Run("cuts", "deepspeed_zero2", 2, 1, 6),
    Run("cuts", "fsdp2_full_shard", 4, 1, 3),
    Run("checkpointing", "single", flags=("--gradient_checkpointing",)),
    Run("checkpointing", "fsdp2_full_shard", 2, 3, 2, flags=("--gradient_checkpointing",)),
    Run(
        "bf16", "deepspeed_zero0", 2, 3, 2, precision="bf16"
    ),  # its engine steps before the first step
    Run("attention", "single", flags=("--attn_implementation", "eager")),
]


@pytest.mark.parametrize("run", SHORT_FORM, ids=lambda run: f"{run.group}-{run.name}")
def test_the_numbers_are_those_of_one_process(run, tiny, one_process, tmp_path):
    assert run in all_runs()
    row = measure(run, tiny, tmp_path / "run", one_process(run.weights))
    assert row["verdict"] == "ok", row
    if run.group == "attention":
        assert (
            json.loads((tmp_path / "run" / "run.json").read_text())["summary"]["kernels"]
            == "attention eager"
        )


def test_a_rank_without_a_supervised_token_is_among_the_cuts(tiny):
    # 210 rows in windows of 12: the last window of an epoch has 6, two batches of 3 for four ranks
    rows = len((tiny / "data" / "train.jsonl").read_text().splitlines())
    assert rows % 12 == 6 and CUT[4] == (3, 1) and rows // 12 + 1 <= 20
