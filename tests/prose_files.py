# SPDX-License-Identifier: Apache-2.0
"""The prose of each kind of file in this repository, for the rules of prose.py.

Code is not prose: in Markdown neither are code blocks and code spans, in Python everything except
comments and strings with a space, and in YAML everything except comments and values with a space.
Of other files that mark comments with `#` only the comments are read. Of tests only docstrings
and comments are read, since their other strings are inputs, or quote messages that are checked in
the file that prints them.
"""

import ast
import io
import json
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from launching import REPO
from prose import Prose

FOLDERS = (
    ".ci",
    ".github",
    "accelerate_configs",
    "docs",
    "examples",
    "recipes",
    "results",
    "scripts",
    "tests",
)


def files() -> list[Path]:
    """All files of the repository that a function here can read, sorted."""
    found = [path for path in REPO.iterdir() if path.is_file()]
    for folder in FOLDERS:
        found += [path for path in (REPO / folder).rglob("*") if path.is_file()]
    return sorted(path for path in found if reader_of(path))


def read(path: Path) -> list[Prose]:
    """The prose of one of `files()`."""
    return list(reader_of(path)(path.read_text()))


def reader_of(path: Path) -> Callable[[str], Iterator[Prose]] | None:
    """The function that reads a kind of file, None if it is not read.

    Not read are legal text, measurements, style sheets, and pictures, whose text is in
    evidence/pictures/.
    """
    if path.suffix == ".py":
        return of_test if path.is_relative_to(REPO / "tests") else of_python
    if path.suffix == ".md":
        return of_markdown
    if path.suffix == ".ipynb":
        return of_notebook
    if path.suffix in {".yaml", ".yml", ".cff"}:
        return of_yaml
    if path.name == "Makefile":
        return of_makefile
    if path.match("requirements*.txt") or path.suffix == ".toml" or path.parent.name == ".ci":
        return of_comments
    return None


# ---- Documents ----


def of_markdown(text: str) -> Iterator[Prose]:
    """The paragraphs, items and cells of a document without their code, each on one line."""

    def blank(found: re.Match) -> str:
        return "\n" * found[0].count("\n")

    text = re.sub(r"^```.*?^```", blank, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<[^>]*>", blank, text)
    line = 1
    for paragraph in re.split(r"(\n\n+|\n(?=\s*(?:[-*|]|\d+\.) ))", text):
        words = " ".join(re.sub(r"`[^`]*`", "`code`", paragraph).split())
        for sentence in re.split(r"(?<=[.:|]) +", words):
            yield Prose(line, sentence.lstrip("-*|# "))
        line += paragraph.count("\n")


def of_notebook(text: str) -> Iterator[Prose]:
    """The Markdown cells and the comments of code cells. A line is counted in its cell."""
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield from of_markdown(source)
        else:
            yield from of_comments(source)


# ---- Python ----


def of_python(text: str) -> Iterator[Prose]:
    """The strings that have a space, and the comments."""
    tree = ast.parse(text)
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            words = " ".join(node.value.split())
            if id(node) in parts or node.value[0].isspace():
                words = f"... {words}"  # a part of a sentence, which does not begin here
            yield Prose(node.lineno, words)
    yield from python_comments(text)


def of_test(text: str) -> Iterator[Prose]:
    """The docstrings and the comments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            yield Prose(node.body[0].lineno, " ".join(ast.get_docstring(node).split()))
    yield from python_comments(text)


def python_comments(text: str) -> Iterator[Prose]:
    """The comments of Python, those on consecutive lines in one piece."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            found.append((token, token.string))
    comments = [Prose(token.start[0], string) for token, string in found]
    beside = {token.start[0] for token, _ in found if token.line[: token.start[1]].strip()}
    yield from joined(comments, beside)


# ---- Files with comments after # ----


def of_yaml(text: str) -> Iterator[Prose]:
    """The values that have a space, and the comments."""
    for token in yaml.scan(text):
        if isinstance(token, yaml.ScalarToken) and " " in token.value:
            yield Prose(token.start_mark.line + 1, " ".join(token.value.split()))
    yield from of_comments(text)


def of_makefile(text: str) -> Iterator[Prose]:
    """The comments, and the messages in single quotes that recipes print."""
    for number, line in enumerate(text.splitlines(), 1):
        for message in re.findall(r"printf '([^']*)'", line):
            yield Prose(number, message.replace("\\n", " ").strip(" =."))
    yield from of_comments(text)


def of_comments(text: str) -> Iterator[Prose]:
    """The comments of a file in which `#` begins one, at the start of a line or after a space."""
    comments = []
    beside = set()
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.search(r"(?:^|\s)#.*", line):
            comments.append(Prose(number, found[0].strip()))
            if line[: found.start()].strip():
                beside.add(number)
    yield from joined(comments, beside)


def joined(comments: list[Prose], beside: set[int]) -> Iterator[Prose]:
    """Comments without their marks; those on consecutive lines of their own are one piece.

    beside: lines whose comment follows code, and is a piece of its own.
    """
    last = None
    for comment in comments:
        words = comment.text.lstrip("#:! ")
        follows = last is not None and comment.line == last.line + last.text.count("\n") + 1
        if follows and not {comment.line, last.line} & beside:
            last = Prose(last.line, f"{last.text}\n{words}")
            continue
        if last is not None:
            yield Prose(last.line, " ".join(last.text.split()))
        last = Prose(comment.line, words)
    if last is not None:
        yield Prose(last.line, " ".join(last.text.split()))
