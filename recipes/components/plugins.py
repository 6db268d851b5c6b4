# SPDX-License-Identifier: Apache-2.0
"""Accelerate's settings of the engine and the precision in force."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # upstream.py imports this module before any library.
    from accelerate import Accelerator


def fsdp_plugin(accelerator: "Accelerator") -> Any:
    """Return accelerate's settings of FSDP, or None if FSDP is not in force.

    Their type is Any, since accelerate annotates what its fields accept, not what they hold later.
    """
    from accelerate import DistributedType

    if accelerator.distributed_type != DistributedType.FSDP:
        return None
    return accelerator.state.fsdp_plugin


def mixed_dtype(accelerator: "Accelerator") -> str | None:
    """Return torch's name of mixed precision's dtype, or None without mixed precision."""
    return {"bf16": "bfloat16", "fp16": "float16"}.get(accelerator.mixed_precision)


def deepspeed_config(accelerator: "Accelerator") -> Mapping[str, Any]:
    """Return the config that DeepSpeed was given, {} without DeepSpeed."""
    return getattr(accelerator.state.deepspeed_plugin, "deepspeed_config", {})


def pipeline_ranks(accelerator: "Accelerator") -> int:
    """Return how many ranks a pipeline has; 1 without pipeline parallelism.

    accelerate has no setting for it: `new_accelerator` of strategy.py notes it.
    """
    return getattr(accelerator, "pipeline_ranks", 1)


def expert_ranks(accelerator: "Accelerator") -> int:
    """Return over how many ranks experts are spread; 1 without expert parallelism.

    accelerate has no setting for it: `new_accelerator` of strategy.py notes it.
    """
    return getattr(accelerator, "expert_ranks", 1)
