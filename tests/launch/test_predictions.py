# SPDX-License-Identifier: Apache-2.0
"""A resumed run gives the same answers to --predict_with_generate, and shows them.

That each row is asked as it was trained on, that ranks give the answers of one process, and that
training is the same without them, is shown in test_cells.py; that generate.py gives the same ones,
in test_wild_answers.py.
"""

import shutil

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import net
from net import Cell

RIDING = (
    *("--predict_with_generate", "--num_predictions", "9", "--generation_max_new_tokens", "12"),
    *("--metric_for_best_model", "exact_match"),
    *("--report_to", "tensorboard", "--run_name", "board"),
)


def test_a_resumed_run_writes_the_same_answers_and_shows_them(net_tiny, tmp_path):
    cell, folder = Cell(riding=RIDING), tmp_path / "run"
    done = net.launch(cell, net_tiny("llama"), folder).expect(0)
    assert done.output.count("(should be: ") == 3 * 4  # In each evaluation
    board = EventAccumulator(str(folder / "board"))
    board.Reload()
    shown = board.Tensors("predictions/text_summary")
    assert [event.step for event in shown] == [2, 4, 6, 8]
    before = net.answers(folder)
    assert before["predictions-8.jsonl"][0]["reference"] in str(shown[-1].tensor_proto)
    losses = [line["loss"] for line in net.metrics(folder) if "loss" in line]
    assert [event.value for event in board.Scalars("loss")] == pytest.approx(losses, rel=1e-6)

    shutil.rmtree(folder / "checkpoint-8")  # As if it had been killed before
    (folder / "model.safetensors").unlink()
    (folder / "predictions-8.jsonl").write_text("half a li")
    (folder / "predictions-10.jsonl").write_text("of an earlier, longer run")
    done = net.launch(cell, net_tiny("llama"), folder).expect(0)
    assert "Continuing from" in done.output
    assert net.answers(folder) == before
