# SPDX-License-Identifier: Apache-2.0
"""The folder that `from_pretrained` loads: its weights, collected on rank 0 from all ranks' boxes.

Rank 0 holds the model in its dtype, and the other ranks nothing but what they train with. All files
are staged and flushed before an earlier result is removed, and the one by which `from_pretrained`
finds the weights appears last. So a folder has all of its weights, or none that it finds.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from core.checkpoint import UMASK, flush, gather
from core.state import LocalBox, boxes_of, clean_name, free_whole_weights, fsdp1_slices

WEIGHTS = re.compile(r"model(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors")
INDEX = "model.safetensors.index.json"
STAGING = "model.staging"
LARGEST_FILE = "50GB"  # transformers' own bound: save_pretrained, max_shard_size


# ---- Collect ----
def adapter_weights(model: Any, group: Any) -> dict[str, torch.Tensor]:
    """Return on rank 0 what is trained, by name: adapters, and modules trained whole beside them.

    Every rank takes part.

    Args:
        model: as `prepare` returned it.
        group: of all ranks, whose calls may take long.
    """
    trained = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            trained[clean_name(name)] = weight
    return collect(boxes_of_weights(model, trained), group)


def model_weights(model: Any, unwrapped: Any, group: Any) -> dict[str, torch.Tensor]:
    """Return on rank 0 all weights of a model, by the names that its files have.

    Every rank takes part.

    Args:
        model: as `prepare` returned it, or a part of a pipeline.
        unwrapped: the same of transformers, without wrappers.
        group: of all ranks, whose calls may take long.
    """
    left_out = {*getattr(unwrapped, "all_tied_weights_keys", {})}
    left_out |= {*(unwrapped._keys_to_ignore_on_save or ())}
    weights = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if clean_name(name) not in left_out:
            weights[clean_name(name)] = weight
    whole = collect(boxes_of_weights(model, weights), group)
    if not whole:
        return whole
    known = getattr(unwrapped, "_weight_conversions", None)
    if known is not None:  # Under ZeRO-3 transformers also notes those that renamed nothing
        unwrapped._weight_conversions = [one for one in known if one.was_used()]
    reverted = revert_weight_conversion(unwrapped, whole)
    return {name: tensor.detach().contiguous() for name, tensor in reverted.items()}


def boxes_of_weights(model: Any, weights: Mapping[str, Any]) -> list[LocalBox]:
    """Return this rank's boxes of weights, trained or frozen, and of the buffers that are saved."""
    free_whole_weights(model)
    slices = fsdp1_slices(model)
    boxes: list[LocalBox] = []
    for name, weight in weights.items():
        if hasattr(weight, "ds_tensor"):
            from core.zero import slice_of_third

            part = slice_of_third(weight)
            boxes += boxes_of(name, weight.ds_tensor[: part.length], part)
        else:
            boxes += boxes_of(name, weight, slices.get(weight))
    for name, buffer in saved_buffers(model):
        boxes += boxes_of(name, buffer)
    return boxes


def saved_buffers(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) of the buffers that belong into files, in the dtype they have there.

    FSDP1 casts buffers to the precision in which it computes, and remembers their own.
    """
    own_dtypes = getattr(model, "_buffer_name_to_orig_dtype", {})
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                name = clean_name(name)
                yield name, buffer.to(own_dtypes.get(name, buffer.dtype))


def collect(boxes: Sequence[LocalBox], group: Any) -> dict[str, torch.Tensor]:
    """Return whole tensors by name on rank 0, {} on other ranks. Every rank takes part.

    Each box is sent by the first rank that has it, one after another.
    """
    rank = 0 if group is None else dist.get_rank(group)
    own = {(box.name, box.start): box.part for box in boxes}
    described = []
    for box in boxes:
        described.append((box.name, box.shape, box.start, tuple(box.part.shape), box.part.dtype))
    whole: dict[str, torch.Tensor] = {}
    known = set()
    for sender, found in enumerate(gather(described, group)):
        for name, shape, start, sizes, dtype in found:
            if (name, start) in known:
                continue
            known.add((name, start))
            if rank == 0:
                if sender == 0:
                    data = own[name, start].cpu()
                else:
                    data = receive(sizes, dtype, sender, group)
                if sizes == shape:
                    whole[name] = data
                    continue
                target = whole.setdefault(name, torch.empty(shape, dtype=dtype))
                place = zip(start, sizes, strict=True)
                target[tuple(slice(first, first + size) for first, size in place)] = data
            elif rank == sender:
                data = own[name, start].cpu().contiguous()
                dist.send(data.view(-1).view(torch.uint8), 0, group=group)
    return whole


def receive(sizes: Sequence[int], dtype: torch.dtype, sender: int, group: Any) -> torch.Tensor:
    """Return a tensor of these sizes that another rank sends, as bytes, to this one."""
    data = torch.empty(sizes, dtype=dtype)
    dist.recv(data.view(-1).view(torch.uint8), sender, group=group)
    return data


# ---- Write ----
def write_result(
    folder: Path, weights: Mapping[str, torch.Tensor], write_rest: Callable[[Path], None]
) -> None:
    """Write a result, on rank 0, in the place of an earlier one.

    Args:
        weights: of a whole model, by their names in files; {} if `write_rest` writes them.
        write_rest: writes all other files into the folder that it is given.

    Raises:
        Exception: if a file cannot be written; an earlier result is then unchanged.
    """
    staging = folder / STAGING
    shutil.rmtree(staging, ignore_errors=True)  # Left over from a run that was killed
    staging.mkdir(parents=True)
    try:
        write_rest(staging)
        if weights:
            write_weights(staging, weights)
        for path in staging.iterdir():
            if path.suffix == ".safetensors":
                path.chmod(0o666 & ~UMASK)  # safetensors lets only the owner read
                flush(path)
    except Exception:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    # First the index, by which the others are found
    (folder / INDEX).unlink(missing_ok=True)
    for path in folder.iterdir():
        if WEIGHTS.fullmatch(path.name):
            path.unlink()
    for path in sorted(staging.iterdir(), key=rank_of_file):
        if path.is_dir():
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
        else:
            os.replace(path, folder / path.name)
    flush(folder)
    shutil.rmtree(staging)


def write_weights(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Write the weights of a model, and the index if they do not fit into one file."""
    files = split_torch_state_dict_into_shards(dict(weights), max_shard_size=LARGEST_FILE)
    for file, names in files.filename_to_tensors.items():
        save_file({name: weights[name] for name in names}, folder / file, {"format": "pt"})
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def rank_of_file(path: Path) -> int:
    """Return when a file takes its place: weights after all others, and their index last."""
    if path.name == INDEX:
        return 2
    return int(path.suffix == ".safetensors")
