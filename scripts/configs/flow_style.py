# SPDX-License-Identifier: Apache-2.0
"""Edit the items of a mapping in flow style, {key: value, ...}, which may be one line or many."""

import json
import re
from typing import Any

import yaml

from components.yaml_text import KeyNodes, as_yaml
from configs.comments import first_line

COMMA = re.compile(r"[ \t]*,[ \t]*")
COMMA_BEFORE = re.compile(r",\s*$")
END_OF_LINE = re.compile(r"[ \t]*(#.*)?(\n|$)")
END_OF_LAST_ITEM = re.compile(r"(?:[ \t]*,)?([ \t]*(?:#.*)?\n)")


def as_item(value: Any) -> str:
    """Return a value as YAML text between the brackets of flow style, where commas divide."""
    text = as_yaml(value)
    if yaml.safe_load(f"[{text}]") == [value]:
        return text
    return json.dumps(value)


def without_item(text: str, nodes: KeyNodes) -> str:
    """Return text without a key, its value, one comma and the comments that belong to the key."""
    start = nodes.key.start_mark.index
    end = max(nodes.key.end_mark.index, nodes.value.end_mark.index)
    comma = COMMA.match(text, end)
    before = COMMA_BEFORE.search(text[:start])
    if comma:
        end = comma.end()
    elif before:
        return text[: before.start()] + text[end:]
    rest = END_OF_LINE.match(text, end)
    if rest and begins_its_line(text, start):
        lines = text.splitlines(keepends=True)
        first = first_line(lines, nodes)
        return "".join(lines[:first]) + text[rest.end() :]
    return text[:start] + text[end:]


def with_item(text: str, section: yaml.MappingNode, item: str) -> str:
    """Return text with an item at the end of a mapping that has others.

    It gets a line of its own if the last one has.
    """
    key, value = section.value[-1]
    end = max(key.end_mark.index, value.end_mark.index)
    rest = END_OF_LAST_ITEM.match(text, end)
    if rest is None or not begins_its_line(text, key.start_mark.index):
        return f"{text[:end]}, {item}{text[end:]}"
    indent = " " * key.start_mark.column
    return f"{text[:end]},{rest[1]}{indent}{item}\n{text[rest.end() :]}"


def begins_its_line(text: str, index: int) -> bool:
    """Return whether there is nothing but spaces before a place on its line."""
    return not text[text.rfind("\n", 0, index) + 1 : index].strip()
