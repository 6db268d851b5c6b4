# SPDX-License-Identifier: Apache-2.0
"""Contestants and flags that many cells share."""

from .cells import Contestant

# The bare loop comes first, since the others are compared with it.
FIVE = {tool: Contestant(tool) for tool in ("floor", "lean", "ours", "trainer", "trl")}
BARE_AND_OURS = {tool: FIVE[tool] for tool in ("floor", "lean", "ours")}

LEARN = {
    "learning_rate": 5e-4,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "max_length": 512,
}
AS_THE_LOOP = {
    "weight_decay": 0.1,
    "train_sampling_strategy": "sequential",
    "logging_steps": 1,
}
MATCHED = LEARN | AS_THE_LOOP
