# SPDX-License-Identifier: Apache-2.0
"""The comments of YAML text, and those that belong to a key."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from components.yaml_text import KeyNodes

COMMENT = re.compile("#.*")
# A setting that is only turned off, such as "# fsdp_offload_params: true", belongs to no other key.
TURNED_OFF = re.compile(r"#\s*[a-z0-9]+_\w+:")


@dataclass(frozen=True)
class CommentsOfKey:
    """The comments that belong to a key.

    Attributes:
        above: those directly above it.
        behind: the one behind its value, or "".
    """

    above: list[str]
    behind: str


def comments(text: str) -> list[str]:
    """Return the comments of YAML text, which stand between its tokens."""
    found = []
    end = 0
    for token in yaml.scan(text, yaml.SafeLoader):
        found += COMMENT.findall(text[end : token.start_mark.index])
        end = token.end_mark.index
    return found + COMMENT.findall(text[end:])


def comments_of_key(text: str, nodes: KeyNodes) -> CommentsOfKey:
    """Return the comments that belong to a key."""
    lines = text.splitlines(keepends=True)
    line = nodes.key.start_mark.line
    above = lines[first_line(lines, nodes) : line]
    behind = ""
    if last_line(nodes.value) == line:
        behind = "".join(comments(text_behind(lines[line], nodes)))
    return CommentsOfKey([comment.strip() for comment in above], behind)


def text_behind(line: str, nodes: KeyNodes) -> str:
    """Return what follows the value of a key on its line."""
    rest = line[nodes.value.end_mark.column :]
    return rest if rest.lstrip(" \t").startswith("#") else ""


def with_comments_of_key(text: str, nodes: KeyNodes, own: CommentsOfKey) -> str:
    """Return text with comments above and behind a key in block style that has none yet."""
    lines = text.splitlines(keepends=True)
    line = nodes.key.start_mark.line
    indent = " " * nodes.key.start_mark.column
    if own.behind and not text_behind(lines[line], nodes):
        lines[line] = f"{lines[line].rstrip()}  {own.behind}\n"
    lines[line:line] = [f"{indent}{comment}\n" for comment in own.above]
    return "".join(lines)


def lines_of_key(lines: Sequence[str], nodes: KeyNodes) -> tuple[int, int]:
    """Return the first line of a key in block style with its comments, and the first one after."""
    column = nodes.key.start_mark.column
    after = last_line(nodes.value) + 1
    while after < len(lines) and is_comment_at(lines[after]) and indent_of(lines[after]) > column:
        after += 1
    return first_line(lines, nodes), after


def first_line(lines: Sequence[str], nodes: KeyNodes) -> int:
    """Return the first line of a key and of the comments above it that belong to it.

    Comments with which a file begins are about the file.
    """
    line = nodes.key.start_mark.line
    first = line
    while first > 0 and belongs_below(lines[first - 1], nodes.key.start_mark.column):
        first -= 1
    is_top = not any(before.strip(" \n-") for before in lines[:first])
    return line if is_top else first


def belongs_below(line: str, column: int) -> bool:
    """Return whether a line is a comment on a key below it that begins at a column."""
    is_setting = TURNED_OFF.match(line.strip()) is not None
    return is_comment_at(line) and indent_of(line) == column and not is_setting


def is_comment_at(line: str) -> bool:
    """Return whether a line is nothing but a comment."""
    return line.lstrip().startswith("#")


def indent_of(line: str) -> int:
    """Return the number of spaces with which a line begins."""
    return len(line) - len(line.lstrip(" "))


def last_line(node: yaml.Node) -> int:
    """Return the number of the last line of a node, from 0.

    The end mark of a mapping or a text in block style is that of the next token.
    """
    if isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
        last = node.value[-1]
        if isinstance(last, tuple):
            last = last[1]
        return last_line(last)
    if node.end_mark.column == 0 and node.end_mark.line > node.start_mark.line:
        return node.end_mark.line - 1
    return node.end_mark.line
