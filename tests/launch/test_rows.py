# SPDX-License-Identifier: Apache-2.0
"""Rows that several processes prepare are those that one prepares; columns have any names."""

import json
import sys
from dataclasses import replace

import datasets
import pytest

from components.mixture import read_splits
from example_arguments import MixtureFlags
from launching import REPO, read_json, read_metrics, recipe, rehearse, run
from row_files import GOOD, row

LINES = [GOOD, "{", "", GOOD, GOOD, row("a", 5), GOOD, "[]", GOOD]


def answer_of(row):
    if not isinstance(row["completion"], str):
        raise ValueError(f"has no text: {row['completion']}")
    return {"answer": row["completion"]}


def test_two_processes_find_the_same_rows(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_bytes("\r\n".join(LINES).encode())
    args = MixtureFlags([str(path)])
    messages = []
    for num_proc in (None, 2):
        cache = tmp_path / f"cache of {num_proc}"
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        with pytest.raises(SystemExit, match="65"):
            read_splits(replace(args, dataset_num_proc=num_proc), answer_of, evaluate=False)
        printed = capsys.readouterr().err.splitlines()
        messages.append([line for line in printed if line.startswith("error: ")])
    assert messages[0] == messages[1] and "line 8: " in messages[0][2]
    args = replace(args, dataset_num_proc=2, skip_bad_rows=True)
    rows, _ = read_splits(args, answer_of, evaluate=False)
    assert rows.dataset["row"][:].tolist() == [1, 4, 5, 7, 9]
    assert rows.dataset["answer"][:].tolist() == ["l-a-m-p"] * 5
    assert " 3 left out" in rows.notes


def test_a_run_on_ones_own_columns_holds_rows_out_and_continues_only_as_it_began(tiny, tmp_path):
    rows = [{"frage": f"{number} + 1?", "antwort": str(number + 1)} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    call = ["--model_name_or_path", tiny / "model", "--dataset_name", tmp_path / "rows.jsonl"]
    call += ["--output_dir", tmp_path / "run", "--save_steps", 1, "--max_steps", 2]
    columns = ["--columns", "prompt=frage", "completion=antwort"]
    done = recipe(*call, *columns, "--eval_split", 0.1)
    assert done.returncode == 0, done.output
    assert "20, 0 truncated to --max_length, 0 left out; 2 of these are held out" in " ".join(
        done.output.split()
    )
    assert (
        "2 held out of the training rows" in done.output
        and "eval_loss" in (tmp_path / "run" / "metrics.jsonl").read_text()
    )
    answers = ["--file", tmp_path / "rows.jsonl", "--limit", 3, "--max_new_tokens", 4]
    answered = run(sys.executable, REPO / "scripts" / "generate.py", tmp_path / "run", *answers)
    assert answered.returncode == 0, answered.output  # read by the columns that the run names
    assert "/3)" in answered.output.splitlines()[-1]
    again = recipe(*call, *columns, "--eval_split", 0.1)
    assert again.returncode == 0, again.output
    swapped = ["--columns", "prompt=antwort", "completion=frage"]
    other = recipe(*call, *swapped, "--eval_split", 0.2)
    assert other.returncode == 64, other.output
    assert "had other values of" in other.output
    assert "columns" in other.output and "eval_split" in other.output


def test_two_ranks_hold_out_the_rows_that_one_process_does_and_evaluate_on_each_once(
    tiny, tmp_path
):
    lines = (tiny / "data" / "train.jsonl").read_text().splitlines()[:100]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    words = ["--model_name_or_path", tiny / "model", "--dataset_name", tmp_path / "rows.jsonl"]
    words += ["--eval_split", 0.05, "--max_steps", 4, "--learning_rate", "1e-3"]
    words += ["--eval_strategy", "steps", "--eval_steps", 2]
    one, two = tmp_path / "one", tmp_path / "two"
    alone = recipe(*words, "--per_device_train_batch_size", 8, "--output_dir", one)
    assert alone.returncode == 0, alone.output[-3000:]
    # Five rows in batches of two: the last one has a rank of its own, and a single row
    ranks = ["--per_device_train_batch_size", 4, "--per_device_eval_batch_size", 2]
    done = rehearse("ddp", *words, *ranks, "--output_dir", two, num_processes=2)
    assert done.returncode == 0, done.output[-3000:]

    assert "5 held out of the training rows (--eval_split)" in done.output
    # A hash of the rows that are left to train on
    assert read_json(one / "run.json")["data"] == read_json(two / "run.json")["data"]
    (steps, evaluations), (steps_of_one, evaluations_of_one) = map(read_metrics, (two, one))
    assert len(steps) == 4 and len(evaluations) == 2
    for ours, theirs in zip(steps, steps_of_one, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    for ours, theirs in zip(evaluations, evaluations_of_one, strict=True):
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-6)


def test_a_mixture_is_counted_in_the_summary_and_continues_as_it_began(tiny, tmp_path):
    lines = (tiny / "data" / "train.jsonl").read_text().splitlines()
    (tmp_path / "many.jsonl").write_text("\n".join(lines[:60]))
    (tmp_path / "few.jsonl").write_text("\n".join(lines[60:80]))
    call = ["--model_name_or_path", tiny / "model", "--per_device_train_batch_size", 4]
    call += ["--dataset_name", tmp_path / "many.jsonl", tmp_path / "few.jsonl"]
    call += ["--dataset_weights", 1, 1, "--save_steps", 2, "--max_steps", 4]
    call += ["--logging_steps", 1, "--lr_scheduler_type", "constant"]
    whole = recipe(*call, "--output_dir", tmp_path / "whole")
    assert whole.returncode == 0, whole.output
    shown = "".join(whole.output.split())
    assert "mixed1:1:40ofthe60rowsof" in shown and "each2times" in shown
    part = [*call, "--output_dir", tmp_path / "part"]
    assert recipe(*part, "--max_steps", 2, "--allow_change", "max_steps").returncode == 0
    again = recipe(*part, "--allow_change", "max_steps")
    assert again.returncode == 0 and "checkpoint-2" in again.output, again.output
    losses = []
    for name in ("whole", "part"):
        steps, _ = read_metrics(tmp_path / name)
        losses.append([line["loss"] for line in steps])
    assert losses[0] == losses[1] and len(losses[0]) == 4
    other = recipe(*part, "--dataset_weights", 3, 1)
    assert other.returncode == 64 and "dataset_weights" in other.output, other.output


def test_weights_that_cannot_be_meant_are_refused(tmp_path):
    done = recipe("--dataset_name", "a.jsonl", "b.jsonl", "--dataset_weights", 1, 0, 2)
    assert done.returncode == 64, done.output
    assert "--dataset_weights 1 0 2: give one for each of the 2 data sets" in done.output
    assert "each must be above 0" in done.output
