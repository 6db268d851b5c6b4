# SPDX-License-Identifier: Apache-2.0
"""Settings of the engine in force that accelerate keeps, or that are kept for it."""

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator


def deepspeed_config(accelerator: Accelerator) -> Mapping[str, Any]:
    """Return the config that DeepSpeed was given, {} without DeepSpeed."""
    return getattr(accelerator.state.deepspeed_plugin, "deepspeed_config", {})


def pipeline_ranks(accelerator: Accelerator) -> int:
    """Return how many ranks a pipeline has; 1 without pipeline parallelism.

    accelerate has no setting for it: `new_accelerator` of strategy.py notes it.
    """
    return getattr(accelerator, "pipeline_ranks", 1)


def expert_ranks(accelerator: Accelerator) -> int:
    """Return over how many ranks experts are spread; 1 without expert parallelism.

    accelerate has no setting for it: `new_accelerator` of strategy.py notes it.
    """
    return getattr(accelerator, "expert_ranks", 1)
