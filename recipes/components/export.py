# SPDX-License-Identifier: Apache-2.0
"""The folder that `from_pretrained` loads."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.other import extract_model_from_parallel

from components import upstream
from components.deepspeed_state import clean_name
from components.ending import end_all_ranks
from components.exits import Exit
from components.folder import CARD
from components.left_out import read_left_out
from components.shards import entries_to_save, gather_share, write_on_rank_0, write_shards
from components.state import free_whole_weights
from components.stop_tokens import add_stop_tokens


def save_model(
    accelerator: Accelerator,
    model: Any,
    processor: Any,
    output_dir: str,
    config: Any = None,
    stop_tokens: Collection[int] = (),
) -> None:
    """Write the folder that `from_pretrained` loads: that of transformers, or peft's for adapters.

    Every rank takes part: each writes the weights that it owns, and rank 0 the rest, as well as
    adapters. If they cannot be written, all ranks end with 73.

    Args:
        model: as `prepare` returned it. It cannot be trained further on rank 0, where FSDP1's
            wrappers are removed from it if it has adapters.
        processor: the tokenizer or image processor that belongs to the model.
        config: the model's config, which is written too. A folder of adapters has the names of
            the classes only there.
        stop_tokens: those that the model was trained to end its texts with. The generation config
            of a whole model is to list them, so that each program which serves the folder stops
            there. A folder of adapters has none: what loads it adds them.
    """
    unwrapped = extract_model_from_parallel(model, keep_torch_compile=False)
    folder = Path(output_dir)
    if hasattr(unwrapped, "peft_config"):
        problem = save_adapters(accelerator, model, processor, folder, config)
    else:
        problem = save_whole_model(accelerator, model, processor, folder, config, stop_tokens)
    if problem is not None:
        end_all_ranks(accelerator, Exit.CANNOT_WRITE, f"the model could not be written: {problem}")


def save_adapters(
    accelerator: Accelerator, model: Any, processor: Any, output_dir: Path, config: Any
) -> str | None:
    """Write the folder of adapters as `save_model` does. Every rank takes part.

    Returns:
        On every rank why it could not be written, or None. An earlier result is then unchanged.
    """
    weights = adapter_weights(accelerator, model)

    def write_all(folder: Path) -> None:
        write_adapters(model, weights, folder)
        if (output_dir / CARD).is_file():
            (folder / CARD).unlink()  # That of peft, which may take the place of the user's
        write_processor(processor, config, folder)

    return write_on_rank_0(accelerator, output_dir, write_all)


def save_whole_model(
    accelerator: Accelerator,
    model: Any,
    processor: Any,
    output_dir: Path,
    config: Any,
    stop_tokens: Collection[int],
) -> str | None:
    """Write the folder of a whole model as `save_model` does. Returns as `save_adapters` does."""
    unwrapped = extract_model_from_parallel(model, keep_torch_compile=False)
    if accelerator.is_main_process:
        list_stop_tokens(unwrapped, processor, stop_tokens)

    def write_rest(folder: Path) -> None:
        write_configs(unwrapped, folder)
        write_processor(processor, config, folder)

    share = gather_share(accelerator, model, unwrapped)
    share |= read_left_out(unwrapped)
    return write_shards(accelerator, output_dir, share, write_rest)


def write_processor(processor: Any, config: Any, output_dir: str | Path) -> None:
    """Write the files of the tokenizer or image processor, and of the config if one is given."""
    processor.save_pretrained(output_dir)
    if config is not None:
        config.save_pretrained(output_dir)


def write_configs(unwrapped: Any, output_dir: Path) -> None:
    """Write the configs of a model, as its save_pretrained does beside the weights."""
    unwrapped.config.dtype = str(unwrapped.dtype).removeprefix("torch.")
    # FSDP2 changes the name of the class.
    unwrapped.config.architectures = [type(unwrapped).__name__.removeprefix("FSDP")]
    unwrapped.config.save_pretrained(output_dir)
    if unwrapped.can_generate():
        unwrapped.generation_config.save_pretrained(output_dir)


def list_stop_tokens(model: Any, tokenizer: Any, stop_tokens: Collection[int]) -> None:
    """Have the generation config of a whole model list these tokens, and say so if it did not."""
    if not stop_tokens:
        return
    listed = add_stop_tokens(model, stop_tokens)
    if listed is not None:
        # A model may list a token that its tokenizer does not have.
        tokens = tokenizer.convert_ids_to_tokens(listed)
        names = ", ".join(token or "unknown" for token in tokens)
        print(
            f"generation_config.json: the base did not list every token that ends an answer; "
            f"eos_token_id is now {listed} ({names})"
        )


def write_adapters(model: Any, weights: Mapping[str, Any], output_dir: Path) -> None:
    """Write the folder of a model's adapters.

    Args:
        weights: the whole weights by name, as `adapter_weights` returns them.
    """
    unwrapped: Any = extract_model_from_parallel(model, keep_torch_compile=False)
    upstream.remove_fsdp1_wrappers(unwrapped)
    unwrapped.save_pretrained(output_dir, state_dict=weights)


def adapter_weights(accelerator: Accelerator, model: Any) -> dict[str, torch.Tensor]:
    """Return the adapters of a model by name, with the modules that are trained whole beside them.

    Every rank takes part. The frozen base is not gathered: that would take as much memory of the
    host as the whole model.

    Returns:
        {name: whole tensor on the host} on rank 0, {} on the others.
    """
    free_whole_weights(model)
    trained = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            trained[clean_name(name)] = weight
    weights = {}
    for entry in entries_to_save(accelerator, model, trained):
        tensor = entry.gather(0)
        if accelerator.is_main_process:
            weights[entry.name] = tensor.cpu()
    return weights
