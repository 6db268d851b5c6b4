# SPDX-License-Identifier: Apache-2.0
"""What the core and a recipe call of this extra (core/extras.py)."""

from dataclasses import dataclass
from typing import Any

from core.cli import POSITIVE, free


@dataclass(kw_only=True)
class Arguments:
    """Answers that a language model generates in evaluations."""

    predict_with_generate: bool = free(
        False,
        "in each evaluation, write answers to held-out rows into predictions-STEP.jsonl, and "
        "report exact match for rows with a short answer",
    )
    num_predictions: int = free(
        64,
        "rows that --predict_with_generate answers, spread over the rows to evaluate on",
        POSITIVE,
    )
    generation_max_new_tokens: int = free(128, "most tokens to generate per answer", POSITIVE)


def predictor(args: Any, *parts: Any) -> Any:
    """Return what answers evaluation rows (a `Predictor`), or None without --predict_with_generate.

    Args:
        parts: the other arguments of `Predictor`.
    """
    if not args.predict_with_generate:
        return None
    from extras.predict.answers import Predictor

    return Predictor(args, *parts)
