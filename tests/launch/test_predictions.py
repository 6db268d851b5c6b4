# SPDX-License-Identifier: Apache-2.0
"""--predict_with_generate asks what training showed, and a resumed run gives the same answers.

That ranks give the answers of one process, and that training is the same without them, is shown in
test_cells.py.
"""

import shutil

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import net
from launching import read_rows, script
from net import Cell

NUM_ROWS = 9
LONGEST = 12  # tokens
PREDICT = f"--predict_with_generate --num_predictions {NUM_ROWS} --generation_max_new_tokens"
RIDING = (*PREDICT.split(), str(LONGEST), "--metric_for_best_model", "exact_match")
CELL = Cell(riding=(*RIDING, "--report_to", "tensorboard", "--run_name", "board"))


@pytest.fixture(scope="module")
def finished(net_tiny, once):
    """The folder of a run in one process, with what it printed in the file "output"."""

    def launch(folder):
        done = net.launch(CELL, net_tiny("llama"), folder).expect(0)
        (folder / "output").write_text(done.output)

    return once("predictions", launch)


def test_each_row_is_answered_once_from_the_prompt_of_training(finished, net_tiny):
    rows = read_rows(net_tiny("llama") / "data" / "test.jsonl")
    answers = net.answers(finished)["predictions-2.jsonl"]
    numbers = [line["row"] for line in answers]
    assert len(set(numbers)) == NUM_ROWS and numbers == sorted(numbers)
    for line in answers:
        *_, question, answer = rows[line["row"] - 1]["messages"]
        assert line["reference"] == answer["content"]
        assert f"<|user|>{question['content']}<|" in line["prompt"]
        assert line["prompt"].endswith("<|assistant|>")
        # It says nothing of a conversation with two answers
        assert line["correct"] in (None, line["answer"] == line["reference"])
    assert len({line["answer"] for line in answers}) > 2  # Not one answer for all


def test_the_answers_of_the_best_model_are_those_of_the_folder(finished, net_tiny, tmp_path):
    """scripts/generate.py renders the prompts by itself, without a row's answer."""
    words = ["--file", net_tiny("llama") / "data" / "test.jsonl", "--max_new_tokens", LONGEST]
    words += ["--output", tmp_path / "answers.jsonl"]
    script("generate", finished, *words, code=0)
    expected = [line["answer"] for line in read_rows(tmp_path / "answers.jsonl")]
    evaluations = {line["step"]: line for line in net.metrics(finished) if "eval_loss" in line}
    best = max(evaluations, key=lambda step: evaluations[step]["eval_exact_match"])
    for line in net.answers(finished)[f"predictions-{best}.jsonl"]:
        assert line["answer"] == expected[line["row"] - 1]


def test_a_resumed_run_writes_the_same_answers_and_shows_them(finished, net_tiny, tmp_path):
    assert (finished / "output").read_text().count("(should be: ") == 3 * 4  # In each evaluation
    board = EventAccumulator(str(finished / "board"))
    board.Reload()
    shown = board.Tensors("predictions/text_summary")
    assert [event.step for event in shown] == [2, 4, 6, 8]
    before = net.answers(finished)
    assert before["predictions-8.jsonl"][0]["reference"] in str(shown[-1].tensor_proto)
    losses = [line["loss"] for line in net.metrics(finished) if "loss" in line]
    assert [event.value for event in board.Scalars("loss")] == pytest.approx(losses, rel=1e-6)

    folder = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(folder / "checkpoint-8")  # As if it had been killed before
    (folder / "model.safetensors").unlink()
    (folder / "predictions-8.jsonl").write_text("half a li")
    (folder / "predictions-10.jsonl").write_text("of an earlier, longer run")
    done = net.launch(CELL, net_tiny("llama"), folder).expect(0)
    assert "Continuing from" in done.output
    assert net.answers(folder) == before
