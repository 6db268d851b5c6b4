# SPDX-License-Identifier: Apache-2.0
"""scripts/evaluate.py in front of lm-eval: what the recipes trained, before and after, offline."""

import json
import os
import sys

import pytest

from launching import REPO, read_json, read_metrics, run

LONGEST = ("--max_new_tokens", 16)


def script(name, *arguments, **options):
    return run(sys.executable, REPO / "scripts" / name, *arguments, **options)


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("weights", ["full", "LoRA"])
def test_runs_are_evaluated_beside_their_base(weights, one_process, tiny, tmp_path):
    trained = one_process(weights)
    rows = tiny / "data" / "test.jsonl"
    out = tmp_path / "out"
    done = script(
        "evaluate.py", trained, "--with_base", "--rows", rows, *LONGEST, "--output_dir", out
    )
    assert done.returncode == 0, done.output
    answers = tmp_path / "answers.jsonl"
    asked = script("generate.py", trained, "--file", rows, *LONGEST, "--output", answers)
    assert asked.returncode == 0, asked.output

    assert "difference from" in done.output and "Running" not in done.output
    assert (out / "results.md").read_text() in done.output
    results = read_json(out / "results.json")
    before, after = results["models"]
    assert results["complete"] and before["name"] == after["before"] == str(tiny / "model")
    assert all(after["sha256"].values()) and len(results["settings"]["sha256_of_rows"]) == 64

    # The recipe's own loss of the same rows, and the answers of generate.py
    metrics = after["tasks"]["test"]["metrics"]
    _, evaluations = read_metrics(trained)
    assert metrics["loss"]["value"] == pytest.approx(evaluations[-1]["eval_loss"], abs=1e-5)
    assert metrics["loss"]["difference"]["value"] < -1
    expected = read_lines(answers)
    (folder,) = (out / "samples").glob(f"*{trained.name}")
    samples = read_lines(folder / "test.jsonl")
    assert [one["answer"] for one in samples] == [one["answer"] for one in expected]
    share = sum(one["correct"] for one in expected) / len(expected)
    assert metrics["exact_match"]["value"] == share
    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")


def test_bad_rows_end_with_their_file_and_line(one_process, tmp_path):
    rows = tmp_path / "bad.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n{"prompt"\n')
    done = script(
        "evaluate.py", one_process("full"), "--rows", rows, "--output_dir", tmp_path / "out"
    )
    assert done.returncode == 65 and len(done.output.splitlines()) == 1
    assert f"{rows}, line 2" in done.output


def test_a_task_of_the_hub_out_of_reach_ends_in_one_line(one_process, tmp_path):
    done = script(
        "evaluate.py", one_process("full"), "--tasks", "gsm8k", "--output_dir", tmp_path / "out"
    )
    assert done.returncode == 69 and len(done.output.splitlines()) == 1, done.output
    assert "gsm8k" in done.output


@pytest.mark.cold("a module that was imported warm would not be missing")
def test_without_lm_eval_the_fix_is_named(tmp_path):
    (tmp_path / "lm_eval.py").write_text("raise ModuleNotFoundError(name='lm_eval')\n")
    words = ["runs/none", "--rows", "x.jsonl"]
    done = script("evaluate.py", *words, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 64 and done.output.count("\n") == 1, done.output
    assert "pip install -r requirements-eval.txt" in done.output
