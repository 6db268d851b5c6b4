# SPDX-License-Identifier: Apache-2.0
"""The folder that `from_pretrained` loads: its weights, collected on rank 0 from all ranks' boxes.

Rank 0 holds the model in its dtype, and the other ranks nothing but what they train with. All files
are staged and flushed before an earlier result is removed, and the one by which `from_pretrained`
finds the weights appears last. So a folder has all of its weights, or none that it finds.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Collection, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils.other import extract_model_from_parallel
from transformers.core_model_loading import revert_weight_conversion

from core import workarounds
from core.boxes import LocalBox, boxes_of, clean_name
from core.checkpoint import flush, gather, let_others_read, make_patient_group
from core.exits import End, Exit
from core.state import free_whole_weights, fsdp1_slices
from core.weights import read_left_out

WEIGHTS = re.compile(r"model(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors")
ADAPTERS = "adapter_model.safetensors"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
STAGING = "model.staging"
LAYER = re.compile(r"^.*?\.\d+\.")  # in the names of weights


def save_model(
    accelerator: Accelerator,
    model: Any,
    processor: Any,
    output_dir: str,
    stop_tokens: Collection[int] = (),
    config: Any = None,
    group: Any = None,
) -> None:
    """Write the folder that `from_pretrained` loads: that of transformers, or peft's for adapters.

    Every rank takes part, and rank 0 writes. If it cannot be written, all ranks end with 73.

    Args:
        model: as `prepare` returned it. It cannot be trained further on rank 0, where FSDP1's
            wrappers are removed from it if it has adapters.
        processor: the tokenizer or image processor that belongs to the model.
        stop_tokens: those that the model was trained to end its texts with, which the generation
            config of a whole model is to list. A folder of adapters has none.
        config: is written too: a folder of adapters has the names of the classes only there.
        group: of `make_patient_group`, which makes one for each call without it.
    """
    unwrapped: Any = extract_model_from_parallel(model, keep_torch_compile=False)
    group = group or make_patient_group()
    has_adapters = hasattr(unwrapped, "peft_config")
    weights = collect(boxes_of_weights(model, names_of_saved(model, unwrapped)), group)
    problem = None
    if accelerator.is_main_process:
        try:
            with replacing_result(Path(output_dir)) as staging:
                if has_adapters:
                    workarounds.remove_fsdp1_wrappers(unwrapped)
                    unwrapped.save_pretrained(staging, state_dict=weights)
                    (staging / "README.md").unlink()  # peft's, which has no words
                else:
                    list_stop_tokens(unwrapped, stop_tokens)
                    save_whole(unwrapped, staging, weights)
                processor.save_pretrained(staging)
                if config is not None:
                    config.save_pretrained(staging)
        except Exception as error:  # The tokenizers package raises no other kind on a full disk
            problem = str(error)
    problem = gather(problem, group)[0]
    if problem is not None:
        raise End(Exit.CANNOT_WRITE, f"the model could not be written: {problem}")


# ---- Collect ----
def names_of_saved(model: Any, unwrapped: Any) -> set[str]:
    """Return the names of the weights that belong into files: of adapters only what is trained."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    if hasattr(unwrapped, "peft_config"):
        return {clean_name(name) for name, weight in weights.items() if weight.requires_grad}
    return set(map(clean_name, weights)) - {*getattr(unwrapped, "all_tied_weights_keys", {})}


def boxes_of_weights(model: Any, names: Collection[str]) -> list[LocalBox]:
    """Return this rank's boxes of the weights of these names, and of the buffers that are saved."""
    free_whole_weights(model)  # Before the weights are looked up: it replaces them
    slices = fsdp1_slices(model)
    boxes: list[LocalBox] = []
    for full_name, weight in model.named_parameters(remove_duplicate=False):
        name = clean_name(full_name)
        if name not in names:
            continue
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
    """Yield (name, buffer) of the buffers in files, in their own dtypes, which FSDP1 remembers."""
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
    facts = {(box.name, box.start): (box.shape, box.part.shape, box.part.dtype) for box in boxes}
    whole: dict[str, torch.Tensor] = {}
    known = set()
    for sender, found in enumerate(gather(facts, group)):
        for key, (shape, sizes, dtype) in found.items():
            if key in known:
                continue
            known.add(key)
            if rank == sender > 0:
                dist.send(own[key].cpu().contiguous(), 0, group=group)
            if rank > 0:
                continue
            part = own[key].cpu() if sender == 0 else torch.empty(sizes, dtype=dtype)
            if sender > 0:
                dist.recv(part, sender, group=group)
            name, start = key
            if part.shape == shape:
                whole[name] = part
                continue
            target = whole.setdefault(name, torch.empty(shape, dtype=dtype))
            place = zip(start, sizes, strict=True)
            target[tuple(slice(first, first + size) for first, size in place)] = part
    return whole


# ---- Write ----
def has_result(folder: Path) -> bool:
    """Return whether a folder has all weights of a finished run, of which the index is last."""
    return any((folder / name).is_file() for name in (ADAPTERS, SINGLE, INDEX))


@contextlib.contextmanager
def replacing_result(folder: Path) -> Generator[Path]:
    """Give a folder for the files of a result, and then put them in the place of an earlier one.

    That is unchanged if anything is raised meanwhile, as where a file cannot be written.
    """
    staging = folder / STAGING
    shutil.rmtree(staging, ignore_errors=True)  # Left over from a run that was killed
    staging.mkdir(parents=True)
    try:
        yield staging
        for path in staging.rglob("*"):
            if path.suffix == ".safetensors":
                let_others_read(path)
            flush(path)
    except Exception:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    # First the index, by which the others are found
    (folder / INDEX).unlink(missing_ok=True)
    for path in folder.iterdir():
        if WEIGHTS.fullmatch(path.name):
            path.unlink()
    files = sorted(staging.iterdir(), key=lambda path: path.suffix == ".safetensors")
    for path in sorted(files, key=lambda path: path.name == INDEX):  # Weights, then their index
        if path.is_dir():
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
        else:
            os.replace(path, folder / path.name)
    flush(folder)
    shutil.rmtree(staging)


def save_whole(model: Any, folder: Path, weights: dict[str, torch.Tensor], **options: Any) -> None:
    """Have a whole model of transformers write its folder, with what the result keeps of its base.

    Args:
        weights: by the names that the model has for them; the dict is emptied.
        options: further arguments of save_pretrained.
    """
    known = getattr(model, "_weight_conversions", None)
    if known is not None:  # Under ZeRO-3 transformers also notes those that renamed nothing
        model._weight_conversions = [one for one in known if one.was_used()]
    weights |= read_left_out(model)
    converted = by_names_of_files(model, weights)
    model.save_pretrained(folder, state_dict=converted, save_original_format=False, **options)


def by_names_of_files(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights by the names and in the shapes that files have, and empty the dict of them.

    transformers copies the gate and up projections of experts: here of one layer after another.
    """
    layers: dict[str, list[str]] = {}
    for name in weights:
        layers.setdefault("".join(LAYER.findall(name)), []).append(name)
    found = {}
    for names in layers.values():
        found |= revert_weight_conversion(model, {name: weights.pop(name) for name in names})
    return found


def list_stop_tokens(model: Any, stop_tokens: Collection[int]) -> None:
    """Have the generation config of a whole model list these tokens, and say so if it did not."""
    if not stop_tokens:  # The model of a classification has no generation config
        return
    known = model.generation_config.eos_token_id
    listed = {known} if isinstance(known, int) else {*(known or ())}
    if not listed.issuperset(stop_tokens):
        model.generation_config.eos_token_id = sorted(listed.union(stop_tokens))
        print(f"generation_config.json: eos_token_id was {known}, and now has all that end answers")
