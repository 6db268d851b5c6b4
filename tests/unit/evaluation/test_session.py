# SPDX-License-Identifier: Apache-2.0
"""What evaluate.py does with its command line, before and after the models are asked."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from launching import REPO

PAIR = {"prompt": "Spell the word lamp.", "completion": "l-a-m-p"}
SHORT = ("--max_new_tokens", 4, "--output_dir", "out")


@pytest.fixture
def evaluate(monkeypatch, tmp_path):
    """A function that carries out a command line of evaluate.py in this process."""
    from evaluation import session

    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "evaluate", raising=False)
    monkeypatch.syspath_prepend(REPO / "scripts")
    import evaluate as command

    def carry_out(*words):
        words = [str(word) for word in words]
        monkeypatch.setattr(sys, "argv", ["scripts/evaluate.py", *words])
        session.run(command.parse_args())

    return carry_out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give --rows, --tasks or both"),
        (["--rows", "x.jsonl", "--limit", "0"], "--limit: must be at least 1"),
        (["--tasks", "gsm8k", "--num_fewshot", "-1"], "--num_fewshot must be at least 0"),
        (["--rows", "x.jsonl", "--num_fewshot", "1"], "--num_fewshot needs --tasks"),
        (["--rows", "x.jsonl", "--include_path", "."], "--include_path needs --tasks"),
        (["--tasks", "a", "--answer_pattern", "(a)"], "--answer_pattern needs --rows"),
        (["--rows", "x.jsonl", "--answer_pattern", "a"], "put (...) around"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(words, says, evaluate, refused):
    code, line = refused(evaluate, "runs/none", *words)
    assert code == 64 and says in line


def test_rows_need_a_chat_template(evaluate, refused, write_rows, base, tmp_path):
    folder = tmp_path / "plain"
    shutil.copytree(base / "model", folder)
    (folder / "chat_template.jinja").unlink()
    code, line = refused(evaluate, folder, "--rows", write_rows(PAIR))
    assert code == 65 and "no chat template" in line


def test_own_tasks_are_asked_beside_rows(evaluate, adapters, write_rows, tmp_path, capsys):
    lines = [
        {"question": "2 + 2 =", "choices": ["3", "4"], "right": place % 2} for place in range(6)
    ]
    data = write_rows(*lines, name="data.jsonl")
    task = tmp_path / "sums.yaml"
    task.write_text(
        f"task: sums\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: right\n"
    )
    options = ["--max_new_tokens", 4, "--output_dir", "out", "--log_samples", "--limit", 4]
    tasks = ["--tasks", task, "--num_fewshot", 1]
    evaluate(adapters, "--with_base", "--rows", write_rows(PAIR), *tasks, *options)
    results = json.loads(Path("out/results.json").read_text())
    before, after = [model["tasks"] for model in results["models"]]
    assert list(before) == list(after) == ["rows", "sums"]
    # The choices are the same in each row, so the likeliest one is right in half of the rows
    assert after["sums"]["metrics"]["acc"]["value"] == 0.5
    assert after["sums"]["rows"] == 4 and after["sums"]["chat_template"] is True
    assert after["sums"]["num_fewshot"] == 1 and after["rows"]["rows"] == 1
    assert len(list(Path("out/samples").glob("*/sums.jsonl"))) == 2
    assert "| sums | acc " in capsys.readouterr().out


# ---- What goes wrong while models are asked ----
def test_too_little_memory_names_the_flag(evaluate, adapters, write_rows, monkeypatch, capsys):
    from evaluation import session

    original = session.measure

    def measure(args, contestant, *rest):
        if contestant.before is not None:  # The second model
            raise torch.OutOfMemoryError
        return original(args, contestant, *rest)

    monkeypatch.setattr(session, "measure", measure)
    with pytest.raises(SystemExit) as ended:
        evaluate(adapters, "--with_base", "--rows", write_rows(PAIR), *SHORT)
    assert ended.value.code == 64
    assert "a smaller --batch_size than 32" in capsys.readouterr().err.splitlines()[-1]
    results = json.loads(Path("out/results.json").read_text())
    assert len(results["models"]) == 1 and results["complete"] is False
