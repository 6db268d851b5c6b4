# SPDX-License-Identifier: Apache-2.0
"""Text generation during training, under every strategy."""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator

from components import upstream


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
