# SPDX-License-Identifier: Apache-2.0
"""The folder of a base model: what it holds, as far as its files say without being loaded."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from core.arguments import CommonArguments, LossInHeadArguments

ADAPTER_CONFIG = "adapter_config.json"


def find_folder_problems(args: CommonArguments) -> Iterator[str]:
    """Yield a line if the folder of --model_name_or_path holds no model that the recipe trains."""
    folder = Path(args.model_name_or_path)
    if not folder.exists():
        return
    flag = f"--model_name_or_path {folder}"
    if (folder / ADAPTER_CONFIG).is_file() and not has_weights(folder):
        base = read_config(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or "BASE"
        yield (
            f"{flag}: is an adapter of {base}, not a model: pass --model_name_or_path {base} to "
            "train a new adapter, or first merge this one into it: python scripts/merge.py"
        )
        return
    if not (folder / "config.json").is_file():
        yield f"{flag}: no config.json in it"
        return
    if isinstance(args, LossInHeadArguments):
        reason = why_not_causal(read_config(folder / "config.json"))
        if reason:
            yield f"{flag}: {reason}"


def find_missing_weights(args: CommonArguments) -> Iterator[str]:
    """Yield a line if the folder of --model_name_or_path has no weights; a dry run needs none."""
    folder = Path(args.model_name_or_path)
    if args.dry_run or not (folder / "config.json").is_file():
        return
    if not has_weights(folder) and not (folder / ADAPTER_CONFIG).is_file():
        yield (
            f"--model_name_or_path {folder}: no weights in it: copy the model's *.safetensors (or "
            "pytorch_model*.bin) into it, with their index.json if there are several"
        )


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights of a model and not only of adapters."""
    files = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    return any(not file.name.startswith("adapter_model") for file in files)


def read_config(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, {} if there is none: loading the model says what is wrong.

    Args:
        path: of a file config.json or adapter_config.json.
    """
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def why_not_causal(config: dict[str, Any]) -> str:
    """Return why a model is no causal language model and which recipe trains it, or "".

    An encoder such as BERT can be loaded as one, but its tokens would see those that they are to
    predict.

    Args:
        config: of config.json.
    """
    kind = config.get("model_type", "")
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not is_encoder(kind):
        return ""
    recipe = recipe_for(kind)
    sees_only_the_past = config.get("is_decoder") or config.get("causal")
    if not recipe or (sees_only_the_past and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        return ""
    return f"a model of type {kind} is no causal language model: {recipe}"


def is_encoder(kind: str) -> bool:
    """Return whether models of a type see the tokens on both sides, unless they are decoders."""
    is_seq2seq = kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    return kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not is_seq2seq


def recipe_for(kind: str) -> str:
    """Return which recipe trains models of a type, as a clause.

    Returns "" for custom code, and for a type of another version of transformers.
    """
    if kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return "recipes/t5.py trains models of sequence to sequence"
    if is_encoder(kind):
        return "recipes/bert.py and recipes/bert_ner.py train encoders"
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "recipes/llama.py trains causal language models"
    if kind in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return "recipes/vit.py trains models of images"
    return ""
