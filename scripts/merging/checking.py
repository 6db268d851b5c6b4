# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a merged folder, by its files, before and while a model is loaded from it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from exits import Exit, first_line, stop
from generation.loading import LOAD_ERRORS
from merging.shards import Files
from merging.skeleton import Skeleton, build_without_weights, shorten

NEEDED = ("config.json", "generation_config.json")


def find_problems_of_files(folder: Path, files: Files) -> Iterator[str]:
    """Yield what is wrong with the files of a merged folder, by their names and headers."""
    for name in NEEDED:
        if not (folder / name).is_file():
            yield f"{name} is missing"
    if (folder / "adapter_config.json").exists():
        yield "adapter_config.json is in it, so that the adapters would be applied twice"
    names = [name for shard in files.shards for name in shard.names]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        yield f"several files have {shorten(twice)}"
    for parameter, source in read_ties(folder).items():
        if parameter in names and source in names:
            yield f"{parameter} is written although it is tied to {source}"


def read_ties(folder: Path) -> dict[str, str]:
    """Return {parameter: the one it is tied to} by the config of a folder.

    Raises SystemExit with 65 if the config is not one of a causal language model.
    """
    try:
        return Skeleton(build_without_weights(str(folder)), (), {}).tied
    except LOAD_ERRORS as error:
        stop(Exit.DATA, f"{folder}: its config.json cannot be used: {first_line(error)}")


def load_folder(folder: Path, device: str) -> tuple[Any, list[str]]:
    """Return the model of a merged folder in its own dtype, and what is wrong with its tensors.

    Raises SystemExit with 65 if it cannot be loaded.
    """
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto",
            device_map=device,
            output_loading_info=True,
            trust_remote_code=False,
        )
    except LOAD_ERRORS as error:
        stop(Exit.DATA, f"{folder}: cannot be loaded: {first_line(error)}")
    problems = []
    for key, what in (
        ("missing_keys", "lacks"),
        ("unexpected_keys", "has unknown tensors:"),
        ("mismatched_keys", "has tensors of another shape:"),
    ):
        names = sorted(str(name) for name in report.get(key) or ())
        if names:
            problems.append(f"the folder {what} {shorten(names)}")
    return model.eval(), problems


def load_tokenizer(name: str, revision: str = "main") -> Any:
    """Return a tokenizer that pads on the left.

    Raises SystemExit with 65 if a folder has none, with 69 without the hub.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            name, padding_side="left", revision=revision, trust_remote_code=False
        )
    except LOAD_ERRORS as error:
        code = Exit.DATA if Path(name).is_dir() else Exit.NO_HUB
        stop(code, f"{name}: its tokenizer cannot be loaded: {first_line(error)}")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
