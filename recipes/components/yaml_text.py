# SPDX-License-Identifier: Apache-2.0
"""The text of YAML: how values are written, and where the keys of a file are."""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import yaml

# All exceptions that PyYAML raises for unreadable text
UNREADABLE = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)
MERGE_KEY = "tag:yaml.org,2002:merge"

# The keys from the top of a file down to one of its entries; YAML keys need not be text
KeyPath = tuple[Any, ...]


def as_yaml(value: Any) -> str:
    """Return a value as YAML text, in quotes only if YAML would read it as something else."""
    with suppress(*UNREADABLE):
        if isinstance(value, str) and yaml.safe_load(value) == value:
            return value
    return json.dumps(value, default=str, skipkeys=True)


@dataclass(frozen=True)
class KeyNodes:
    """Where a key and its value are in the text."""

    key: yaml.Node
    value: yaml.Node


@dataclass(frozen=True)
class Positions:
    """Where the keys of all mappings of a text are.

    Attributes:
        nodes: the nodes of each key by its path, in the order of the text.
        written_twice: the paths that occur again; YAML keeps the last value.
    """

    nodes: dict[KeyPath, KeyNodes] = field(default_factory=dict)
    written_twice: list[KeyPath] = field(default_factory=list)


def find_positions(text: str) -> Positions:
    """Return where the keys of YAML text are. Raises one of UNREADABLE.

    The keys that an alias stands for are only found at its anchor.
    """
    found = Positions()
    visited = set()
    loader = yaml.SafeLoader(text)

    def name_of(key: yaml.Node) -> Any:
        if key.tag == MERGE_KEY:
            return key.value
        return loader.construct_object(key, deep=True)

    def walk(node: yaml.Node | None, path: KeyPath) -> None:
        if not isinstance(node, yaml.MappingNode) or id(node) in visited:
            return
        visited.add(id(node))
        for key, value in node.value:
            inner = (*path, name_of(key))
            if inner in found.nodes:
                found.written_twice.append(inner)
            found.nodes[inner] = KeyNodes(key, value)
            walk(value, inner)

    walk(loader.get_single_node(), ())
    return found
