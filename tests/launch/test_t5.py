# SPDX-License-Identifier: Apache-2.0
"""recipes/t5.py: ranks agree on texts, and without texts it evaluates the loss.

Other numbers are in test_cells.py, bad rows in test_refusals.py.
"""

import json

import net
from net import Cell

# It learns to write texts, which are not yet right
LEARNING = (
    *("--learning_rate", "3e-3", "--max_steps", "20", "--num_train_epochs", "6"),
    *("--eval_steps", "20", "--save_steps", "20"),
)


def texts_of(folder):
    lines = (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_two_ranks_write_the_texts_of_one_process(net_tiny, tmp_path):
    """Under FSDP1, where generation needs gathered what is in no layer."""
    tiny = net_tiny("t5")
    found = []
    for cell in (
        Cell(recipe="t5", flags=LEARNING),
        Cell("fsdp1_full_shard", recipe="t5", flags=LEARNING, ranks=2),
    ):
        folder = net.launch(cell, tiny, tmp_path / cell.config).expect(0).folder
        scores = [line for line in net.figures(folder) if "eval_bleu" in line]
        for line in scores:
            line.pop("eval_loss")  # It differs by the rounding of sums
        found.append((texts_of(folder), scores))
    assert found[0] == found[1]
    texts, _ = found[0]
    assert [line["row"] for line in texts] == list(range(1, 13))
    assert len({line["prediction"] for line in texts}) > 3  # Not one text for all


def test_without_texts_it_trains_adapters_and_evaluates_the_loss(net_tiny, tmp_path):
    cell = Cell(recipe="t5", weights="LoRA", flags=("--no_predict_with_generate",))
    folder = net.launch(cell, net_tiny("t5"), tmp_path / "run").expect(0).folder
    evaluated = next(line for line in net.metrics(folder) if "eval_loss" in line)
    assert not [name for name in evaluated if "rouge" in name or "bleu" in name]
    assert not (folder / "predictions.jsonl").exists()
    assert not (folder / "README.md").exists()  # peft's own has no word of this model
