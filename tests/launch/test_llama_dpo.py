# SPDX-License-Identifier: Apache-2.0
"""recipes/llama_dpo.py: it learns to prefer, a resumed run reads its reference.

The numbers of ranks and adapters are in test_cells.py, those of TRL in test_dpo_trainer_parity.py.
"""

import net
from net import Cell

ONE = Cell(recipe="llama_dpo", flags=("--learning_rate", "1e-3"))
TWO = Cell("fsdp2_full_shard", "llama_dpo", ranks=2, flags=ONE.flags)


def test_it_learns_to_prefer_and_a_resumed_run_reads_its_reference(net_tiny, tmp_path):
    """Not the model that is trained, which is another one after the first step."""
    tiny, folder = net_tiny("llama_dpo"), tmp_path / "run"
    stop = {"at": "step 4", "do": "SIGTERM"}
    net.launch(ONE, tiny, folder, inject=stop).expect(75)
    assert len(list(folder.glob("reference-*.table"))) == 1
    done = net.launch(TWO, tiny, folder).expect(0)
    assert "Continuing from" in done.output and "Reference:" not in done.output
    lines = net.metrics(folder)
    evaluations = [line for line in lines if "eval_loss" in line]
    assert evaluations[-1]["eval_loss"] < 0.6 < abs(lines[0]["loss"])
    assert evaluations[-1]["eval_rewards/accuracies"] > 0.6  # Chance is a half
