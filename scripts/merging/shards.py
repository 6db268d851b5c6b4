# SPDX-License-Identifier: Apache-2.0
"""Safetensors files of a model, read and written shard by shard."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.utils import cached_file

from exits import Exit, first_line, stop
from merging.disk import writing_to

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Shard:
    """A file with some of a model's tensors.

    Attributes:
        names: of its tensors, in the order of the file.
        num_bytes: of its tensors.
    """

    path: Path
    names: tuple[str, ...]
    num_bytes: int

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of each tensor."""
        with safe_open(self.path, "pt") as file:
            for name in self.names:
                yield name, file.get_tensor(name)


@dataclass(frozen=True)
class Files:
    """The files of a model.

    Attributes:
        shards: in the order of their names.
        has_index: whether an index names the tensors of each file.
    """

    shards: tuple[Shard, ...]
    has_index: bool

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        found: set[str] = set()
        for shard in self.shards:
            found.update(shard.names)
        return frozenset(found)

    def read_tensor(self, name: str) -> torch.Tensor:
        """Return one tensor."""
        for shard in self.shards:
            if name in shard.names:
                with safe_open(shard.path, "pt") as file:
                    return file.get_tensor(name)
        raise KeyError(name)


def find_files(model: str, revision: str) -> Files:
    """Return the safetensors files of a folder or hub id.

    Raises SystemExit with 65 if a folder has none or they are damaged, with 69 without the hub.
    """
    index = locate(model, revision, INDEX)
    if index is None:
        single = locate(model, revision, SINGLE)
        if single is None:
            stop(Exit.DATA, f"{model}: has no {SINGLE}; save the base as safetensors first")
        return Files((open_shard(single),), has_index=False)
    weight_map = read_index(index)
    shards = []
    for name in sorted(set(weight_map.values())):
        path = locate(model, revision, name)
        if path is None:
            stop(Exit.DATA, f"{model}: lacks {name}, which its {INDEX} names")
        shards.append(open_shard(path))
    files = Files(tuple(shards), has_index=True)
    missing = sorted(weight_map.keys() - files.names)
    if missing:
        stop(Exit.DATA, f"{model}: no file has {missing[0]}, which its {INDEX} names")
    return files


def locate(model: str, revision: str, name: str) -> Path | None:
    """Return the path of a file of a folder or hub id, or None if there is no such file."""
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.is_file() else None
    try:
        found = cached_file(
            model, name, revision=revision, _raise_exceptions_for_missing_entries=False
        )
    except OSError as error:
        stop(Exit.NO_HUB, f"{model}: not from the hub: {first_line(error)}")
    return None if found is None else Path(found)


def read_index(path: Path) -> dict[str, str]:
    """Return {tensor: file} of an index. Raises SystemExit with 65 if it is not one."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, LookupError, TypeError):
        stop(Exit.DATA, f"{path}: not JSON with a weight_map")


def open_shard(path: Path) -> Shard:
    """Return a file's tensors by its header. Raises SystemExit with 65 if it is damaged."""
    num_bytes = 0
    try:
        with safe_open(path, "pt") as file:
            names = tuple(file.keys())
            for name in names:
                num_bytes += bytes_of(file.get_slice(name))
    except (OSError, SafetensorError) as error:
        stop(Exit.DATA, f"{path}: incomplete or damaged ({first_line(error)}); copy the file again")
    return Shard(path, names, num_bytes)


def bytes_of(tensor: Any) -> int:
    """Return the bytes of a tensor of which only the header was read."""
    size = int(torch.Size(tensor.get_shape()).numel())
    bits = int("".join(filter(str.isdigit, tensor.get_dtype().partition("_")[0])) or 8)
    return size * bits // 8


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> int:
    """Write a file of tensors and return how many bytes the tensors have.

    Raises SystemExit with 73 if it cannot be written.
    """
    num_bytes = 0
    contiguous = {}
    for name, tensor in tensors.items():
        contiguous[name] = tensor.contiguous()
        num_bytes += tensor.numel() * tensor.element_size()
    with writing_to(path):
        save_file(contiguous, path, metadata={"format": "pt"})
    return num_bytes


def write_index(path: Path, weight_map: Mapping[str, str], num_bytes: int) -> None:
    """Write the index of several files. Raises SystemExit with 73."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    with writing_to(path):
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
