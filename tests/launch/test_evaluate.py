# SPDX-License-Identifier: Apache-2.0
"""scripts/evaluate.py in front of lm-eval: what the recipes trained, before and after, offline."""

import pytest

import net
from launching import read_json, script
from net import Cell

LONGEST = ("--max_new_tokens", 16)
# It learns, and the last model is the result
FLAGS = ("--learning_rate", "5e-3", "--greater_is_better", "false")


def test_runs_are_evaluated_beside_their_base(net_tiny, tmp_path):
    tiny, out = net_tiny("llama"), tmp_path / "out"
    trained = net.launch(Cell(weights="LoRA", flags=FLAGS), tiny, tmp_path / "run").expect(0)
    rows = tiny / "data" / "test.jsonl"
    words = [trained.folder, "--with_base", "--rows", rows, *LONGEST, "--output_dir", out]
    done = script("evaluate", *words, code=0)
    results = read_json(out / "results.json")
    before, after = results["models"]
    assert results["complete"] and before["name"] == after["before"] == str(tiny / "model")
    assert (out / "results.md").read_text() in done.output

    # The recipe's own loss of the same rows; test_wild_answers.py has the answers
    metrics = after["tasks"]["test"]["metrics"]
    losses = [line["eval_loss"] for line in net.metrics(trained.folder) if "eval_loss" in line]
    assert metrics["loss"]["value"] == pytest.approx(min(losses), abs=1e-5)
    assert metrics["loss"]["difference"] < -0.1
