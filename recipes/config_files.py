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

ENTRIES, DEPTH = 500, 20  # of a config at most: more than all known keys together


def positions(text):
    """Find the keys of all mappings in YAML text.

    Returns {path: (key node, value node)} in the order of the text, and the paths that are written
    twice, of which YAML keeps the last. What an alias stands for is found only at its anchor.
    Raises one of UNREADABLE.
    """
    found, twice, anchored = {}, [], set()
    loader = yaml.SafeLoader(text)

    def walk(node, path):
        if not isinstance(node, yaml.MappingNode) or id(node) in anchored:
            return
        anchored.add(id(node))
        for key, value in node.value:
            merge = key.tag == "tag:yaml.org,2002:merge"
            inner = (*path, key.value if merge else loader.construct_object(key, deep=True))
            twice.extend([inner] if inner in found else [])
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
        found = self.positions[0]
        inside = [path[:length] for length in range(len(path), 0, -1) if path[:length] in found]
        return found[inside[0]][0].start_mark.line + 1 if inside else None


def read(path, as_json):
    """Read a file of keys and values. Raises ValueError if it is none."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if as_json else yaml.safe_load(text)
    except (OSError, *UNREADABLE) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} is no accelerate config: it has no keys")
    entries, inner = (
        0,
        [content],
    )  # aliases may make a small file a large one, or one without an end
    for _ in range(DEPTH):
        values = (
            value for part in inner for value in (part.values() if isinstance(part, dict) else part)
        )
        found = list(islice(values, ENTRIES + 1))
        entries, inner = (
            entries + len(found),
            [value for value in found if isinstance(value, dict | list)],
        )
    if inner or entries > ENTRIES:
        size = f"over {ENTRIES} entries, or {DEPTH} levels of them"
        raise ValueError(f"{path} is no accelerate config: it has {size}")
    return ConfigFile(path, text, content)


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
    content, deepspeed = file.content, file.deepspeed and file.deepspeed.content
    if file.deepspeed is file:  # as if a YAML pointed to it
        content = {"distributed_type": "DEEPSPEED", "num_processes": 1}
        content["deepspeed_config"] = {"deepspeed_config_file": os.path.abspath(file.path)}
    if ranks:
        content = content | {"num_processes": ranks}
    findings, config = check(content, deepspeed, recipes)
    twice = "written twice: the last one counts"
    own = [finding(IGNORED, path, twice, "one of them") for path in file.positions[1]]
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
    file = file.deepspeed if item.in_json else file
    line = file.line_of(item.path)
    return f"{file.path}:{line}" if line else str(file.path)
