# SPDX-License-Identifier: Apache-2.0
"""Findings: what is wrong at one key of a config, how severe that is, and how to fix it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from components.yaml_text import KeyPath, as_yaml

# Kinds of findings that say what accelerate and DeepSpeed do
STOPS = "stops"  # they end with an error
IGNORED = "ignored"  # what runs is not what is written, without a message
COSTS = "costs"  # it works, but has a cost or a surprise
UPSTREAM = "upstream"  # they end with an error or go astray, which the recipes work around
ADVICE = "advice"
# Kinds of findings that say what the recipes need, the more severe first
RECIPE = "recipe"  # the recipes refuse it or fail with it
UNTESTED = "untested"  # the recipes are not tested with it
WISHES = (RECIPE, UNTESTED)  # these say nothing about other scripts

FOR_ANYBODY = {
    STOPS: "error",
    IGNORED: "error",
    UPSTREAM: "error",
    RECIPE: "info",
    COSTS: "warning",
    UNTESTED: "info",
    ADVICE: "info",
}
FOR_THE_RECIPES = FOR_ANYBODY | {UPSTREAM: "info", RECIPE: "error", UNTESTED: "warning"}
SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True)
class SetValue:
    """Write this value at a key, which need not be there yet."""

    path: KeyPath
    value: Any


@dataclass(frozen=True)
class DeleteKey:
    """Delete a key."""

    path: KeyPath


@dataclass(frozen=True)
class RenameKey:
    """Give a key another name, in the same section."""

    path: KeyPath
    new_key: str


@dataclass(frozen=True)
class MoveKey:
    """Write a key, which has this value, in another section, possibly under another name."""

    path: KeyPath
    new_path: KeyPath
    value: Any


Edit = SetValue | DeleteKey | RenameKey | MoveKey
AnyPath = str | KeyPath  # "fsdp_config.fsdp_version", or the keys as a tuple


def set_value(path: AnyPath, value: Any) -> SetValue:
    """Return the edit that writes a value at a path."""
    return SetValue(split(path), value)


def delete(path: AnyPath) -> DeleteKey:
    """Return the edit that deletes the key at a path."""
    return DeleteKey(split(path))


def rename(path: AnyPath, new_key: str) -> RenameKey:
    """Return the edit that gives the key at a path another name."""
    return RenameKey(split(path), new_key)


def move(path: AnyPath, new_path: AnyPath, value: Any) -> MoveKey:
    """Return the edit that moves the key at a path, which has this value, to another path."""
    return MoveKey(split(path), split(new_path), value)


def split(path: AnyPath) -> KeyPath:
    """Return a path as a tuple of its keys."""
    if isinstance(path, str):
        return tuple(path.split("."))
    return tuple(path)


@dataclass(frozen=True)
class Finding:
    """What is wrong at one key, why, and what to write instead.

    Attributes:
        kind: what happens: STOPS, IGNORED, ...
        path: where the key is, or is missing.
        reason: why that is wrong, in words.
        fix: what to write instead, in words.
        edits: the fix, step by step; () if a person has to choose.
        in_json: whether the key is in the DeepSpeed JSON that the file points to.
        for_recipes: whether the file is for these recipes, whose requirements then count too.
    """

    kind: str
    path: KeyPath
    reason: str
    fix: str
    edits: tuple[Edit, ...] = ()
    in_json: bool = False
    for_recipes: bool = False

    @property
    def severity(self) -> str:
        """error, warning or info."""
        severities = FOR_THE_RECIPES if self.for_recipes else FOR_ANYBODY
        return severities[self.kind]

    @property
    def dotted_path(self) -> str:
        """The path as it is printed."""
        return ".".join(map(str, self.path))


def finding(kind: str, path: AnyPath, reason: str, fix: str | Sequence[Edit] = "") -> Finding:
    """Return a Finding whose fix is given in words, or as edits that are then put into words."""
    path = split(path)
    if isinstance(fix, str):
        return Finding(kind, path, reason, fix)
    return Finding(kind, path, reason, words_of(fix, path), tuple(fix))


def words_of(edits: Sequence[Edit], path: KeyPath) -> str:
    """Return the edits that fix a finding in words.

    If two edits concern one key, such as a new name and then a value, the last one is enough.
    """
    words = {}
    for edit in edits:
        key = edit.new_key if isinstance(edit, RenameKey) else edit.path[-1]
        words[key] = words_of_edit(edit, path)
    return ", ".join(words.values())


def words_of_edit(edit: Edit, path: KeyPath) -> str:
    """Return one edit in words, with its section if that is not the finding's own."""
    if isinstance(edit, DeleteKey):
        return f"delete {edit.path[-1]}"
    if isinstance(edit, MoveKey):
        place = ".".join(edit.new_path[:-1]) or "the top level"
        return f"{edit.new_path[-1]}: {as_yaml(edit.value)} in {place}, not here"
    text = str(edit.new_key if isinstance(edit, RenameKey) else edit.path[-1])
    if isinstance(edit, SetValue):
        text += f": {as_yaml(edit.value)}"
    section = edit.path[:-1]
    if section and section[0] != path[0]:
        text += f" in {'.'.join(section)}"
    return text


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return errors first, then warnings, then info; within each, the more severe kind first."""
    kinds = list(FOR_ANYBODY)

    def place(item: Finding) -> tuple[int, int]:
        return SEVERITIES.index(item.severity), kinds.index(item.kind)

    return sorted(findings, key=place)
