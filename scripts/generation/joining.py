# SPDX-License-Identifier: Apache-2.0
"""What merge.py does with a checkpoint: its boxes become the folder of a model, file by file."""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from common import Exit, first_line, stop
from core.chat import ChatTemplate
from core.checkpoint import (
    BOXES,
    find_damage,
    is_of_optimizer,
    read_progress,
    read_whole,
    saved_tensors,
)
from core.export import INDEX, list_stop_tokens
from core.model import load_tokenizer, read_config
from generation.comparing import new_folder

BYTES_OF_A_FILE = 5 * 10**9  # at most, but for a tensor that is larger


def is_checkpoint(folder: Path) -> bool:
    """Return whether a run has saved its state in a folder."""
    return (folder / BOXES).is_file()


def run(args: argparse.Namespace) -> None:
    """Carry out a command line of merge.py; exit with a code and one line if that fails."""
    logging.disable_progress_bar()
    checkpoint = Path(args.adapter)
    damage = find_damage(checkpoint)
    if damage is not None:
        stop(Exit.DATA, f"{checkpoint}: {damage}")
    trained: Any = SimpleNamespace(**read_progress(checkpoint)["arguments"])
    if trained.use_peft:
        stop(Exit.USAGE, f"{checkpoint}: of adapters, whose run ends with a folder of any size")
    folder = new_folder(args.output)
    dtype = trained.dtype if args.dtype == "auto" else args.dtype
    try:
        folder.mkdir(parents=True)
        write_weights(folder, checkpoint, getattr(torch, dtype))
        write_configs(folder, trained, dtype)
    except OSError as error:
        stop(Exit.CANNOT_WRITE, f"cannot write {folder}: {first_line(error)}")
    _, found = AutoModelForCausalLM.from_pretrained(
        folder, device_map="meta", output_loading_info=True, trust_remote_code=False
    )
    strange = {*found["missing_keys"], *found["unexpected_keys"]}
    if strange:
        stop(Exit.DATA, f"{folder}: no dense causal language model: {sorted(strange)[:3]} differ")
    folder.rename(args.output)
    print(f"The model of {checkpoint} is in {args.output}")


def write_weights(folder: Path, checkpoint: Path, dtype: torch.dtype) -> None:
    """Write the weights of a checkpoint, with no more than one file of them in memory."""
    files = list(files_of(checkpoint, dtype.itemsize))
    weight_map = {}
    num_bytes = 0
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        weights = {name: whole.to(dtype) for name, whole in read_whole(checkpoint, names)}
        save_file(weights, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
        num_bytes += sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def files_of(checkpoint: Path, itemsize: int) -> Iterator[list[str]]:
    """Yield the names of the weights of each file, in the order of the checkpoint."""
    names: list[str] = []
    room = BYTES_OF_A_FILE
    for name, tensor in saved_tensors(checkpoint).items():
        if is_of_optimizer(name):
            continue
        size = math.prod(tensor.shape) * itemsize
        if names and size > room:
            yield names
            names = []
            room = BYTES_OF_A_FILE
        names.append(name)
        room -= size
    yield names


def write_configs(folder: Path, trained: Any, dtype: str) -> None:
    """Write what the run would have written beside its weights.

    Args:
        trained: the arguments of the run.
    """
    config = read_config(trained)
    config.dtype = dtype
    config.save_pretrained(folder)
    tokenizer = load_tokenizer(trained)
    tokenizer.save_pretrained(folder)
    if hasattr(trained, "chat_template"):
        stop_tokens = ChatTemplate(tokenizer).stop_tokens()
    else:
        stop_tokens = {tokenizer.eos_token_id} - {None}
    try:
        generation = GenerationConfig.from_pretrained(
            trained.model_name_or_path, revision=trained.model_revision
        )
    except OSError:  # The base has none.
        generation = GenerationConfig.from_model_config(config)
    list_stop_tokens(SimpleNamespace(generation_config=generation), stop_tokens)
    generation.save_pretrained(folder)
