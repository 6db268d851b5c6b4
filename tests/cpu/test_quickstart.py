"""`make quickstart` teaches a tiny model, offline and on a CPU, and the result can be asked."""

import json
import sys
from pathlib import Path

import pytest
from launching import REPO, read_metrics, run


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """The folder of one quick start, in the environment that runs the tests."""
    out, venv = tmp_path_factory.mktemp("quickstart"), Path(sys.prefix)
    (venv / ".installed").touch()  # the tests' environment holds what the quick start would install
    done = run("make", "quickstart", f"VENV={venv}", f"OUT={out}", "THREADS=1", timeout=900)
    assert done.returncode == 0, done.output[-4000:]
    return out, done.output


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
