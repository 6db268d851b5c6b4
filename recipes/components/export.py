# SPDX-License-Identifier: Apache-2.0
"""The folder that `from_pretrained` loads."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils.other import extract_model_from_parallel
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from components import upstream
from components.deepspeed_state import clean_name
from components.pipeline_state import parts_of_stages
from components.stop_tokens import add_stop_tokens
from components.strategy import Strategy


def save_model(
    accelerator: Accelerator,
    model: Any,
    processor: Any,
    output_dir: str,
    config: Any = None,
    stop_tokens: Collection[int] = (),
) -> None:
    """Write the folder that `from_pretrained` loads: that of transformers, or peft's for adapters.

    Every rank takes part; rank 0, which has the whole weights, writes.

    Args:
        model: as `prepare` returned it. It cannot be trained further on rank 0, where FSDP1's
            wrappers are removed from it.
        processor: the tokenizer or image processor that belongs to the model.
        config: the model's config, which is written too. A folder of adapters has the names of
            the classes only there.
        stop_tokens: those that the model was trained to end its texts with. The generation config
            of a whole model is to list them, so that each program which serves the folder stops
            there. A folder of adapters has none: what loads it adds them.
    """
    weights = whole_weights(accelerator, model)
    if accelerator.is_main_process:
        unwrapped = extract_model_from_parallel(model, keep_torch_compile=False)
        list_stop_tokens(unwrapped, processor, stop_tokens)
        write_folder(model, weights, output_dir)
        processor.save_pretrained(output_dir)
        if config is not None:
            config.save_pretrained(output_dir)


def list_stop_tokens(model: Any, tokenizer: Any, stop_tokens: Collection[int]) -> None:
    """Have the generation config of a whole model list these tokens, and say so if it did not."""
    if not stop_tokens or hasattr(model, "peft_config"):
        return
    listed = add_stop_tokens(model, stop_tokens)
    if listed is not None:
        names = ", ".join(tokenizer.convert_ids_to_tokens(listed))
        print(
            f"generation_config.json: the base did not list every token that ends an answer; "
            f"eos_token_id is now {listed} ({names})"
        )


def write_folder(model: Any, weights: Mapping[str, Any], output_dir: str) -> None:
    """Write the unwrapped model's folder.

    Args:
        weights: the whole weights by name, as `whole_weights` returns them.
    """
    unwrapped: Any = extract_model_from_parallel(model, keep_torch_compile=False)
    upstream.remove_fsdp1_wrappers(unwrapped)
    tied = getattr(unwrapped, "all_tied_weights_keys", {})
    exported = {}
    for name, weight in weights.items():
        if name not in tied:  # Tied weights are written once, under the name they are tied to.
            exported[clean_name(name)] = weight
    readme = Path(output_dir, "README.md")
    before = readme.read_bytes() if readme.is_file() else None
    unwrapped.save_pretrained(output_dir, state_dict=exported)
    if before is not None:  # peft writes into a README.md that may be the user's own.
        readme.write_bytes(before)


def whole_weights(accelerator: Accelerator, model: Any) -> dict[str, Any]:
    """Return the weights by name, whole and on the host of rank 0. Every rank takes part.

    For a model with adapters, FSDP2 and ZeRO-3 gather only what is trained: gathering the frozen
    base as well would take as much host memory as the whole model.
    """
    has_adapters = hasattr(extract_model_from_parallel(model), "peft_config")
    strategy = Strategy.of(accelerator)
    if strategy.pipeline > 1:
        return dict(parts_of_stages(accelerator, model.named_parameters()))
    is_fsdp2_of_adapters = has_adapters and strategy.fsdp_version == 2
    if is_fsdp2_of_adapters or strategy.is_split:
        options = StateDictOptions(
            full_state_dict=True, cpu_offload=True, ignore_frozen_params=has_adapters
        )
        return get_model_state_dict(model, options=options)
    if has_adapters and strategy.zero_stage == 3:
        return model._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    return accelerator.get_state_dict(model)
