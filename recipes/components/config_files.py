# SPDX-License-Identifier: Apache-2.0
"""Read an accelerate config, with the DeepSpeed JSON it points to, and find its faults by line.

`scripts/check_config.py` does so for any file, launch_file.py for the file that a recipe's
launcher has read. The rules are in config_rules.py. No package but PyYAML is loaded.
"""

import json
import os.path
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from components.accelerate_keys import full_name
from components.config_findings import IGNORED, STOPS, Finding, finding, worst_first
from components.config_reading import value_at, written_in
from components.config_rules import check
from components.yaml_text import UNREADABLE, KeyPath, Positions, find_positions

# The most entries and levels that a config may have; all known keys together have fewer.
ENTRIES = 500
DEPTH = 20
# Keys by which files of other programs are known, if they have none of accelerate's
OWN = ("compute_environment", "distributed_type")
FOREIGN = {
    "base_model": "axolotl",
    "finetuning_type": "LLaMA-Factory",
    "model_name_or_path": "a training script, as TRL's and transformers' read them",
}


# {part of the reason that PyYAML gives for unreadable text: what to do}
HINTS = {
    "'\\t' that cannot start any token": "indent with spaces, since YAML takes no tabs",
    "another document": "keep one of the documents, since accelerate reads one",
    "found unhashable key": "if this is a template, fill it in first",
}


@dataclass
class ConfigFile:
    """A file as written.

    Attributes:
        path: where the file is.
        text: the file as it is written.
        content: the parsed text.
        deepspeed: the DeepSpeed JSON that the file points to; a JSON by itself is its own.
    """

    path: Path
    text: str
    content: dict
    deepspeed: "ConfigFile | None" = None

    @property
    def is_deepspeed_json(self) -> bool:
        """Whether this is a DeepSpeed JSON by itself, to which no YAML points."""
        return self.deepspeed is self

    @cached_property
    def positions(self) -> Positions:
        """Where the keys are in the text. JSON with tabs is not YAML, and gets no positions."""
        try:
            return find_positions(self.text)
        except UNREADABLE:
            return Positions()

    def as_written(self, path: KeyPath) -> KeyPath:
        """Return a path with its key as it is written, which may lack the prefix of its section."""
        *sections, key = path
        section = value_at(self.content, tuple(sections))
        if not isinstance(section, dict) or key in section or len(sections) != 1:
            return path
        written = [other for other in section if full_name(sections[0], other) == key]
        return (*sections, *written) if len(written) == 1 else path

    def line_of(self, path: KeyPath) -> int | None:
        """Return the line, from 1, of a key or of the section that lacks it; None if not known."""
        path = self.as_written(path)
        for length in range(len(path), 0, -1):
            nodes = self.positions.nodes.get(path[:length])
            if nodes is not None:
                return nodes.key.start_mark.line + 1
        return None


def load(path: str | Path) -> ConfigFile:
    """Read a config and the DeepSpeed JSON it points to. Raises ValueError if that fails."""
    path = Path(path)
    file = read(path, as_json=path.suffix == ".json")
    if file.content.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise ValueError(f"{path} is for SageMaker, whose configs are not checked here")
    for key, program in FOREIGN.items():
        if key in file.content and not any(own in file.content for own in OWN):
            raise ValueError(
                f"{path} is not an accelerate config: {key} is of {program}: pass the file that "
                "`accelerate launch --config_file` gets"
            )
    is_for_deepspeed = "zero_optimization" in file.content
    if path.suffix == ".json" and (is_for_deepspeed or "distributed_type" not in file.content):
        file.deepspeed = file
    else:
        file.deepspeed = read_deepspeed(file)
    return file


def read(path: Path, as_json: bool) -> ConfigFile:
    """Read a file of keys and values. Raises ValueError if it cannot be read as one."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if as_json else yaml.safe_load(text)
    except (OSError, *UNREADABLE) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read: {reason}{hint_on(reason)}") from error
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} is not an accelerate config: it has no keys")
    if is_too_large(content):
        size = f"more than {ENTRIES} entries or {DEPTH} levels"
        raise ValueError(f"{path} is not an accelerate config: it has {size}")
    return ConfigFile(path, text, content)


def hint_on(reason: str) -> str:
    """Return what to do about unreadable text, given PyYAML's reason, or ""."""
    for part, hint in HINTS.items():
        if part in reason:
            return f": {hint}"
    return ""


def is_too_large(content: dict) -> bool:
    """Return whether content has more than ENTRIES entries or DEPTH levels.

    Aliases can make a small file expand to a large one, or endlessly. Each level is therefore only
    read until it exceeds the bound.
    """
    entries = 0
    level = [content]
    for _ in range(DEPTH):
        found = list(islice(values_of(level), ENTRIES + 1))
        entries += len(found)
        level = [value for value in found if isinstance(value, dict | list)]
    return bool(level) or entries > ENTRIES


def values_of(parts: Iterable[dict | list]) -> Iterator[Any]:
    """Yield the values in all mappings and lists of a level."""
    for part in parts:
        if isinstance(part, dict):
            yield from part.values()
        else:
            yield from part


def read_deepspeed(file: ConfigFile, folder: str = ".") -> ConfigFile | None:
    """Read the DeepSpeed JSON that a config names, or return None if there is none.

    accelerate looks in the folder where it is started. A file beside the config is read too, for
    `find_faults` to report that accelerate does not find it.
    """
    named = named_json(file.content)
    if not named:
        return None
    for candidate in (Path(folder, str(named)), file.path.parent / str(named)):
        if os.path.isfile(candidate):
            return read(candidate, as_json=True)
    return None


def named_json(content: dict) -> Any:
    """Return the name of the DeepSpeed JSON that a config points to, or None."""
    return written_in(content, "deepspeed_config").get("deepspeed_config_file")


def find_faults(
    file: ConfigFile,
    num_processes: int | None = None,
    for_recipes: bool = False,
    folder: str = ".",
) -> tuple[list[Finding], dict]:
    """Return the findings on a file, worst first, and the config as accelerate reads it.

    Args:
        file: the file with the DeepSpeed JSON that it points to.
        num_processes: overrides that of the file.
        for_recipes: whether the file is for these recipes, whose requirements then count too.
        folder: where the launcher is started.
    """
    content = file.content
    if file.is_deepspeed_json:
        content = yaml_pointing_to(file)
    if num_processes:
        content = content | {"num_processes": num_processes}
    deepspeed = file.deepspeed.content if file.deepspeed else None
    findings, config = check(content, deepspeed, for_recipes)
    own = [
        finding(IGNORED, path, "written twice: the last one counts", "keep one of them")
        for path in file.positions.written_twice
    ]
    if file.deepspeed and not os.path.isfile(Path(folder, str(named_json(content)))):
        path = "deepspeed_config.deepspeed_config_file"
        reason = "is beside this file, but accelerate looks in the folder that it is started from"
        own.append(finding(STOPS, path, reason, "an absolute path"))
    return worst_first([*own, *findings]), config


def yaml_pointing_to(file: ConfigFile) -> dict:
    """Return the content of a YAML for one process that points to a DeepSpeed JSON."""
    return {
        "distributed_type": "DEEPSPEED",
        "num_processes": 1,
        "deepspeed_config": {"deepspeed_config_file": os.path.abspath(file.path)},
    }


def place_of(item: Finding, file: ConfigFile) -> str:
    """Return where a finding's key is, as FILE:LINE, or FILE if no line can be named."""
    file = file_of(item, file)
    line = file.line_of(item.path)
    if line is None:
        return str(file.path)
    return f"{file.path}:{line}"


def file_of(item: Finding, file: ConfigFile) -> ConfigFile:
    """Return the one of a config and its DeepSpeed JSON that a finding is about."""
    if item.in_json and file.deepspeed is not None:
        return file.deepspeed
    return file
