"""Read an accelerate config, with the DeepSpeed JSON it points to, and find its faults by line.

`scripts/check_config.py` does so for any file, `launcher.py` for the one that the launcher of a
recipe read. The rules are in `config_rules.py`. Of other packages only PyYAML is loaded.
"""

import json
import os.path
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import yaml

from config_rules import IGNORED, STOPS, UNREADABLE, check, finding, worst_first, written_in

# A config has at most this many entries and levels: more than all known keys together.
ENTRIES = 500
DEPTH = 20
MERGE_KEY = "tag:yaml.org,2002:merge"


def positions(text):
    """Find the keys of all mappings in YAML text.

    Returns {path: (key node, value node)} in the order of the text, and the paths that are written
    twice, of which YAML keeps the last. What an alias stands for is found only at its anchor.
    Raises one of UNREADABLE.
    """
    found = {}
    twice = []
    anchored = set()
    loader = yaml.SafeLoader(text)

    def name_of(key):
        if key.tag == MERGE_KEY:
            return key.value
        return loader.construct_object(key, deep=True)

    def walk(node, path):
        if not isinstance(node, yaml.MappingNode) or id(node) in anchored:
            return
        anchored.add(id(node))
        for key, value in node.value:
            inner = (*path, name_of(key))
            if inner in found:
                twice.append(inner)
            found[inner] = (key, value)
            walk(value, inner)

    walk(loader.get_single_node(), ())
    return found, twice


@dataclass
class ConfigFile:
    """A file as written, and the DeepSpeed JSON it points to; a JSON alone points to itself."""

    path: Path
    text: str
    content: dict
    deepspeed: "ConfigFile | None" = None

    @cached_property
    def positions(self):
        """What `positions` finds in the text; nothing in JSON that is no YAML: it has tabs."""
        try:
            return positions(self.text)
        except UNREADABLE:
            return {}, []

    def line_of(self, path):
        """Number of the line of a key, or of the section that it is missing from, or None."""
        found, _ = self.positions
        for length in range(len(path), 0, -1):
            section = path[:length]
            if section in found:
                key, _ = found[section]
                return key.start_mark.line + 1
        return None


def read(path, as_json):
    """Read a file of keys and values. Raises ValueError if it is none."""
    try:
        text = path.read_text(encoding="utf-8")
        if as_json:
            content = json.loads(text)
        else:
            content = yaml.safe_load(text)
    except (OSError, *UNREADABLE) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read: {reason}") from error
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} is no accelerate config: it has no keys")
    if is_too_large(content):
        size = f"over {ENTRIES} entries, or {DEPTH} levels of them"
        raise ValueError(f"{path} is no accelerate config: it has {size}")
    return ConfigFile(path, text, content)


def is_too_large(content):
    """Whether content has more than ENTRIES entries or DEPTH levels.

    Aliases may make a small file a large one, or one without an end. Each level is therefore read
    only until the bound is passed.
    """
    entries = 0
    level = [content]
    for _ in range(DEPTH):
        found = list(islice(values_of(level), ENTRIES + 1))
        entries += len(found)
        level = [value for value in found if isinstance(value, dict | list)]
    return bool(level) or entries > ENTRIES


def values_of(parts):
    """Yield what a level of mappings and lists holds."""
    for part in parts:
        if isinstance(part, dict):
            yield from part.values()
        else:
            yield from part


def load(path):
    """Read a config and the DeepSpeed JSON it points to. Raises ValueError if it is neither."""
    path = Path(path)
    file = read(path, path.suffix == ".json")
    if file.content.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise ValueError(f"{path} is for SageMaker, whose configs are not judged here")
    if path.suffix == ".json" and "distributed_type" not in file.content:
        file.deepspeed = file
    else:
        file.deepspeed = read_deepspeed(file)
    return file


def read_deepspeed(file, folder="."):
    """Read the DeepSpeed JSON that a config names, or return None if there is none.

    accelerate looks in the folder that it is started from. A file beside the config is read too, so
    that `find_faults` can say that accelerate does not find it."""
    named = written_in(file.content, "deepspeed_config").get("deepspeed_config_file")
    if not named:
        return None
    for candidate in (Path(folder, str(named)), file.path.parent / str(named)):
        if os.path.isfile(candidate):
            return read(candidate, as_json=True)
    return None


def find_faults(file, ranks=None, recipes=False, folder="."):
    """Hold a file against all rules.

    ranks: number of processes, instead of the file's. recipes: whether the file is for the recipes
    here, whose wishes then count too. folder: where the launcher is started. Returns the findings,
    worst first, and the config as accelerate reads it.
    """
    content = file.content
    deepspeed = None
    if file.deepspeed:
        deepspeed = file.deepspeed.content
    if file.deepspeed is file:  # as if a YAML pointed to it
        content = {"distributed_type": "DEEPSPEED", "num_processes": 1}
        content["deepspeed_config"] = {"deepspeed_config_file": os.path.abspath(file.path)}
    if ranks:
        content = content | {"num_processes": ranks}
    findings, config = check(content, deepspeed, recipes)
    twice = "written twice: the last one counts"
    _, paths_twice = file.positions
    own = [finding(IGNORED, path, twice, "one of them") for path in paths_twice]
    named = written_in(content, "deepspeed_config").get("deepspeed_config_file")
    if file.deepspeed and not os.path.isfile(Path(folder, str(named))):
        path = "deepspeed_config.deepspeed_config_file"
        reason = (
            "stands beside this file, but accelerate looks in the folder that it is started from"
        )
        own.append(finding(STOPS, path, reason, "an absolute path"))
    return worst_first([*own, *findings]), config


def place_of(item, file):
    """Where a finding's key stands, as FILE:LINE, or FILE if no line can be named."""
    if item.in_json:
        file = file.deepspeed
    line = file.line_of(item.path)
    if line is None:
        return str(file.path)
    return f"{file.path}:{line}"
