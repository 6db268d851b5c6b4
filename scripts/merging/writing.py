# SPDX-License-Identifier: Apache-2.0
"""The merged folder. It is written beside its place, and moved there when it is complete.

A merge that was killed leaves only a folder whose name ends in `.unfinished`. The next merge to the
same place removes it. It knows by a marker file that a merge made the folder, and removes no other.
"""

import json
import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from exits import Exit, first_line, stop
from generation.loading import LOAD_ERRORS
from merging import shards
from merging.adapter import WEIGHTS, AdapterFolder
from merging.disk import writing_to
from merging.plan import Plan, ReadTensor, merge_tensor
from merging.receipt import MARKER

UNFINISHED = ".unfinished"  # ending of the staging folder's name
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*.model",
)
LICENSE_PATTERNS = ("LICENSE*", "NOTICE*")
GENERATION_CONFIG = "generation_config.json"


def staging_of(output: Path) -> Path:
    """Return the folder in which a merge is written until it is complete."""
    return output.with_name(output.name + UNFINISHED)


def check_output(output: Path) -> None:
    """Exit with 73 if something is at the place of the merged folder."""
    if output.exists() or output.is_symlink():
        stop(Exit.CANNOT_WRITE, f"{output} exists; name a new folder, or remove it")


def start_staging(output: Path) -> Path:
    """Return a new staging folder, in the place of one that a merge left behind.

    Raises SystemExit with 73 if it cannot be written, or if something else is at its place.
    """
    folder = staging_of(output)
    with writing_to(folder):
        if folder.exists() or folder.is_symlink():
            if not is_left_behind(folder):
                stop(Exit.CANNOT_WRITE, f"{folder} is not of a merge; move it, or name another one")
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        (folder / MARKER).touch()
    return folder


def is_left_behind(folder: Path) -> bool:
    """Return whether a merge made a staging folder: it has the marker, or nothing at all yet."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = [path.name for path in folder.iterdir()]
    return MARKER in names or not names


def finish(staging: Path, output: Path) -> None:
    """Move a complete staging folder to its place. Raises SystemExit with 73."""
    check_output(output)
    with writing_to(output):
        os.replace(staging, output)
        (output / MARKER).unlink(missing_ok=True)


# ---- Weights ----
def write_weights(
    folder: Path,
    adapter: AdapterFolder,
    plan: Plan,
    files: shards.Files,
    use_quantized: bool,
    dtype: torch.dtype | None,
) -> None:
    """Write the merged tensors: a file for each file of the base, with the same names.

    In memory are the tensors of one file, and what one adapter adds to its parameter.

    Args:
        use_quantized: whether the values of the quantized base take the place of the base's own.
        dtype: of the written weights; None keeps that of each tensor.
    """
    weight_map = {}
    num_bytes = 0
    with ExitStack() as stack:
        adapter_file: Any = stack.enter_context(safe_open(adapter.path / WEIGHTS, "pt"))
        merger = Merger(adapter, plan, files, adapter_file.get_tensor, use_quantized, dtype)
        for shard in files.shards:
            tensors = merger.merge(shard)
            num_bytes += shards.write_shard(folder / shard.path.name, tensors)
            for name in tensors:
                weight_map[name] = shard.path.name
            del tensors
    if files.has_index:
        shards.write_index(folder / shards.INDEX, weight_map, num_bytes)


class Merger:
    """Merges the tensors of a base, file by file.

    Args:
        read: returns a tensor of the adapters.
        use_quantized, dtype: as in `write_weights`.
    """

    def __init__(
        self,
        adapter: AdapterFolder,
        plan: Plan,
        files: shards.Files,
        read: ReadTensor,
        use_quantized: bool,
        dtype: torch.dtype | None,
    ) -> None:
        self._adapter = adapter
        self._plan = plan
        self._files = files
        self._read = read
        self._use_quantized = use_quantized
        self._dtype = dtype

    def merge(self, shard: shards.Shard) -> dict[str, torch.Tensor]:
        """Return the tensors of one file, merged."""
        tensors = {}
        dtypes = {}
        for name, tensor in shard.read():
            dtypes[name] = self._dtype_of(tensor)
            if not self._is_double(name, tensor):
                tensors[name] = tensor
        for new, source in self._plan.untied.items():
            if source in tensors:
                tensors[new] = tensors[source].clone()
                dtypes[new] = dtypes[source]
        for name in tensors:
            if name in self._plan.whole:
                replacement = self._read(self._plan.whole[name])
                self._check_shape(name, tensors[name], replacement)
                tensors[name] = replacement
            elif name not in self._plan.targets:
                tensors[name] = self._base_value(name, tensors[name])
            if name not in self._plan.targets:
                tensors[name] = tensors[name].to(dtypes[name])
        self._add_adapters(tensors, dtypes)
        return tensors

    def _add_adapters(
        self, tensors: dict[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """Put merged tensors in the place of those that have adapters, one target after another."""
        targets = {}
        for name in tensors:
            if name in self._plan.targets:
                target = self._plan.targets[name]
                targets[target.parameter] = target
        for target in targets.values():
            for name, delta in self._plan.parts(target, self._read).items():
                if name not in tensors:
                    continue  # It is in another file
                weight = self._base_value(name, tensors[name])
                self._check_shape(name, weight, delta)
                merged = merge_tensor(target, weight, delta, self._read)
                tensors[name] = merged.to(dtypes[name])

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        if self._dtype is None or not tensor.is_floating_point():
            return tensor.dtype
        return self._dtype

    def _base_value(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the base, or what it is after it was quantized."""
        if not self._use_quantized or name not in self._plan.quantized:
            return tensor
        quantization: Any = self._adapter.quantization
        return quantization.round_trip(tensor)

    def _is_double(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is that of another name again, which is written once."""
        source = self._plan.doubled.get(name)
        if source is None:
            return False
        return torch.equal(tensor, self._files.read_tensor(source))

    def _check_shape(self, name: str, weight: torch.Tensor, other: torch.Tensor) -> None:
        if weight.shape != other.shape:
            stop(
                Exit.DATA,
                f"{name} is {list(weight.shape)} in the base, but {list(other.shape)} in "
                f"{self._adapter.path}: another base, or a vocabulary of another size",
            )


# ---- The other files ----
def write_config(
    folder: Path, adapter: AdapterFolder, unties: bool, dtype: torch.dtype | None
) -> None:
    """Write the base's config, changed where the merged model is another.

    Args:
        unties: whether weights that are tied in the base are two in the merged model.
        dtype: as in `write_weights`.
    """
    config = read_json_of_base(adapter, "config.json")
    if config is None:
        stop(Exit.DATA, f"{adapter.base}: has no config.json")
    parts = [config]
    for key in ("text_config", "llm_config"):
        if isinstance(config.get(key), dict):
            parts.append(config[key])
    for part in parts:
        if unties and part.get("tie_word_embeddings", part is config):
            part["tie_word_embeddings"] = False
        for key in ("dtype", "torch_dtype"):
            if dtype is not None and key in part:
                part[key] = str(dtype).removeprefix("torch.")
    write_json(folder / "config.json", config)


def write_generation_config(
    folder: Path, config: dict[str, Any], stop_tokens: Collection[int], tokenizer: Any
) -> None:
    """Write a generation config, with all tokens that end an answer, and with a pad token.

    Args:
        config: that of the base, or of a trained folder; {} if it has none.
    """
    if stop_tokens:
        config["eos_token_id"] = sorted(stop_tokens)
    if config.get("pad_token_id") is None and tokenizer.pad_token_id is not None:
        config["pad_token_id"] = tokenizer.pad_token_id
    write_json(folder / GENERATION_CONFIG, config)


def read_json_of_base(adapter: AdapterFolder, name: str) -> dict[str, Any] | None:
    """Return a JSON file of the base, or None if it has none. Raises SystemExit with 65."""
    path = shards.locate(adapter.base, adapter.revision, name)
    if path is None:
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        stop(Exit.DATA, f"{path}: not a JSON object")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file. Raises SystemExit with 73."""
    with writing_to(path):
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_tokenizer(folder: Path, adapter: AdapterFolder) -> None:
    """Copy the tokenizer and its chat template, byte for byte where they are in a folder.

    Raises SystemExit with 69 without the hub, with 73 if they cannot be written.
    """
    source = Path(adapter.source.tokenizer)
    if source.is_dir():
        copy_files(source, folder, TOKENIZER_PATTERNS)
    else:
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                adapter.source.tokenizer, revision=adapter.revision, trust_remote_code=False
            )
        except LOAD_ERRORS as error:
            stop(Exit.NO_HUB, f"{source}: its tokenizer cannot be loaded: {first_line(error)}")
        with writing_to(folder):
            tokenizer.save_pretrained(folder)
    if Path(adapter.base).is_dir():
        copy_files(Path(adapter.base), folder, LICENSE_PATTERNS)


def copy_files(source: Path, folder: Path, patterns: Collection[str]) -> None:
    """Copy the files of a folder whose names fit one of the patterns. Raises SystemExit with 73."""
    for pattern in patterns:
        for path in sorted(source.glob(pattern)):
            if path.is_file():
                with writing_to(folder / path.name):
                    shutil.copyfile(path, folder / path.name)
