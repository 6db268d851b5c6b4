# SPDX-License-Identifier: Apache-2.0
"""`make quickstart` teaches a tiny model, offline and on a CPU, and the trained model answers."""

import json
import re
import sys

from launching import REPO, quickstart, read_metrics, run


def test_llama_learns_its_skills_and_answers(tmp_path):
    output = quickstart("llama", tmp_path)
    assert output.count("exact match: ") == 2
    assert "Warning: " not in output  # from any library
    assert set(re.findall(r"[\x00-\x1f\x7f-\x9f]", output)) <= {"\n", "\r", "\t"}
    before, after = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("before", "after")
    )
    assert before["exact_match"] < 0.2 and after["exact_match"] >= 0.9
    steps, evaluations = read_metrics(tmp_path / "run")
    assert len(evaluations) == 2 and evaluations[-1]["eval_loss"] < 0.1
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["arguments"]["learning_rate"] == 2e-3 and len(record["data"]) == 32
    assert {"torch", "accelerate", "transformers"} <= set(record["versions"])
    prompt = ["--prompt", "Spell the word tiger."]
    done = run(sys.executable, REPO / "scripts" / "generate.py", tmp_path / "run", *prompt)
    assert done.returncode == 0 and "t-i-g-e-r" in done.output


def test_bert_ner_learns_to_find_names(tmp_path):
    output = quickstart("bert_ner", tmp_path)
    _, (before, *_, after) = read_metrics(tmp_path / "run")
    assert before["step"] == 0 and before["eval_f1"] < 0.3 and after["eval_f1"] >= 0.9
    assert "brod lamo works for frim -> [('brod lamo', 'PER'), ('frim', 'ORG')]" in output
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_bert_learns_to_tell_reviews(tmp_path):
    output = quickstart("bert", tmp_path)
    _, (before, *_, after) = read_metrics(tmp_path / "run")
    assert before["step"] == 0 and before["eval_accuracy"] < 0.6 and after["eval_accuracy"] >= 0.9
    assert "the soup was very good -> {'label': 'positive'" in output
    assert "the soup was not very good -> {'label': 'negative'" in output
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
