# SPDX-License-Identifier: Apache-2.0
"""Load tokenizers, processors and models from a folder or the hub; failures end in one line.

A dry run makes the model from its config, with shapes only, and reads no weights.
"""

import contextlib
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from transformers import AutoConfig

from components.full_cache import end_if_cache_is_full
from components.hub_ids import is_path
from components.model_folder import recipe_for
from core.exits import Exit, fail

OFFLINE = (
    "Offline: python scripts/make_tiny.py RECIPE runs/tiny, then "
    "--model_name_or_path runs/tiny/model --dataset_name runs/tiny/data/train.jsonl"
)
# transformers' words for a model that none of an AutoModel's classes takes
OTHER_KIND = re.compile(r"Unrecognized configuration class <class '(?:\w+\.)*(\w+)'>")
TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece")
TOKENIZER_ENDINGS = (".model", ".tiktoken", ".bpe")
# Arguments of from_pretrained that say nothing about the config
ONLY_FOR_WEIGHTS = (
    "quantization_config",
    "ignore_mismatched_sizes",
    "device_map",
    "output_loading_info",
)


@contextlib.contextmanager
def loading(what: str, name: str) -> Generator[None]:
    """End with one line if what is loaded in this context cannot be read.

    The exit code is 64, 69 if the hub cannot be reached, or 73 if its cache is full. What is loaded
    first finds out about the hub: the tokenizer or the image processor, not the model.

    Args:
        what: "tokenizer", "image processor" or "model".
        name: the folder or hub id.
    """
    try:
        yield
    except Exception as error:  # Each reader of weights raises exceptions of its own.
        fail_to_load(what, name, error)


def fail_to_load(what: str, name: str, error: Exception) -> NoReturn:
    """End this process with the reason why something could not be loaded, and with a fix."""
    end_if_cache_is_full(name, error, of_rows=False)
    if what == "tokenizer" and Path(name).is_dir() and not has_tokenizer_files(name):
        fail(
            Exit.USAGE,
            f"{name}: no tokenizer in this folder:"
            " copy tokenizer.json and tokenizer_config.json of the base model into it",
        )
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    problem = f"{name}: no {what}: {reason}"
    other_kind = OTHER_KIND.search(str(error))
    if what == "model" and other_kind:
        kind = kind_of_config(other_kind[1])
        problem = f"{name}: a model of type {kind} does not fit this recipe"
        fail(Exit.USAGE, ": ".join(filter(None, [problem, recipe_for(kind)])))
    may_be_at_hub = not (Path(name).exists() or is_path(name))
    if what != "model" and may_be_at_hub and isinstance(error, (OSError, ValueError)):
        problem = f"{name}: no such folder here, and no {what} from the hub: {reason}"
        fail(Exit.NO_HUB, problem, OFFLINE)
    fail(Exit.USAGE, problem)


def read_model_config(args: Any) -> Any:
    """Return the config of the model in transformers' form, or None if it cannot be read.

    Loading the model then says what is wrong.
    """
    try:
        return AutoConfig.from_pretrained(
            args.model_name_or_path, revision=args.model_revision, trust_remote_code=False
        )
    except Exception:  # Each kind of config raises exceptions of its own.
        return None


def kind_of_config(class_name: str) -> str:
    """Return the type of model that a class of configs is for; the class itself if it is unknown.

    Args:
        class_name: such as "LlamaConfig".
    """
    return getattr(getattr(transformers, class_name, None), "model_type", class_name)


def has_tokenizer_files(folder: str) -> bool:
    """Return whether a tokenizer might be read from any of the folder's files."""
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
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """Return what auto_class.from_pretrained would, but not quantized and on the meta device.

    With the model comes a report in which nothing is missing.

    Args:
        auto_class: one of transformers' AutoModel classes.
        options: further arguments of from_pretrained.
    """
    of_config = {key: value for key, value in options.items() if key not in ONLY_FOR_WEIGHTS}
    config = AutoConfig.from_pretrained(name, **of_config)
    with torch.device("meta"):
        model = auto_class.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    return model, {"missing_keys": [], "mismatched_keys": []}
