"""Change single keys in the text of a YAML file and leave the rest as it is: comments, order, blank lines.

An edit is ("set", path, value), ("rename", path, new key) or ("delete", path); a path is a tuple of keys.
"""

import re
import sys
from copy import deepcopy
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))
from config_files import positions  # noqa: E402
from config_rules import UNREADABLE, scalar  # noqa: E402


def comments(text):
    """The comments of YAML text: what stands between its tokens."""
    ends = [
        (token.start_mark.index, token.end_mark.index) for token in yaml.scan(text, yaml.SafeLoader)
    ]
    gaps = zip(
        [0, *(end for _, end in ends)], [*(start for start, _ in ends), len(text)], strict=True
    )
    return [comment for end, start in gaps for comment in re.findall("#.*", text[end:start])]


def edit_content(content, edit):
    """A deep copy of a dict with one edit made; missing sections are made, empty ones go."""
    content = deepcopy(content)
    action, (*sections, key), *new = edit
    parents = [content]
    for section in sections:
        if not isinstance(parents[-1].get(section), dict):
            parents[-1][section] = {}
        parents.append(parents[-1][section])
    last = parents[-1]
    if action == "set":
        last[key] = new[0]
    elif action == "delete":
        last.pop(key, None)
    else:
        items = [(new[0] if name == key else name, value) for name, value in last.items()]
        last.clear()
        last.update(items)
    for section, parent in reversed(list(zip(sections, parents, strict=False))):
        if not parent[section]:
            del parent[section]
    return content


def edit_text(text, edit):
    """YAML text with one edit made. The rest stays as it is, unless only a rewrite will do (flow style, anchors)."""
    wanted = edit_content(yaml.safe_load(text), edit)
    try:
        edited = _edit_lines(text if text.endswith("\n") else text + "\n", edit)
        if yaml.safe_load(edited) == wanted:
            return edited
    except UNREADABLE:
        pass
    return yaml.safe_dump(wanted, sort_keys=False)


def _edit_lines(text, edit):
    action, path, *new = edit
    found, _ = positions(text)
    lines = text.splitlines(keepends=True)
    if action == "rename":
        key = found[path][0]
        return text[: key.start_mark.index] + new[0] + text[key.end_mark.index :]
    if action == "delete":
        while len(path) > 1 and sum(other[:-1] == path[:-1] for other in found) == 1:
            path = path[:-1]  # the last key of its section takes the section along
        key, value = found[path]
        del lines[key.start_mark.line : _last_line(value) + 1]
    elif path in found:
        value = found[path][1]
        gap = (
            " " if value.start_mark.index == value.end_mark.index else ""
        )  # `key:` without a value
        return text[: value.start_mark.index] + gap + scalar(new[0]) + text[value.end_mark.index :]
    elif path[:-1] in found:
        section = found[path[:-1]][1]
        first = section.value[0][0]
        line = f"{' ' * first.start_mark.column}{path[-1]}: {scalar(new[0])}\n"
        lines.insert(_last_line(section) + 1, line)
    else:
        *sections, key = path
        lines += [f"{'  ' * depth}{section}:\n" for depth, section in enumerate(sections)]
        lines.append(f"{'  ' * len(sections)}{key}: {scalar(new[0])}\n")
    return "".join(lines)


def _last_line(node):
    """Number of the last line of a node; the end mark of a block mapping is that of the next token."""
    if isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
        child = node.value[-1]
        return _last_line(child[1] if isinstance(child, tuple) else child)
    return node.end_mark.line
