# SPDX-License-Identifier: Apache-2.0
"""Which learning rate fits what is trained: adapters need a higher one than all weights."""

import dataclasses

from components.arguments import CommonArguments

# LoRA's best rate is about ten times that of full fine-tuning (Schulman et al., "LoRA Without
# Regret", Thinking Machines Lab, 2025).
ADAPTERS_TO_WEIGHTS = 10


def rate_for_weights(args: CommonArguments) -> float:
    """Return the recipe's default, which is chosen for training all weights."""
    for field in dataclasses.fields(args):
        if field.name == "learning_rate":
            return float(field.default)  # pyrefly: ignore[bad-argument-type]  # it has a default
    raise TypeError(f"{type(args).__name__} has no learning rate")


def rate_for_adapters(args: CommonArguments) -> float:
    """Return a rate to start from when adapters are trained, rounded to two digits."""
    return float(f"{ADAPTERS_TO_WEIGHTS * rate_for_weights(args):.2g}")
