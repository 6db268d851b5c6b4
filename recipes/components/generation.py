# SPDX-License-Identifier: Apache-2.0
"""Text generation: under every strategy, and greedy whatever the base's generation config says."""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from transformers import GenerationConfig

from components import upstream

NO_LIMIT = 10**9  # tokens, for a model whose configuration has no longest sequence


def generate(
    accelerator: Accelerator,
    model: torch.nn.Module,
    inputs: Mapping[str, torch.Tensor],
    **options: Any,
) -> torch.Tensor:
    """Return the tokens that the model generates, [rows, tokens].

    Every rank takes part until the last one has finished. The model must have run a forward pass
    before. Layers that --torch_compile compiles run as they are, since they would be compiled
    again for the lengths that grow with each token.

    Args:
        inputs: what the model reads, [rows, tokens].
        options: arguments of transformers' generate.
    """
    is_synced = accelerator.num_processes > 1
    with (
        upstream.gathered_outside_of_layers(model, accelerator),
        accelerator.autocast(),
        torch.compiler.set_stance("force_eager"),
    ):
        unwrapped: Any = accelerator.unwrap_model(model)
        return unwrapped.generate(**inputs, **options, synced_gpus=is_synced)


def greedy_options(model: Any) -> dict[str, Any]:
    """Return the arguments of generate by which the likeliest token is taken each time.

    What it is not given, a penalty on repeated words for example, it takes from the base. Only the
    tokens that begin and end a text stay, and those that an encoder-decoder forces.
    """
    neutral = GenerationConfig()
    options = neutral.to_dict() | neutral._get_default_generation_params()
    kept = ["max_length", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"]
    kept += ["decoder_start_token_id", "transformers_version"]
    if model.config.is_encoder_decoder:
        kept += ["forced_bos_token_id", "forced_eos_token_id"]
    return {name: value for name, value in options.items() if name not in kept}


def most_positions(config: Any) -> int:
    """Return the most tokens of a text and its continuation, from a model's configuration."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or NO_LIMIT
