# SPDX-License-Identifier: Apache-2.0
"""What evaluate.py does with its command line, before and after the models are asked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launching import REPO, write_rows

# The command's folder is first on the path, as Python puts it there
PROGRAM = """
import sys
sys.path.insert(0, "scripts")
from argparse import Namespace
from evaluation import harness
harness.prepare(Namespace(tasks="own.yaml", confirm_run_unsafe_code=False))
import evaluate
try:
    evaluate.load("squad_v2")
except (ConnectionError, FileNotFoundError):
    print(evaluate.__file__)
"""
PAIR = {"prompt": "Spell the word lamp.", "completion": "l-a-m-p"}


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


def test_own_tasks_are_asked_beside_rows(evaluate, adapters, tmp_path, capsys):
    lines = [
        {"question": "2 + 2 =", "choices": ["3", "4"], "right": place % 2} for place in range(6)
    ]
    data = write_rows(tmp_path / "data.jsonl", lines)
    pair = write_rows(tmp_path / "rows.jsonl", [PAIR])
    task = tmp_path / "sums.yaml"
    task.write_text(
        f"task: sums\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: right\n"
    )
    options = ["--max_new_tokens", 4, "--output_dir", "out", "--limit", 4]
    tasks = ["--tasks", task, "--num_fewshot", 1]
    evaluate(adapters, "--with_base", "--rows", pair, *tasks, *options)
    results = json.loads(Path("out/results.json").read_text())
    before, after = [model["tasks"] for model in results["models"]]
    assert list(before) == list(after) == ["rows", "sums"]
    # The choices are the same in each row, so the likeliest one is right in half of the rows
    assert after["sums"]["metrics"]["acc"]["value"] == 0.5
    assert after["sums"]["rows"] == 4 and after["sums"]["chat_template"] is True
    assert after["sums"]["num_fewshot"] == 1 and after["rows"]["rows"] == 1
    assert len(list(Path("out/samples").glob("*/sums.jsonl"))) == 2
    assert "| sums | acc " in capsys.readouterr().out


def test_lm_eval_gets_the_package_evaluate_and_no_code_of_the_hub():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    assert "site-packages" in done.stdout
