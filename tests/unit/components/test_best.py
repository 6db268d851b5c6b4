# SPDX-License-Identifier: Apache-2.0
"""Which evaluation is the best, and that its checkpoint is never deleted."""

import pytest

from components.best import (
    BestEvaluation,
    is_better,
    is_greater_better,
)
from example_arguments import language_model_arguments


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


def test_only_what_is_strictly_better_replaces_the_best():
    best = BestEvaluation(3, "eval_loss", 2.0)
    assert is_better(1.9, best, arguments()) and is_better(9.0, None, arguments())
    assert not is_better(2.0, best, arguments()) and not is_better(2.1, best, arguments())
    assert is_better(2.1, best, arguments("--metric_for_best_model", "accuracy"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_never_the_best(value):
    assert not is_better(value, None, arguments())
