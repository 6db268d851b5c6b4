# SPDX-License-Identifier: Apache-2.0
"""The weights of the folder that `from_pretrained` loads, each written by the rank that owns it.

    OUTPUT_DIR/model-00001-of-00004.safetensors   the tensors of one owner, under the names that
                                                  transformers gives them in files
               model.safetensors.index.json       which file has which tensor; written last

With one file it is model.safetensors, and there is no index. All files are staged, and those with
weights flushed, before an earlier result is removed, and the one by which `from_pretrained` finds
the weights appears last. So a folder has all of its weights, or none that it finds.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from components.checkpoint import flush, give_usual_mode
from components.deepspeed_state import clean_name, zero3_weight_entries
from components.folder import INDEX, SINGLE
from components.fsdp1_state import fsdp1_weight_entries, is_fsdp1
from components.long_calls import call_on_every_rank
from components.owners import Entry, largest_first, share_out
from components.state import entries_of, free_whole_weights
from components.status import write_file
from components.strategy import Strategy
from components.write_errors import WriteError

SHARD = re.compile(r"model-[0-9]{5,}-of-[0-9]{5,}\.safetensors")
STAGING = "model.staging"
REST = "rest"  # The folder in it for what belongs to the weights
LARGEST_FILE = "50GB"  # transformers' own bound: save_pretrained, max_shard_size
# About the bytes that an owner has at least, so that a small model stays one file
SMALLEST_SHARE = 2**26
NUMBER = re.compile(r"\.[0-9]+\.")

Report = tuple[dict[str, list[str]], int, int, str | None]


# ---- Gather ----
def gather_share(accelerator: Accelerator, model: Any, unwrapped: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of the result that this rank owns, by their names in files.

    Every rank takes part. The shares are disjoint, and balanced by bytes. A rank needs memory for
    its share and for about two of the largest groups (`group_entries`), what is on its device not
    counted. Most groups are one tensor. Where files join tensors, a group is a whole layer, or all
    that is in no layer, and is held both as the model has it and as the files do.

    Args:
        model: as `prepare` returned it, or a part of a pipeline.
        unwrapped: the same of transformers, without wrappers.
    """
    free_whole_weights(model)
    # Where only rank 0 has read the files, the others do not know the names that they had.
    known = getattr(unwrapped, "_weight_conversions", None)
    if known is not None:  # Under ZeRO-3 transformers also notes those that renamed nothing.
        known = [conversion for conversion in known if conversion.was_used()]
    unwrapped._weight_conversions = broadcast_object_list([known])[0]

    entries = largest_first(entries_of_model(accelerator, model, unwrapped))
    groups = group_entries(unwrapped, entries)
    owners = owners_of_groups(accelerator, groups, set(dict(saved_buffers(model))))
    share: dict[str, torch.Tensor] = {}
    for group, members in groups.items():
        is_own = owners[group] == accelerator.process_index
        parts = {}
        for entry in members:
            tensor = entry.gather(owners[group])
            if is_own:
                parts[entry.name] = tensor.cpu()
            del tensor  # Before the next one is gathered
        if is_own:
            share |= as_in_files(unwrapped, parts)
    return share


def entries_of_model(accelerator: Accelerator, model: Any, unwrapped: Any) -> Iterator[Entry]:
    """Yield an entry for each weight and buffer of a model that belongs into its files.

    Every rank takes part. Tied weights are left out but for the name that they are tied to.
    """
    tied = getattr(unwrapped, "all_tied_weights_keys", {})
    weights = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if clean_name(name) not in tied:
            weights[clean_name(name)] = weight
    yield from entries_to_save(accelerator, model, weights)


def entries_to_save(
    accelerator: Accelerator, model: Any, weights: Mapping[str, torch.Tensor]
) -> Iterator[Entry]:
    """Yield an entry for each of these weights of a model, and for each buffer that is saved.

    Every rank takes part.

    Args:
        weights: by name, tied ones once.
    """
    if is_fsdp1(model):
        yield from fsdp1_weight_entries(model, weights)
    elif Strategy.of(accelerator).zero_stage == 3:
        yield from zero3_weight_entries(weights)
    else:
        yield from entries_of(weights.items())
    yield from entries_of(saved_buffers(model))


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


def group_entries(unwrapped: Any, entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Return the entries by what must have the same owner, in the same order on every rank.

    Most names are groups of their own. Where the files of a model have one tensor for several of
    its weights, those of a layer stay together, and so do those that are in no layer. What
    transformers is not to save is left out.
    """
    is_each_separate = has_no_joined_tensors(unwrapped)
    ignored = set(unwrapped._keys_to_ignore_on_save or ())
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        group = entry.name if is_each_separate else layer_of(entry.name)
        if entry.name not in ignored:
            groups.setdefault(group, []).append(entry)
    return groups


def layer_of(name: str) -> str:
    """Return what the names in a layer have in common, up to its number; "" outside of layers."""
    number = NUMBER.search(name)
    return "" if number is None else name[: number.end()]


def has_no_joined_tensors(unwrapped: Any) -> bool:
    """Return whether each tensor in the files of a model is made of one of its weights.

    Mixtral's are: the model has the experts of a layer in one weight, and the files have each
    expert for itself. NomicBERT's are not: the files have one tensor for query, key and value.
    """
    conversions = unwrapped._weight_conversions
    if conversions is None:
        conversions = get_model_conversion_mapping(unwrapped, add_legacy=False)
    for conversion in conversions:
        if isinstance(conversion, WeightConverter) and len(conversion.target_patterns) > 1:
            return False
    return True


def owners_of_groups(
    accelerator: Accelerator, groups: Mapping[str, Sequence[Entry]], buffers: Collection[str]
) -> dict[str, int]:
    """Return the rank that owns each group. Every rank takes part.

    What a stage of a pipeline has goes to one of its ranks. Weights are the same on all ranks that
    have them, but buffers need not be: BatchNorm has statistics of each rank's own rows. So a group
    with a buffer is owned by the first rank that has the group, as in a checkpoint.

    Args:
        buffers: the names of the buffers in the groups.
    """
    own_sizes = {}
    for group, entries in groups.items():
        own_sizes[group] = sum(entry.nbytes for entry in entries)
    sizes: dict[str, int] = {}
    holders: dict[str, list[int]] = {}
    for rank, sizes_of_rank in enumerate(gather_object([own_sizes])):
        sizes |= sizes_of_rank
        for group in sizes_of_rank:
            holders.setdefault(group, []).append(rank)
    for group in gather_object(groups_with(buffers, groups)):
        holders[group] = holders[group][:1]
    return share_out(sizes, accelerator.num_processes, holders, SMALLEST_SHARE)


def groups_with(names: Collection[str], groups: Mapping[str, Sequence[Entry]]) -> list[str]:
    """Return the groups in which there is an entry of one of these names."""
    found = []
    for group, entries in groups.items():
        if any(entry.name in names for entry in entries):
            found.append(group)
    return found


def as_in_files(unwrapped: Any, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with the names and shapes that transformers gives them in files."""
    reverted = revert_weight_conversion(unwrapped, parts)
    return {name: tensor.detach().contiguous() for name, tensor in reverted.items()}


# ---- Write ----
def write_shards(
    accelerator: Accelerator,
    folder: Path,
    share: Mapping[str, torch.Tensor],
    write_rest: Callable[[Path], None],
) -> str | None:
    """Write the weights of a model into its folder. Every rank takes part.

    Args:
        share: the tensors that this rank owns, as `gather_share` returns them.
        write_rest: writes the other files into the folder that it is given, on rank 0.

    Returns:
        On every rank why they could not be written, or None. If a file could not be written, an
        earlier result is unchanged.
    """
    staging = folder / STAGING
    problem = None
    if accelerator.is_main_process:
        problem = stage_result(staging)
    problem = broadcast_object_list([problem])[0]
    if problem is not None:
        return problem
    files = files_of_share(share)
    counts = gather_object([len(files)])
    names = names_of_files(sum(counts))
    first = sum(counts[: accelerator.process_index])
    own = dict(zip(names[first : first + len(files)], files, strict=True))
    reports = call_on_every_rank(accelerator, partial(write_files, staging, own, share))
    if accelerator.is_main_process:
        problem = publish_result(folder, reports, write_rest)
    return broadcast_object_list([problem])[0]


def write_on_rank_0(
    accelerator: Accelerator, folder: Path, write_rest: Callable[[Path], None]
) -> str | None:
    """Write a result of which rank 0 has everything, such as adapters. Every rank takes part.

    Args:
        write_rest: writes its files into the folder that it is given, on rank 0.

    Returns:
        As `write_shards` does.
    """
    problem = None
    if accelerator.is_main_process:
        problem = stage_result(folder / STAGING)
        if problem is None:
            problem = publish_result(folder, [], write_rest)
    return broadcast_object_list([problem])[0]


def files_of_share(share: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of the tensors of each of this rank's files."""
    if not share:
        return []
    cut = split_torch_state_dict_into_shards(dict(share), max_shard_size=LARGEST_FILE)
    return list(cut.filename_to_tensors.values())


def names_of_files(number: int) -> list[str]:
    """Return the names of the files of a model."""
    if number == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{number:05d}.safetensors" for i in range(1, number + 1)]


def stage_result(staging: Path) -> str | None:
    """Make the staging folder. Returns why that failed, or None."""
    try:
        shutil.rmtree(staging, ignore_errors=True)  # left over from a run that was killed
        staging.mkdir(parents=True)
    except OSError as error:
        return str(WriteError.of(error))
    return None


def write_files(
    staging: Path, files: Mapping[str, Sequence[str]], share: Mapping[str, torch.Tensor]
) -> Report:
    """Write this rank's tensors, and flush them to the disk.

    Args:
        files: {file: the names of its tensors}.

    Returns:
        The files, the bytes and the elements in them, and why they could not be written or None.
    """
    nbytes = sum(tensor.nbytes for tensor in share.values())
    elements = sum(tensor.numel() for tensor in share.values())
    problem = None
    try:
        for file, names in files.items():
            save_file({name: share[name] for name in names}, staging / file, {"format": "pt"})
            give_usual_mode(staging / file)
            flush(staging / file)
    except (OSError, SafetensorError) as error:
        problem = str(WriteError.of(error))
    return {file: list(names) for file, names in files.items()}, nbytes, elements, problem


def publish_result(
    folder: Path, reports: Sequence[Report], write_rest: Callable[[Path], None]
) -> str | None:
    """Write the rest and give all files their names, on rank 0, if all owners have written.

    An earlier result is removed once all files of the new one are written, so that a full disk
    cannot leave a folder with neither.

    Returns:
        Why that failed, or None.
    """
    staging = folder / STAGING
    files: dict[str, list[str]] = {}
    for written, _, _, problem in reports:
        if problem is not None:
            shutil.rmtree(staging, ignore_errors=True)
            return problem
        files |= written
    rest = staging / REST
    try:
        rest.mkdir()
        write_rest(rest)
        for weights in rest.glob("*.safetensors"):  # Those of adapters
            give_usual_mode(weights)
        if len(files) > 1:
            write_file(staging / INDEX, index_of(files, reports))
    except Exception as error:  # The tokenizers package raises no other kind if the disk is full.
        shutil.rmtree(staging, ignore_errors=True)
        return str(WriteError.of(error))
    try:
        replace_result(folder, files)
    except OSError as error:
        return str(WriteError.of(error))
    return None


def replace_result(folder: Path, files: Iterable[str]) -> None:
    """Replace an earlier result by the staged one: first all but the weights, the index last.

    Args:
        files: those with the weights.

    Raises:
        OSError: if that fails; what could not be moved is still staged.
    """
    staging = folder / STAGING
    for path in weights_in(folder):
        path.unlink()
    shutil.copytree(staging / REST, folder, copy_function=os.replace, dirs_exist_ok=True)
    for file in files:
        os.replace(staging / file, folder / file)
    if (staging / INDEX).exists():
        os.replace(staging / INDEX, folder / INDEX)
    flush(folder)
    shutil.rmtree(staging)


def weights_in(folder: Path) -> list[Path]:
    """Return the files of an earlier result, that by which the others are found first."""
    names = [path.name for path in folder.iterdir() if SHARD.fullmatch(path.name)]
    return [folder / name for name in (INDEX, SINGLE, *names) if (folder / name).is_file()]


def index_of(files: Mapping[str, Sequence[str]], reports: Sequence[Report]) -> str:
    """Return the text of the index, which transformers reads."""
    places = {}
    for file, names in files.items():
        for name in names:
            places[name] = file
    size = sum(nbytes for _, nbytes, _, _ in reports)
    elements = sum(elements for _, _, elements, _ in reports)
    metadata = {"total_parameters": elements, "total_size": size}
    index = {"metadata": metadata, "weight_map": places}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"
