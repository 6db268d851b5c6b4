"""The folder that `from_pretrained`, and peft for adapters, load."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.other import extract_model_from_parallel

from components import upstream
from components.weights import whole_weights


def save_model(
    accelerator: Accelerator,
    model: torch.nn.Module,
    processor: Any,
    output_dir: str,
    config: Any = None,
) -> None:
    """Write the model, or its adapters, and its tokenizer or image processor.

    Every rank takes part; rank 0, which then has the whole weights, writes.

    Args:
        config: is written too; beside adapters nothing else tells the names of classes.
    """
    weights = whole_weights(accelerator, model)
    if not accelerator.is_main_process:
        return
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    upstream.remove_fsdp1_wrappers(inner)
    tied = getattr(inner, "all_tied_weights_keys", {})
    state_dict = {}
    for name, weight in weights.items():
        if name not in tied:  # tied weights are written once
            state_dict[exported_name(name)] = weight
    inner.save_pretrained(output_dir, state_dict=state_dict)
    processor.save_pretrained(output_dir)
    if config is not None:
        config.save_pretrained(output_dir)


def exported_name(name: str) -> str:
    """Return a weight's name without what torch.compile and DDP put into it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")
