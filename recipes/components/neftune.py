# SPDX-License-Identifier: Apache-2.0
"""NEFTune: noise on the embeddings of instruction tuning (arXiv 2310.05914)."""

import math
from functools import partial
from typing import Any

import torch


def add_neftune(model: Any, alpha: float | None) -> None:
    """Have the model add noise to its embeddings while it trains; None adds none.

    The noise comes from the generator that Run seeds for each step, as that of dropout does, so
    that a resumed run draws the same.

    Args:
        model: of transformers, with adapters or without, before `prepare`.
        alpha: --neftune_noise_alpha.
    """
    if alpha is not None:
        model.get_input_embeddings().register_forward_hook(partial(add_noise, alpha=alpha))


def add_noise(
    module: torch.nn.Module, inputs: Any, output: torch.Tensor, alpha: float
) -> torch.Tensor:
    """Return embeddings plus uniform noise of at most alpha / sqrt(tokens * features).

    In evaluation they stay as they are.

    Args:
        output: of the embedding, [rows, tokens, features].
    """
    if not module.training:
        return output
    tokens, features = output.shape[-2:]
    largest = alpha / math.sqrt(tokens * features)
    return output + torch.empty_like(output).uniform_(-largest, largest)
