"""Tokenizers, processors and models from a folder or the hub: what cannot be read ends in one line.

A dry run makes the model from its config, with shapes only, and reads no weights.
"""

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import AutoConfig

from components.data_files import OFFLINE
from components.exits import Exit
from components.status import fail

OTHER_HEAD = (
    "under ZeRO-3 transformers changes no head to another number of classes: take another YAML, "
    "or a model without this head"
)
TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece")
TOKENIZER_ENDINGS = (".model", ".tiktoken", ".bpe")
# Arguments of from_pretrained that say nothing about the config
ONLY_FOR_WEIGHTS = ("quantization_config", "ignore_mismatched_sizes", "device_map")


@contextlib.contextmanager
def loading(what: str, name: str) -> Generator[None]:
    """End with a line if what is read in this context, from a folder or the hub, cannot be read.

    With 64, or with 69 if the hub cannot be reached, which the first thing that is read finds out:
    the tokenizer or the image processor, not the model.

    Args:
        what: "tokenizer", "image processor" or "model".
        name: the folder or hub id.
    """
    try:
        yield
    except Exception as error:  # each reader of weights has its own
        end_without(what, name, error)


def end_without(what: str, name: str, error: Exception) -> NoReturn:
    """End this process, since something could not be read, with the reason and what helps."""
    if what == "tokenizer" and Path(name).is_dir() and not has_tokenizer_files(name):
        fail(
            Exit.USAGE,
            f"{name}: no tokenizer in this folder:"
            " copy tokenizer.json and tokenizer_config.json of the base model into it",
        )
    problem = f"{name}: no {what}: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
    if "ignore_mismatched_sizes" in str(error):  # transformers asks for it though it was given
        fail(Exit.USAGE, problem, OTHER_HEAD)
    if what != "model" and is_at_hub(name) and isinstance(error, (OSError, ValueError)):
        fail(Exit.NO_HUB, problem, OFFLINE)
    fail(Exit.USAGE, problem)


def is_at_hub(name: str) -> bool:
    """Return whether a name can only be that of something at the hub."""
    return not (Path(name).exists() or name.startswith((".", "/")))


def has_tokenizer_files(folder: str) -> bool:
    """Return whether any file in the folder could be one that a tokenizer is read from."""
    for path in Path(folder).iterdir():
        if path.name.startswith(TOKENIZER_FILES) or path.suffix in TOKENIZER_ENDINGS:
            return True
    return False


def build_without_weights(
    auto_class: Any,
    name: str,
    *,
    dtype: str,
    attn_implementation: str | None,
    output_loading_info: bool = False,
    **options: Any,
) -> Any:
    """Return what auto_class.from_pretrained would, not quantized and on the meta device.

    Args:
        auto_class: one of transformers' AutoModel classes.
        options: further arguments of from_pretrained. With output_loading_info the model comes
            with a report, as there.
    """
    of_config = {key: value for key, value in options.items() if key not in ONLY_FOR_WEIGHTS}
    config = AutoConfig.from_pretrained(name, **of_config)
    with torch.device("meta"):
        model = auto_class.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    if output_loading_info:
        return model, {"missing_keys": [], "mismatched_keys": []}
    return model
