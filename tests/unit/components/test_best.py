# SPDX-License-Identifier: Apache-2.0
"""Which evaluation is the best, and that its checkpoint is never deleted."""

import dataclasses

import pytest
import torch

from components import checkpoint
from components.best import (
    BestEvaluation,
    find_best_model_conflicts,
    is_better,
    is_greater_better,
    metric_name,
)
from example_arguments import language_model_arguments
from proof.damage import publish


def arguments(*flags):
    return language_model_arguments("--load_best_model_at_end", *flags)


@pytest.mark.parametrize(
    ("metric", "greater"),
    [
        ("loss", False),
        ("eval_loss", False),
        ("eval_perplexity", False),
        ("mse", False),
        ("accuracy", True),
        ("rewards/accuracies", True),
    ],
)
def test_the_direction_follows_from_the_name_unless_it_is_given(metric, greater):
    assert is_greater_better(arguments("--metric_for_best_model", metric)) == greater
    for given in (True, False):
        words = ["--metric_for_best_model", metric, "--greater_is_better", str(given).lower()]
        assert is_greater_better(arguments(*words)) == given


def test_a_metric_may_be_named_without_its_prefix():
    assert metric_name(arguments()) == "eval_loss"
    assert metric_name(arguments("--metric_for_best_model", "eval_f1")) == "eval_f1"


def test_only_what_is_strictly_better_replaces_the_best():
    best = BestEvaluation(3, "eval_loss", 2.0)
    assert is_better(1.9, best, arguments()) and is_better(9.0, None, arguments())
    assert not is_better(2.0, best, arguments()) and not is_better(2.1, best, arguments())
    assert is_better(2.1, best, arguments("--metric_for_best_model", "accuracy"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_never_the_best(value):
    assert not is_better(value, None, arguments())


def test_a_checkpoint_says_which_is_the_best_so_far_by_the_same_metric():
    best = BestEvaluation(3, "eval_loss", 2.0)
    saved = {"best": dataclasses.asdict(best)}
    assert BestEvaluation.of_progress(saved, arguments()) == best
    other = arguments("--metric_for_best_model", "perplexity")
    assert BestEvaluation.of_progress(saved, other) is None
    assert BestEvaluation.of_progress(saved, language_model_arguments()) is None
    assert BestEvaluation.of_progress({}, arguments()) is None


def test_what_would_have_no_effect_is_refused():
    assert list(find_best_model_conflicts(arguments())) == []
    (problem,) = find_best_model_conflicts(arguments("--eval_strategy", "no"))
    assert "--eval_strategy no makes none: use steps or epoch" in problem
    (problem,) = find_best_model_conflicts(
        language_model_arguments("--metric_for_best_model", "accuracy")
    )
    assert problem.endswith("without --load_best_model_at_end: add it")


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path):
    state = {"weight": torch.zeros(2)}
    for step in range(1, 6):
        publish(tmp_path, [state], {"step": step}, limit=1, kept_step=2)
    assert list(checkpoint.checkpoints_in(tmp_path)) == [5, 2]
    publish(tmp_path, [state], {"step": 6}, limit=1, kept_step=6)
    assert list(checkpoint.checkpoints_in(tmp_path)) == [6]
