# SPDX-License-Identifier: Apache-2.0
"""Edit single keys in the text of a YAML file; order, blank lines and other comments stay.

A comment belongs to a key if it stands behind it, or directly above it with the same indentation:
it is deleted and moved with the key.
"""

from contextlib import suppress
from typing import Any

import yaml

from components.config_findings import DeleteKey, Edit, MoveKey, RenameKey, SetValue
from components.yaml_text import UNREADABLE, KeyNodes, KeyPath, Positions, as_yaml, find_positions
from configs import flow_style
from configs.comments import (
    comments,
    comments_of_key,
    last_line,
    lines_of_key,
    with_comments_of_key,
)


class CannotEditError(ValueError):
    """The text does not take an edit, as where it has an anchor or a key is written twice."""


# ---- The content ----
def edit_content(content: dict, edit: Edit) -> dict:
    """Return a copy of a config with one edit made.

    Sections that are missing are made, and sections that become empty are left out.
    """
    content = unshared(content)
    *sections, key = edit.path
    parents = sections_down_to(content, sections)
    if isinstance(edit, MoveKey):
        moved = edit_content(content, SetValue(edit.new_path, edit.value))
        return edit_content(moved, DeleteKey(edit.path))
    if isinstance(edit, SetValue):
        parents[-1][key] = edit.value
    elif isinstance(edit, DeleteKey):
        parents[-1].pop(key, None)
    else:
        rename_in_place(parents[-1], key, edit.new_key)
    for parent, section in reversed(list(zip(parents, sections, strict=False))):
        if not parent[section]:
            del parent[section]
    return content


def unshared(value: Any) -> Any:
    """Return a copy of a value; what an alias stands for is copied again for it."""
    if isinstance(value, dict):
        return {key: unshared(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [unshared(inner) for inner in value]
    return value


def sections_down_to(content: dict, sections: list) -> list[dict]:
    """Return a config and its nested sections, which are made if they are missing."""
    parents = [content]
    for section in sections:
        parent = parents[-1]
        if not isinstance(parent.get(section), dict):
            parent[section] = {}
        parents.append(parent[section])
    return parents


def rename_in_place(section: dict, key: object, new_key: str) -> None:
    """Rename a key of a section, which keeps its position."""
    items = list(section.items())
    section.clear()
    for name, value in items:
        section[new_key if name == key else name] = value


# ---- The text ----
def edit_text(text: str, edit: Edit) -> str:
    """Return YAML text with one edit made. Raises CannotEditError if it would be another one."""
    wanted = edit_content(yaml.safe_load(text), edit)
    if not text.endswith("\n"):
        text += "\n"
    with suppress(*UNREADABLE):
        edited = edit_lines(text, edit)
        if yaml.safe_load(edited) == wanted:
            return edited
    raise CannotEditError(f"this text does not take {edit}")


def edit_lines(text: str, edit: Edit) -> str:
    """Return text with an edit where the key is; with anchors, for example, it may be wrong."""
    positions = find_positions(text)
    if isinstance(edit, RenameKey):
        return with_other_name(text, edit, positions)
    if isinstance(edit, MoveKey):
        return with_key_elsewhere(text, edit, positions)
    if isinstance(edit, DeleteKey):
        return without_key(text, edit.path, positions)
    if edit.path in positions.nodes:
        return with_other_value(text, edit, positions)
    return with_new_key(text, edit, positions)


def with_other_name(text: str, edit: RenameKey, positions: Positions) -> str:
    """Return text in which a key has another name, in the same quotes."""
    node = positions.nodes[edit.path].key
    quote = getattr(node, "style", None) or ""
    return (
        f"{text[: node.start_mark.index]}{quote}{edit.new_key}{quote}{text[node.end_mark.index :]}"
    )


def with_key_elsewhere(text: str, edit: MoveKey, positions: Positions) -> str:
    """Return text in which a key is in another section, with the comments that belong to it."""
    own = comments_of_key(text, positions.nodes[edit.path])
    text = without_key(text, edit.path, positions)
    text = edit_lines(text, SetValue(edit.new_path, edit.value))
    positions = find_positions(text)
    if is_in_flow_style(text, edit.new_path, positions):
        return text
    return with_comments_of_key(text, positions.nodes[edit.new_path], own)


# ---- Deleted keys ----
def without_key(text: str, path: KeyPath, positions: Positions) -> str:
    """Return text without a key and its comments. A section is removed with its last key."""
    while len(path) > 1 and is_only_key(path, positions):
        path = path[:-1]
    nodes = positions.nodes[path]
    if is_in_flow_style(text, path, positions):
        return flow_style.without_item(text, nodes)
    lines = text.splitlines(keepends=True)
    first, after = lines_of_key(lines, nodes)
    return "".join([*lines[:first], *lines[after:]])


def is_only_key(path: KeyPath, positions: Positions) -> bool:
    """Return whether there is no other key in the section of this one."""
    in_section = [other for other in positions.nodes if other[:-1] == path[:-1]]
    return len(in_section) == 1


def is_in_flow_style(text: str, path: KeyPath, positions: Positions) -> bool:
    """Return whether the section of a key is written as {key: value, ...}."""
    section = section_at(text, path[:-1], positions)
    return isinstance(section, yaml.CollectionNode) and bool(section.flow_style)


def section_at(text: str, path: KeyPath, positions: Positions) -> yaml.Node:
    """Return the node of the section at a path, which is () for the top level."""
    if path:
        return positions.nodes[path].value
    return yaml.compose(text, yaml.SafeLoader)


# ---- Values ----
def with_other_value(text: str, edit: SetValue, positions: Positions) -> str:
    """Return text in which a key has another value."""
    nodes = positions.nodes[edit.path]
    node = nodes.value
    value = as_yaml(edit.value)
    if is_in_flow_style(text, edit.path, positions):
        value = flow_style.as_item(edit.value)
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        return with_value_for_block(text, nodes, value)
    start = node.start_mark.index
    end = node.end_mark.index
    if start == end:  # There is nothing after the colon.
        value = f" {value}"
    return text[:start] + value + text[end:]


def with_value_for_block(text: str, nodes: KeyNodes, value: str) -> str:
    """Return text with a value on the line of its key in place of a block of lines.

    The comments of the block stay, as lines before the key.
    """
    lines = text.splitlines(keepends=True)
    first = nodes.key.start_mark.line
    after = last_line(nodes.value) + 1
    indent = " " * nodes.key.start_mark.column
    kept = [f"{indent}{comment}\n" for comment in comments("".join(lines[first:after]))]
    key = text[nodes.key.start_mark.index : nodes.key.end_mark.index]
    return "".join([*lines[:first], *kept, f"{indent}{key}: {value}\n", *lines[after:]])


# ---- New keys ----
def with_new_key(text: str, edit: SetValue, positions: Positions) -> str:
    """Return text with a new key at the end of its section, which is made if it is missing."""
    *sections, key = edit.path
    if sections and tuple(sections) not in positions.nodes:
        return with_new_section(text, edit)
    section = section_at(text, edit.path[:-1], positions)
    if not isinstance(section, yaml.MappingNode) or not section.value:
        return with_first_key(text, edit, positions)
    if section.flow_style:
        return flow_style.with_item(text, section, f"{key}: {flow_style.as_item(edit.value)}")
    first_key, _ = section.value[0]
    indent = " " * first_key.start_mark.column
    lines = text.splitlines(keepends=True)
    lines.insert(last_line(section) + 1, f"{indent}{key}: {as_yaml(edit.value)}\n")
    return "".join(lines)


def with_first_key(text: str, edit: SetValue, positions: Positions) -> str:
    """Return text with a key in a section that is empty, or {}; a comment behind it stays."""
    nodes = positions.nodes[edit.path[:-1]]
    start = nodes.value.start_mark.index
    end = nodes.value.end_mark.index
    if is_in_flow_style(text, edit.path[:-1], positions):
        item = f"{{{edit.path[-1]}: {flow_style.as_item(edit.value)}}}"
        return text[:start] + item + text[end:]
    lines = (text[:start].rstrip(" ") + text[end:]).splitlines(keepends=True)
    indent = " " * (nodes.key.start_mark.column + 2)
    line = f"{indent}{edit.path[-1]}: {as_yaml(edit.value)}\n"
    lines.insert(nodes.key.start_mark.line + 1, line)
    return "".join(lines)


def with_new_section(text: str, edit: SetValue) -> str:
    """Return text with a new key in new sections at the end."""
    *sections, key = edit.path
    root = yaml.compose(text, yaml.SafeLoader)
    if root.flow_style:
        item = f"{key}: {flow_style.as_item(edit.value)}"
        for section in reversed(sections):
            item = f"{section}: {{{item}}}"
        return flow_style.with_item(text, root, item)
    added = [f"{'  ' * depth}{section}:\n" for depth, section in enumerate(sections)]
    added.append(f"{'  ' * len(sections)}{key}: {as_yaml(edit.value)}\n")
    lines = text.splitlines(keepends=True)
    last = last_line(root) + 1
    return "".join([*lines[:last], *added, *lines[last:]])
