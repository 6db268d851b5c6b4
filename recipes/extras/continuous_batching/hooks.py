# SPDX-License-Identifier: Apache-2.0
"""What the core and a recipe call of this extra (core/extras.py)."""

from dataclasses import dataclass
from typing import Any

from core.cli import free
from core.engine import is_sharded
from core.exits import Exit, fail


@dataclass(kw_only=True)
class Arguments:
    """Answers by continuous batching."""

    use_transformers_continuous_batching: bool = free(
        False, "have transformers' generate_batch sample answers, on GPUs with whole weights"
    )


def answerer(args: Any, run: Any, accelerator: Any, tokenizer: Any, options: Any) -> Any:
    """Return what answers prompts (`Batcher`), or None without the flag.

    Ends with 64 without a GPU, and where weights are split: there generate_batch waits for ever if
    ranks end after different numbers of tokens, and returns answers that are cut.
    """
    if not args.use_transformers_continuous_batching:
        return None
    if accelerator.device.type != "cuda" or is_sharded(accelerator):
        needed = "GPUs that each have all weights: single.yaml, ddp.yaml"
        fail(Exit.USAGE, f"--use_transformers_continuous_batching: is for {needed}")
    from extras.continuous_batching.batcher import Batcher

    return Batcher(accelerator, options, args.temperature)
