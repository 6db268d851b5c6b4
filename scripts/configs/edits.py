# SPDX-License-Identifier: Apache-2.0
"""Edit single keys in the text of a YAML file; comments, order and blank lines stay."""

import re
from copy import deepcopy

import yaml

from components.config_findings import DeleteKey, Edit, RenameKey, SetValue
from components.yaml_text import UNREADABLE, KeyNodes, KeyPath, Positions, as_yaml, find_positions

COMMENT = re.compile("#.*")


def comments(text: str) -> list[str]:
    """Return the comments of YAML text, which stand between its tokens."""
    found = []
    end = 0
    for token in yaml.scan(text, yaml.SafeLoader):
        found += COMMENT.findall(text[end : token.start_mark.index])
        end = token.end_mark.index
    return found + COMMENT.findall(text[end:])


# ---- The content ----
def edit_content(content: dict, edit: Edit) -> dict:
    """Return a copy of a config with one edit made.

    Sections that are missing are made, and sections that become empty are left out.
    """
    content = deepcopy(content)
    *sections, key = edit.path
    parents = sections_down_to(content, sections)
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
    """Return YAML text with one edit made.

    The rest stays as it is, unless the edit is only possible by a rewrite (flow style, anchors).
    """
    wanted = edit_content(yaml.safe_load(text), edit)
    if not text.endswith("\n"):
        text += "\n"
    try:
        edited = edit_lines(text, edit)
        if yaml.safe_load(edited) == wanted:
            return edited
    except UNREADABLE:
        pass
    return yaml.safe_dump(wanted, sort_keys=False)


def edit_lines(text: str, edit: Edit) -> str:
    """Return text with an edit in the lines that it concerns; in flow style it may be wrong."""
    positions = find_positions(text)
    if isinstance(edit, RenameKey):
        node = positions.nodes[edit.path].key
        return text[: node.start_mark.index] + edit.new_key + text[node.end_mark.index :]
    if isinstance(edit, DeleteKey):
        return without_key(text, edit.path, positions)
    if edit.path in positions.nodes:
        return with_other_value(text, edit, positions)
    if edit.path[:-1] in positions.nodes:
        return with_key_in_section(text, edit, positions)
    return with_new_section(text, edit)


def without_key(text: str, path: KeyPath, positions: Positions) -> str:
    """Return text without a key, whose comments stay as lines of their own.

    A section is removed with its last key.
    """
    while len(path) > 1 and is_only_key(path, positions):
        path = path[:-1]
    nodes = positions.nodes[path]
    lines = text.splitlines(keepends=True)
    first = nodes.key.start_mark.line
    after = last_line(nodes.value) + 1
    kept = comments_in(lines[first:after], " " * nodes.key.start_mark.column)
    return "".join([*lines[:first], *kept, *lines[after:]])


def comments_in(lines: list[str], indent: str) -> list[str]:
    """Return the comments of some lines of YAML, each as a line of its own."""
    return [f"{indent}{comment}\n" for comment in comments("".join(lines))]


def is_only_key(path: KeyPath, positions: Positions) -> bool:
    """Return whether there is no other key in the section of this one."""
    in_section = [other for other in positions.nodes if other[:-1] == path[:-1]]
    return len(in_section) == 1


def with_other_value(text: str, edit: SetValue, positions: Positions) -> str:
    """Return text in which a key has another value."""
    nodes = positions.nodes[edit.path]
    node = nodes.value
    value = as_yaml(edit.value)
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
    kept = comments_in(lines[first:after], indent)
    key = text[nodes.key.start_mark.index : nodes.key.end_mark.index]
    return "".join([*lines[:first], *kept, f"{indent}{key}: {value}\n", *lines[after:]])


def with_key_in_section(text: str, edit: SetValue, positions: Positions) -> str:
    """Return text with a new key at the end of a section."""
    section = positions.nodes[edit.path[:-1]].value
    if not isinstance(section, yaml.MappingNode) or not section.value:
        return with_first_key(text, edit, positions.nodes[edit.path[:-1]])
    first_key, _ = section.value[0]
    indent = " " * first_key.start_mark.column
    lines = text.splitlines(keepends=True)
    line = f"{indent}{edit.path[-1]}: {as_yaml(edit.value)}\n"
    lines.insert(last_line(section) + 1, line)
    return "".join(lines)


def with_first_key(text: str, edit: SetValue, nodes: KeyNodes) -> str:
    """Return text with a key in a section that is empty, or {}; a comment behind it stays."""
    start = nodes.value.start_mark.index
    end = nodes.value.end_mark.index
    lines = (text[:start].rstrip(" ") + text[end:]).splitlines(keepends=True)
    indent = " " * (nodes.key.start_mark.column + 2)
    line = f"{indent}{edit.path[-1]}: {as_yaml(edit.value)}\n"
    lines.insert(nodes.key.start_mark.line + 1, line)
    return "".join(lines)


def with_new_section(text: str, edit: SetValue) -> str:
    """Return text with a new key in new sections, or at the top level, at the end."""
    *sections, key = edit.path
    for depth, section in enumerate(sections):
        text += f"{'  ' * depth}{section}:\n"
    return text + f"{'  ' * len(sections)}{key}: {as_yaml(edit.value)}\n"


def last_line(node: yaml.Node) -> int:
    """Return the number of the last line of a node, from 0.

    The end mark of a mapping in block style is that of the next token.
    """
    if isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
        last = node.value[-1]
        if isinstance(last, tuple):
            last = last[1]
        return last_line(last)
    return node.end_mark.line
