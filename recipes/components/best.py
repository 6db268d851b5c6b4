# SPDX-License-Identifier: Apache-2.0
"""The best evaluation of a run, whose model --load_best_model_at_end saves at the end."""

import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import Any

from core.arguments import EvaluationArguments
from core.exits import Exit, fail

SMALLER_IS_BETTER = ("loss", "perplexity", "mse")


@dataclass(frozen=True)
class BestEvaluation:
    """An evaluation that is better than all before it.

    Attributes:
        step: the number of steps done before it, which is also that of its checkpoint.
        metric: the name of what was compared, as in metrics.jsonl.
        value: the metric's value.
    """

    step: int
    metric: str
    value: float

    @classmethod
    def of_progress(
        cls, saved: Mapping[str, Any], args: EvaluationArguments
    ) -> "BestEvaluation | None":
        """Return the best evaluation in a checkpoint's progress.json, or None.

        It is also None if this call asks for another metric, or for none.
        """
        best = saved.get("best")
        if best is None or not args.load_best_model_at_end or best["metric"] != metric_name(args):
            return None
        return cls(**best)


def metric_name(args: EvaluationArguments) -> str:
    """Return --metric_for_best_model as metrics.jsonl has it."""
    return f"eval_{args.metric_for_best_model.removeprefix('eval_')}"


def is_greater_better(args: EvaluationArguments) -> bool:
    """Return --greater_is_better, which by default follows from the metric's name."""
    if args.greater_is_better is not None:
        return args.greater_is_better
    return not args.metric_for_best_model.endswith(SMALLER_IS_BETTER)


def is_better(value: float, best: BestEvaluation | None, args: EvaluationArguments) -> bool:
    """Return whether a value is better than the best so far. One that is not finite never is."""
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    if is_greater_better(args):
        return value > best.value
    return value < best.value


def require_rows_to_choose_by(args: EvaluationArguments, rows: Sized | None, flag: str) -> None:
    """End with 64 if --load_best_model_at_end would have nothing to compare models by.

    Args:
        rows: those to evaluate on, or the blocks of their text.
        flag: the one that holds out some of what is trained on.
    """
    if args.load_best_model_at_end and not rows:
        fail(
            Exit.USAGE,
            "--load_best_model_at_end needs rows to evaluate on: pass --eval_dataset_name, "
            f"{flag}, or a --dataset_test_split that the data set has",
        )
