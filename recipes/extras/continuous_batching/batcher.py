# SPDX-License-Identifier: Apache-2.0
"""Answers by transformers' continuous batching, where the next prompt follows each that ended."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from transformers import ContinuousBatchingConfig, GenerationConfig


class Batcher:
    """Samples answers to prompts of different lengths at the same time."""

    def __init__(
        self, accelerator: Accelerator, options: Mapping[str, Any], temperature: float
    ) -> None:
        """Keep the options, which are those of a greedy `generate`."""
        self._accelerator = accelerator
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        self._config = GenerationConfig(**{**options, **sampling})

    @torch.no_grad()
    def answer(
        self, model: Any, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]
    ) -> list[tuple[list[int], bool]]:
        """Return the tokens of an answer to each row, and whether it was cut off.

        One random generator draws for all rows, in an order that depends on which have ended, so
        that an answer depends on the others. generate_batch computes in the dtype of the weights,
        in a thread that autocast does not reach, and logs its errors only.

        Raises:
            RuntimeError: an answer is missing, or ends before its end.
        """
        if not rows:
            return []
        prompts = [row["input_ids"].tolist() for row in rows]
        batching = ContinuousBatchingConfig(seed=seeds[0] % 2**32)
        model.eval()
        with torch.random.fork_rng():  # it sets the global seed
            unwrapped: Any = self._accelerator.unwrap_model(model)
            found = unwrapped.generate_batch(prompts, self._config, batching)
        model.train()
        written = []
        for output in found.values():
            ids = output.generated_tokens
            is_truncated = not {*ids[-1:]} & {*self._config.eos_token_id}
            if is_truncated and len(ids) < self._config.max_new_tokens:
                raise RuntimeError(f"generate_batch has cut an answer: {output.error}")
            written.append((ids, is_truncated))
        if len(written) != len(rows):
            raise RuntimeError(f"generate_batch has answered {len(written)} of {len(rows)} prompts")
        return written
