# SPDX-License-Identifier: Apache-2.0
"""The folder that `from_pretrained` loads."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils.other import extract_model_from_parallel

from components.generation import listed_stop_tokens
from components.long_calls import call_on_rank_0
from components.write_errors import WriteError
from core import workarounds
from core.checkpoint import make_patient_group
from core.exits import End, Exit
from core.export import adapter_weights, model_weights, write_result
from core.weights import read_left_out


def save_model(
    accelerator: Accelerator,
    model: Any,
    processor: Any,
    output_dir: str,
    config: Any = None,
    stop_tokens: Collection[int] = (),
) -> None:
    """Write the folder that `from_pretrained` loads: that of transformers, or peft's for adapters.

    Every rank takes part, and rank 0 writes. If it cannot be written, all ranks end with 73.

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
    group = make_patient_group()
    has_adapters = hasattr(unwrapped, "peft_config")
    if has_adapters:
        weights = adapter_weights(model, group)
    else:
        weights = model_weights(model, unwrapped, group)

    def write_rest(staging: Path) -> None:
        if has_adapters:
            write_adapters(model, weights, staging)
            (staging / "README.md").unlink()  # peft's, without words: it could replace the user's
        else:
            write_configs(unwrapped, staging)
        write_processor(processor, config, staging)

    def write() -> str | None:
        try:
            if has_adapters:
                write_result(folder, {}, write_rest)
                return None
            list_stop_tokens(unwrapped, processor, stop_tokens)
            write_result(folder, weights | read_left_out(unwrapped), write_rest)
        except Exception as error:  # The tokenizers package raises no other kind on a full disk
            return str(WriteError.of(error))
        return None

    problem = call_on_rank_0(accelerator, write)
    if problem is not None:
        raise End(Exit.CANNOT_WRITE, f"the model could not be written: {problem}")


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
    if not stop_tokens:  # the model of a classification has no generation config
        return
    known = listed_stop_tokens(model.generation_config)
    if not known.issuperset(stop_tokens):
        listed = sorted(known.union(stop_tokens))
        model.generation_config.eos_token_id = listed
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
    workarounds.remove_fsdp1_wrappers(unwrapped)
    unwrapped.save_pretrained(output_dir, state_dict=weights)
