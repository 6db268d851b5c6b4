# SPDX-License-Identifier: Apache-2.0
"""Runs are named by what differs: their folders, and their settings."""

import pytest

from plotting.labels import differences, labels_of, names_of, setting_text, shortened
from plotting.runs import RecordedRun
from recorded_runs import recorded


def named(*folders):
    return names_of([recorded(folder=folder) for folder in folders])


def test_a_run_is_named_by_what_differs_in_its_path():
    assert named("runs/a/run", "runs/b/run") == ["a", "b"]
    assert named("runs/a", "runs/a/run") == ["a", "a/run"]
    assert named("runs/a") == ["runs/a"]


def test_a_label_says_in_which_arguments_runs_differ():
    first = recorded(folder="x/a", learning_rate=1e-3, seed=1, output_dir="x/a")
    second = recorded(folder="x/b", learning_rate=2e-5, seed=1, output_dir="x/b")
    assert labels_of([first, second]) == ["a: learning_rate=0.001", "b: learning_rate=2e-05"]


def test_a_label_says_which_strategy_and_precision_a_run_had():
    runs = []
    for strategy, precision in (("DDP, 2 x cpu", "no"), ("FSDP2, 2 x cpu", "bf16")):
        facts = {
            "summary": {"strategy": strategy},
            "launch": {"ACCELERATE_MIXED_PRECISION": precision},
        }
        runs.append(RecordedRun(strategy, [], [], facts))
    (first, second) = differences(runs)
    assert first == {"strategy": "DDP, 2 x cpu", "mixed_precision": "no"}
    assert second == {"strategy": "FSDP2, 2 x cpu", "mixed_precision": "bf16"}
    assert labels_of(runs)[1] == "FSDP2, 2 x cpu: FSDP2, 2 x cpu, mixed_precision=bf16"


def test_an_argument_that_only_one_recipe_has_differs():
    (first, second) = differences([recorded(beta=0.1, seed=1), recorded(seed=1)])
    assert first == {"beta": 0.1} and second == {}


def test_a_run_without_run_json_has_its_folder_as_its_name():
    runs = [recorded(folder="x/a"), recorded(folder="x/b", seed=1), recorded(folder="x/c", seed=2)]
    assert labels_of(runs) == ["a", "b: seed=1", "c: seed=2"]


def test_a_label_of_many_settings_is_only_the_folder():
    one = {"seed": 1, "lora_r": 1, "learning_rate": 1.0, "weight_decay": 1.0}
    other = {name: 2 * value for name, value in one.items()}
    assert labels_of([recorded(folder="a", **one), recorded(folder="b", **other)]) == ["a", "b"]


def test_one_run_needs_no_label():
    assert labels_of([recorded(seed=1)]) == [""]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-3, "x=0.001"),
        (True, "x=true"),
        (None, "x=null"),
        (["a.jsonl", "b.jsonl"], "x=a.jsonl,b.jsonl"),
        ("two\nlines", "x=two lines"),
    ],
)
def test_a_setting_is_one_line(value, text):
    assert setting_text("x", value) == text


def test_a_long_name_loses_its_middle():
    assert shortened("abcdefghij", 7) == "abc…hij"
    assert shortened("abcdefg", 7) == "abcdefg"
