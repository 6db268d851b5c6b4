# SPDX-License-Identifier: Apache-2.0
"""The model that was trained, and the same with its adapters merged by peft, in memory.

The second is made by other code than the merged folder, and so shows an error in either.
"""

from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from components import upstream
from exits import first_line, stop
from generation.loading import LOAD_ERRORS
from merging.adapter import AdapterFolder
from merging.quantized import Quantization, dtype_of_run
from merging.skeleton import adapter_code

SIXTEEN_BITS = "16bit"  # name of the base that is not quantized, as --base has it


def load_base(adapter: AdapterFolder, quantization: Quantization | None, device: str) -> Any:
    """Return the base in the dtype of training. Raises SystemExit with 65 or 69.

    Args:
        quantization: that of the training, or None for the base as it is.
    """
    options: dict[str, Any] = {}
    if quantization is not None:
        options["quantization_config"] = quantization.config()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            adapter.base,
            dtype=dtype_of_run(adapter.arguments) or "auto",
            device_map=device,
            revision=adapter.revision,
            trust_remote_code=False,
            **options,
        )
    except LOAD_ERRORS as error:
        stop(adapter_code(adapter), f"{adapter.base}: cannot be loaded: {first_line(error)}")
    return model


def add_adapters(model: Any, adapter: AdapterFolder) -> Any:
    """Return a base with its adapters, in evaluation mode. Raises SystemExit with 65."""
    upstream.silence_old_name_of_checkpointing()
    try:
        return PeftModel.from_pretrained(model, adapter.source.name).eval()
    except LOAD_ERRORS as error:
        stop(adapter_code(adapter), f"{adapter.path}: cannot be loaded: {first_line(error)}")


def load_trained(adapter: AdapterFolder, device: str) -> Any:
    """Return the model as it was trained: the adapters on the base, quantized as it was."""
    base = load_base(adapter, adapter.quantization, device)
    upstream.keep_4bit_weights_as_loaded(base)
    return add_adapters(base, adapter)


def load_merged_by_peft(adapter: AdapterFolder, base_name: str, device: str, unties: bool) -> Any:
    """Return the adapters merged into a base by peft.

    Args:
        base_name: "16bit", or that of the quantized base, whose values are then used.
        unties: whether the adapters change one of two weights that are tied in the base.
    """
    if base_name == SIXTEEN_BITS:
        base = load_base(adapter, None, device)
    else:
        base = load_base(adapter, adapter.quantization, device).dequantize()
    return merge_by_peft(add_adapters(base, adapter), unties)


def merge_by_peft(model: Any, unties: bool) -> Any:
    """Return a model of peft with its adapters merged.

    Args:
        unties: as in `load_merged_by_peft`. peft changes a tied weight in place, and so both.
    """
    if unties:
        layer = model.get_base_model().get_output_embeddings()
        while hasattr(layer, "base_layer"):
            layer = layer.base_layer
        if isinstance(layer, torch.nn.Linear):
            layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
    return model.merge_and_unload().eval()
