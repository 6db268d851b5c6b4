# SPDX-License-Identifier: Apache-2.0
"""Check whether a loaded model can be trained with `--attn_implementation varlen`."""

from typing import Any

from components import varlen
from core import model as models
from core.exits import Exit, fail


def check_model(
    args: Any,
    model: Any,
    largest_token: int,
    *,
    shares_lines: bool = False,
    gives_ends: bool = False,
) -> None:
    """Do as `check_model` of core/model.py, and end with 64 if varlen cannot attend in a model."""
    if args.attn_implementation == varlen.NAME:
        base = models.base_model_of(model)
        problem = varlen.problem_of(base)
        if problem:
            kind = type(base).__name__
            fail(
                Exit.USAGE,
                f"--attn_implementation {varlen.NAME} does not work for {kind}, since {problem}: "
                "use sdpa",
            )
        shares_lines = False
    models.check_model(model, largest_token, shares_lines=shares_lines, gives_ends=gives_ends)
