# SPDX-License-Identifier: Apache-2.0
"""Layers that must not get adapters, since the adapter would fail or have no effect.

peft's "all-linear" takes every layer that is a torch.nn.Linear, and refuses few of these.
"""

import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

OF_MODELS = "transformers.models."
# Subclasses of Linear in transformers that have a forward pass of their own, and put out what a
# Linear does. Others do not: routers of experts return several tensors.
SAME_AS_LINEAR = ("FalconLinear",)
# Classes that read weights only where no recipe gets: Bloom with `slow_but_exact`, DeBERTa in the
# decoder of its pre-training
CALL_THEIR_LAYERS = ("BloomAttention", "BloomMLP", "DisentangledSelfAttention")

# In the names of parts that read no text: towers, and what maps their output to embeddings
OF_OTHER_INPUTS = re.compile("vision|visual|image|img|audio|multi_modal")


def reads_no_text(model: Any, name: str) -> bool:
    """Return whether a part of a model, such as "model.vision_tower", is for no text."""
    return model.main_input_name == "input_ids" and bool(OF_OTHER_INPUTS.search(name))


def find_layers_to_skip(model: Any, targets: Sequence[str]) -> list[str]:
    """Return the paths of the layers that --lora_target_modules names, but that get no adapter."""
    takes_all = targets == ["all-linear"]
    skipped = set(find_unfit_layers(model)) if takes_all else set()
    for path, layer in model.named_modules():
        is_target = any(f".{path}".endswith(f".{target}") for target in targets)
        if is_target or (takes_all and isinstance(layer, (torch.nn.Linear, Conv1D))):
            if reads_no_text(model, path):
                skipped.add(path)
    return sorted(skipped)


def find_unfit_layers(model: torch.nn.Module) -> dict[str, str]:
    """Return the paths of linear layers that must not get an adapter, each with the reason.

    Args:
        model: of transformers, before adapters are added.
    """
    unfit = {}
    for path, parent in model.named_modules():
        for name, layer in parent.named_children():
            if not isinstance(layer, (torch.nn.Linear, Conv1D)):
                continue
            reason = reason_against_adapter(type(parent), name, type(layer))
            if reason:
                unfit[f"{path}.{name}" if path else name] = reason
    return unfit


def reason_against_adapter(
    parent: type[torch.nn.Module], name: str, kind: type[torch.nn.Module]
) -> str:
    """Return why a linear layer must not get an adapter, or "".

    Args:
        parent: the class of the module that has the layer, under `name`.
        kind: the class of the layer.
    """
    is_of_models = kind.__module__.startswith(OF_MODELS)
    if is_of_models and "forward" in vars(kind) and kind.__name__ not in SAME_AS_LINEAR:
        return f"a {kind.__name__} does not put out what a linear layer does"
    if reads_weight_of(parent, name):
        return (
            f"{parent.__name__} multiplies by its weight without calling the layer, so that an "
            "adapter would have no effect"
        )
    return ""


def reads_weight_of(kind: type[torch.nn.Module], name: str) -> bool:
    """Return whether a class of transformers takes the weight of its layer `name` by itself.

    State-space mixers give it to fused kernels, and Gemma 3n clamps it while it trains. Only to
    look at its type or shape, or to draw it at the start, is no use of it.
    """
    if not kind.__module__.startswith(OF_MODELS) or kind.__name__ in CALL_THEIR_LAYERS:
        return False
    is_looked_at = r"\.(dtype|device|shape|data|_is)"
    pattern = rf"(?<!isinstance\()(?<!_\()self\.{name}\.weight\b(?!{is_looked_at}| = )"
    return re.search(pattern, inspect.getsource(kind)) is not None
