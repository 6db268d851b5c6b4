# SPDX-License-Identifier: Apache-2.0
"""Tensors in the files of a base that the class of the trained model has no place for.

transformers ignores them while it loads, often without a word: layers that predict several tokens
at once (DeepSeek V3), or the part for images where only the text is trained (Qwen3.5).
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import core_model_loading as names
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import load_state_dict

from components.base_files import PATTERN, find_folder
from components.loading import loading
from core.arguments import CommonArguments


class LeftOut(NamedTuple):
    """Tensors of a base, {tensor: its file}, whether the result has them too, and words for it."""

    files: dict[str, Path]
    is_kept: bool
    words: str


def note_left_out(args: CommonArguments, model: Any) -> dict[str, str]:
    """Return the summary's line about what a base has and its model has not, if there is any.

    `save_model` finds it at the model. A result keeps that if it is of the class of the base.
    """
    files = files_of_tensors(args.model_name_or_path, args.model_revision)
    placed, _ = find_placed(model, files)
    unplaced = {name: file for name, file in files.items() if name not in placed}
    if not unplaced:
        return {}
    kind = type(model).__name__
    is_kept = model.config.architectures == [kind]
    fate = "kept as they are" if is_kept else "not in the result"
    parts = Counter(parts_without_others(unplaced, placed))
    listed = ", ".join(f"{part} ({number})" for part, number in parts.items())
    words = f"{len(unplaced)} tensors of the base are {fate}: {kind} has no {listed}"
    model.left_out = LeftOut(unplaced, is_kept, words)
    return {"base files": words}


def files_of_tensors(name: str, revision: str) -> dict[str, Path]:
    """Return {tensor: its file} of a folder or hub id, as far as it is on this machine."""
    found = {}
    folder = find_folder(name, revision)
    if folder is not None:
        with loading("model", name):
            for path in sorted(folder.glob(PATTERN)) or folder.glob("pytorch_model*.bin"):
                found |= dict.fromkeys(load_state_dict(path, map_location="meta"), path)
    return found


def find_placed(model: Any, tensors: Collection[str]) -> tuple[set[str], list[Any]]:
    """Return those tensors that a model has a place for, and the conversions that they need.

    As `convert_and_load_state_dict_in_model` of transformers, but without what a class ignores.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, names.WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, names.WeightConverter)]
    weights = model.state_dict()
    prefix = model.base_model_prefix
    placed = set()
    for name in sorted(tensors, key=names.dot_natural_key):
        place, _ = names.rename_source_key(name, renamings, converters, prefix, weights)
        if place in weights or name in weights:
            placed.add(name)
    return placed, [one for one in conversions if one.was_used()]


def parts_without_others(tensors: Collection[str], others: Collection[str]) -> Iterator[str]:
    """Yield the shortest beginning of each name that no other has, as in "model.visual.*".

    Where all of them are shared, it is the name without its numbers.
    """
    taken: set[str] = set()
    for other in others:
        taken.update(accumulate(other.split("."), "{}.{}".format))
    for name in tensors:
        own = accumulate(name.split(".")[:-1], "{}.{}".format)
        free = [beginning for beginning in own if beginning not in taken]
        if free:
            yield f"{free[0]}.*"
        else:
            yield re.sub(r"\.\d+\.", ".*.", name)


def read_left_out(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that the result keeps of the base, and say what is kept or is not."""
    left_out = getattr(model, "left_out", None)  # Only on rank 0
    if left_out is None:
        return {}
    print(left_out.words, flush=True)
    if left_out.is_kept:
        held: dict[str, torch.Tensor] = {}
        for path in set(left_out.files.values()):
            held |= load_state_dict(path)
        return {name: held[name].clone() for name in left_out.files}
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        if getattr(model.config, key, None):
            setattr(model.config, key, 0)  # No program may look for such layers.
    return {}
