# SPDX-License-Identifier: Apache-2.0
"""Rules on keys that are misspelled, misplaced or unknown, and on values that cannot be read."""

import os.path
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from components import accelerate_keys as keys
from components.accelerate_keys import Kind, choices_of, full_name, read_value
from components.config_findings import (
    COSTS,
    IGNORED,
    STOPS,
    Finding,
    delete,
    finding,
    rename,
    set_value,
)
from components.config_reading import Config, known_settings, value_at, written_in
from components.yaml_text import KeyPath, as_yaml

# (section, names in it): what an unknown key may mean
Names = tuple[tuple[KeyPath, tuple[str, ...]], ...]
SECTION_NAMES: Names = (((), tuple(keys.SECTIONS)),)
YAML_NAMES: Names = (
    ((), (*keys.TOP_LEVEL, *keys.SECTIONS)),
    *(((section,), tuple(known)) for section, known in keys.SECTIONS.items()),
)
# The right name is looked for, which takes time, for this many unknown keys of a file at most
MAX_SEARCHES = 100
# How similar two names must be, from 0 to 1: in the same section, in another section, and as names
# of sections, which are similar because of their common ending
SIMILARITY = 0.6
SIMILARITY_ELSEWHERE = 0.75
SIMILARITY_OF_SECTIONS = 0.85

OWNED = "the recipes take it from their command line: {}"
# Words that people write instead of a value
OTHER_WORDS = {
    "ddp": "MULTI_GPU",
    "tpu": "XLA",
    "zero": "DEEPSPEED",
    "fp32": "no",
    "float32": "no",
    "bfloat16": "bf16",
    "float16": "fp16",
    "gpu": "none",
    "cuda": "none",
}


# ---- Names ----
def rules_of_names(config: Config) -> Iterator[Finding]:
    """Keys are known, written once, and have their prefix."""
    paths = list(paths_of(config.written))
    unknown = [path for path in paths if not is_known(path)]
    searched = set(unknown[:MAX_SEARCHES])
    for path in paths:
        if not is_known(path):
            yield judge_unknown(unknown_in_yaml(config, path, path in searched))
        elif len(path) == 1:
            yield from sections_hold_keys(config, path[0])
        else:
            yield from names_are_complete(config, *path)


def paths_of(content: dict) -> Iterator[KeyPath]:
    """Yield the paths of all keys: the top level, then those of the sections."""
    for key in content:
        yield (key,)
    for section in keys.SECTIONS:
        if isinstance(content.get(section), dict):
            for key in content[section]:
                yield section, key


def is_known(path: KeyPath) -> bool:
    """Return whether accelerate reads a key at this path."""
    if len(path) == 1:
        return path[0] in keys.TOP_LEVEL or path[0] in keys.SECTIONS
    section, key = path
    return full_name(section, key) in keys.SECTIONS[section]


def sections_hold_keys(config: Config, key: str) -> Iterator[Finding]:
    """A section has keys, or is empty."""
    if key in keys.SECTIONS and not isinstance(config.written[key], dict | None):
        yield finding(STOPS, (key,), "must be a mapping", "indent its keys below it")


def names_are_complete(config: Config, section: str, key: Any) -> Iterator[Finding]:
    """Keys have their prefix: the plugins need it, and only the launcher adds it."""
    name = full_name(section, key)
    if name == key:
        return
    path = (section, key)
    if name in config.written[section]:
        reason = f"{name} is written too: the last one counts"
        yield finding(IGNORED, path, reason, "keep one of them")
    else:
        reason = "only the launcher completes this name"
        yield finding(COSTS, path, reason, [rename(path, name)])


@dataclass(frozen=True)
class UnknownKey:
    """A key that nothing reads where it is.

    Attributes:
        path: the key and the sections above it.
        value: the value that is written for it.
        kind: STOPS or IGNORED: what accelerate or DeepSpeed does with it.
        reason: the same in words.
        names: the names that it may mean; () if the right name is not looked for.
        content: the whole file.
        engine: the distributed_type of the file; None in a DeepSpeed JSON.
    """

    path: KeyPath
    value: Any
    kind: str
    reason: str
    names: Names
    content: dict
    engine: str | None = None

    @property
    def section(self) -> KeyPath:
        """The path without the key."""
        return self.path[:-1]

    @property
    def key(self) -> Any:
        """The key without its section."""
        return self.path[-1]

    def found(self, more: str, fix: Any) -> Finding:
        """Return the finding on this key, with `more` added to its reason."""
        return finding(self.kind, self.path, self.reason + more, fix)


def unknown_in_yaml(config: Config, path: KeyPath, search: bool) -> UnknownKey:
    """Return a key that accelerate does not know, with its effect and what it may mean."""
    value = value_at(config.written, path)
    kind = IGNORED
    reason = "no such key: accelerate ignores it silently"
    names = YAML_NAMES
    if len(path) == 1:
        kind = STOPS
        reason = "accelerate refuses unknown keys here"
    if len(path) == 1 and isinstance(value, dict):
        names = SECTION_NAMES
    if not search:
        names = ()
    return UnknownKey(path, value, kind, reason, names, config.written, config.engine)


def judge_unknown(unknown: UnknownKey) -> Finding:
    """Return the finding on an unknown key, with the name that was most likely meant."""
    if unknown.key in keys.OWNED_BY_THE_RECIPE:
        return owned_by_the_recipe(unknown)
    if unknown.path in keys.REMOVED:
        return removed_from_accelerate(unknown)
    similarity = SIMILARITY_OF_SECTIONS if unknown.names is SECTION_NAMES else SIMILARITY
    meant = nearest(unknown.section, str(unknown.key), unknown.names, similarity)
    if meant is None:
        return similar_to_none(unknown)
    if meant[:-1] != unknown.section:
        return misplaced(unknown, meant)
    if meant[-1] in written_in(unknown.content, *unknown.section):
        return written_beside(unknown, meant)
    return unknown.found("", [rename(unknown.path, meant[-1])])


def owned_by_the_recipe(unknown: UnknownKey) -> Finding:
    """Return the finding on a setting that the recipes take from their command line.

    Some of these are known keys of deepspeed_config: under DeepSpeed, the fix moves them there.
    """
    key = unknown.key
    place = ("deepspeed_config", key)
    if unknown.engine != "DEEPSPEED" or key not in keys.DEEPSPEED or place == unknown.path:
        owner = OWNED.format(keys.OWNED_BY_THE_RECIPE[key])
        return unknown.found(f"; {owner}", [delete(unknown.path)])
    if key in written_in(unknown.content, "deepspeed_config"):
        return unknown.found(f"; {'.'.join(place)} is written too", [delete(unknown.path)])
    edits = [delete(unknown.path), set_value(place, unknown.value)]
    return unknown.found("; its place is deepspeed_config", edits)


def removed_from_accelerate(unknown: UnknownKey) -> Finding:
    """Return the finding on a key that only older versions of accelerate read."""
    more = "; older versions knew this one"
    replacement = keys.REMOVED[unknown.path]
    if replacement is None:
        return unknown.found(more, [delete(unknown.path)])
    return unknown.found(more, f"{replacement}, or delete it")


def similar_to_none(unknown: UnknownKey) -> Finding:
    """Return the finding on a key that is similar to no known one.

    The fix does not delete a whole section with all its keys: a person has to choose.
    """
    if unknown.names and not isinstance(unknown.value, dict):
        return unknown.found("", [delete(unknown.path)])
    return unknown.found("", "delete it, or write its right name")


def misplaced(unknown: UnknownKey, meant: KeyPath) -> Finding:
    """Return the finding on a key that belongs to another section."""
    section = meant[:-1]
    more = f"; its place is {'.'.join(section) or 'the top level'}"
    if section and is_of_another_engine(section[0], unknown.engine):
        more += f", which {unknown.engine} does not read"
        return unknown.found(more, [delete(unknown.path)])
    if meant[-1] in written_in(unknown.content, *section):
        return written_beside(unknown, meant, more)
    edits = [delete(unknown.path), set_value(meant, unknown.value)]
    return unknown.found(more, edits)


def is_of_another_engine(section: str, engine: str | None) -> bool:
    """Return whether a section is only read by an engine other than this one."""
    return any(
        section == own_section and engine != reader
        for reader, own_section in keys.SECTION_OF_ENGINE.items()
    )


def written_beside(unknown: UnknownKey, meant: KeyPath, more: str = "") -> Finding:
    """Return the finding on a key whose right name is also in the file."""
    name = meant[-1]
    more += f"; {name} is written too"
    if name != unknown.key:
        return unknown.found(more, f"delete it, or {name}")
    if written_in(unknown.content, *meant[:-1])[name] == unknown.value:
        return unknown.found(more, [delete(unknown.path)])
    return unknown.found(more, "delete one of the two")


@cache
def nearest(section: KeyPath, key: str, names: Names, similarity: float) -> KeyPath | None:
    """Return the path that an unknown key most likely means, or None if no name is similar."""
    wanted = key.lower().replace("-", "_").replace(" ", "_")
    own_first = sorted(names, key=lambda pair: pair[0] != section)
    for home, known in own_first:
        if wanted in known:
            return (*home, wanted)
    for home, known in own_first:
        prefix = os.path.commonprefix(known)
        short = {name.removeprefix(prefix): name for name in known}
        needed = similarity if home == section else SIMILARITY_ELSEWHERE
        close = get_close_matches(wanted, [*known, *short], 1, needed)
        if close:
            return (*home, short.get(close[0], close[0]))
    return None


# ---- Values ----
def rules_of_values(config: Config) -> Iterator[Finding]:
    """accelerate can read all values, and numbers are not text."""
    for setting in known_settings(config.written):
        if setting.value is None and may_be_empty(setting.path):
            continue
        key = setting.path[-1]
        try:
            value = read_value(key, setting.value, setting.kind)
        except ValueError:
            kind = setting.kind
            if key == "fsdp_reshard_after_forward" and config.fsdp_version == 2:
                kind = keys.BOOL
            yield unreadable(setting.path, setting.value, kind, "num_processes" in config.written)
            continue
        if setting.kind == keys.INT and isinstance(setting.value, str):
            reason = "text, although some readers need a number"
            yield finding(COSTS, setting.path, reason, [set_value(setting.path, value)])


def may_be_empty(path: KeyPath) -> bool:
    """Return whether a key may have no value."""
    return len(path) == 1 or path[0] == "deepspeed_config" or path[1] in keys.MAY_BE_EMPTY


def unreadable(path: KeyPath, value: Any, kind: Kind, has_processes: bool = True) -> Finding:
    """Return the finding on a value of a wrong kind, with the value that was most likely meant.

    accelerate accepts an unquoted no as distributed_type only if there is a number of processes.
    """
    if kind == keys.TEXT:
        return not_text(path, value)
    choices = {str(choice).lower(): choice for choice in choices_of(kind)}
    if value is False and "no" in choices:
        works = path == ("distributed_type",) and has_processes
        reason = "a bare no is false in YAML"
        return finding(COSTS if works else STOPS, path, reason, [set_value(path, choices["no"])])
    wanted = kind
    if choices:
        wanted = f"one of {', '.join(map(str, choices.values()))}"
    written = "empty" if value is None else as_yaml(value)
    meant = meant_by(value, choices)
    fix = wanted if meant is None else [set_value(path, meant)]
    return finding(STOPS, path, f"{written}: must be {wanted}", fix)


def not_text(path: KeyPath, value: Any) -> Finding:
    """Return the finding on a value that must be text; the fix joins a list with commas."""
    text = str(value)
    if isinstance(value, list):
        text = ",".join(map(str, value))
    return finding(STOPS, path, f"{as_yaml(value)} is not text", [set_value(path, text)])


def meant_by(value: Any, choices: dict[str, Any]) -> Any:
    """Return the choice that a wrong value most likely means, or None.

    Args:
        choices: {lower-case word: choice}.
    """
    word = str(value).lower()
    if word in OTHER_WORDS:
        return choices.get(OTHER_WORDS[word].lower())
    close = get_close_matches(word, choices, 1)
    return choices[close[0]] if close else None
