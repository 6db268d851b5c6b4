"""`make quickstart` teaches a tiny model, offline and on a CPU, and the result can be asked."""

import json
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from launching import REPO, read_metrics, run


@pytest.fixture(scope="session")
def quickstart_of(shared_tmp):
    """A function from a recipe to the folder of its quick start and what it printed, run once a test run in the
    environment of the tests."""

    def run_once(recipe):
        out, venv = shared_tmp / f"quickstart_{recipe}", Path(sys.prefix)
        with FileLock(f"{out}.lock"):
            if not (out / "output").exists():
                (venv / ".installed").touch()  # the tests' environment holds what the quick start would install
                words = [f"RECIPE={recipe}", f"VENV={venv}", f"OUT={out}", "THREADS=1"]
                done = run("make", "quickstart", *words, timeout=900)
                assert done.returncode == 0, done.output[-4000:]
                (out / "output").write_text(done.output)
        return out, (out / "output").read_text()

    return run_once


@pytest.fixture
def quickstart(quickstart_of):
    return quickstart_of("llama")


def test_the_model_learns_its_skills(quickstart):
    out, output = quickstart
    before, after = (json.loads((out / f"{name}.json").read_text()) for name in ("before", "after"))
    assert before["exact_match"] < 0.2 and after["exact_match"] >= 0.9
    assert output.count("exact match: ") == 2
    steps, evaluations = read_metrics(out / "run")
    assert len(evaluations) == 3 and evaluations[-1]["eval_loss"] < 0.1


def test_it_leaves_a_picture_and_a_record(quickstart):
    out, _ = quickstart
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((out / "run" / "run.json").read_text())
    assert record["arguments"]["learning_rate"] == 2e-3 and len(record["data"]) == 32
    assert {"torch", "accelerate", "transformers"} <= set(record["versions"])


def test_the_model_answers_a_prompt(quickstart):
    out, _ = quickstart
    done = run(sys.executable, REPO / "scripts" / "generate.py", out / "run", "--prompt", "Spell the word tiger.")
    assert done.returncode == 0 and "t-i-g-e-r" in done.output


def test_bert_learns_to_tell_reviews(quickstart_of):
    out, output = quickstart_of("bert")
    _, (before, *_, after) = read_metrics(out / "run")
    assert before["step"] == 0 and before["eval_accuracy"] < 0.6 and after["eval_accuracy"] >= 0.9
    assert "the soup was very good -> {'label': 'positive'" in output
    assert "the soup was not very good -> {'label': 'negative'" in output
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
