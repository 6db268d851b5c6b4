# SPDX-License-Identifier: Apache-2.0
"""What --load_best_model_at_end needs."""

from collections.abc import Sized

from core.arguments import EvaluationArguments
from core.exits import Exit, fail


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
