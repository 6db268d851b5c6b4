# SPDX-License-Identifier: Apache-2.0
"""The fingerprint that is the key of prepared rows in the cache.

datasets identifies a function of an imported module by its name only: after an edit it would
silently reuse what the old function prepared. So the fingerprint is computed here, from

- the fingerprint of the rows as they are, which changes with their files,
- the code of the function that prepares them, and of everything that it reaches in this project.
  Code, not files: the rows stay cached when the training loop is edited, when comments or layout
  change, and when the whole folder is moved,
- the values that `functools.partial` binds to the function; for a tokenizer, its content.

The code of libraries is not part of it.
"""

import ast
import copy
import dataclasses
import functools
import inspect
import json
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import xxhash

# Attributes of a tokenizer that say where it was loaded from, or that calls leave behind
NOT_CONTENT = (
    "_tokenizer",
    "cache",
    "deprecation_warnings",
    "files_loaded",
    "init_inputs",
    "init_kwargs",
    "name_or_path",
    "vocab_file",
)


def prepared_fingerprint(rows_fingerprint: str, *functions: Callable) -> str:
    """Return the fingerprint of rows that these functions have prepared: 32 hexadecimal digits.

    Args:
        rows_fingerprint: the fingerprint of the rows before they were prepared.
        functions: functions, or partials of functions.
    """
    parts = [rows_fingerprint]
    for function in functions:
        inner = function.func if isinstance(function, functools.partial) else function
        if not inspect.isfunction(inner):
            raise TypeError(f"{inner} is neither a function nor a functools.partial of one")
        parts.append(identify(function))
    return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())


def identify(value: Any) -> str:
    """Return a text that is the same for values that prepare rows in the same way."""
    if isinstance(value, functools.partial):
        parts = [identify(value.func)]
        parts += [identify(argument) for argument in value.args]
        for name in sorted(value.keywords):
            parts += [name, identify(value.keywords[name])]
        return json.dumps(parts)
    if inspect.isfunction(value):
        return identify_function(value)
    if is_tokenizer(value):
        return identify_tokenizer(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [type(value).__qualname__]
        parts += [identify(getattr(value, part.name)) for part in dataclasses.fields(value)]
        return json.dumps(parts)
    return hash_of(value)


def hash_of(value: object) -> str:
    """Return datasets' hash of a value, which is the same in every process."""
    from datasets.fingerprint import Hasher

    return Hasher.hash(value)


# ---- Tokenizers ----
def is_tokenizer(value: object) -> bool:
    """Return whether a value is one of transformers' tokenizers."""
    from transformers import PreTrainedTokenizerBase

    return isinstance(value, PreTrainedTokenizerBase)


def identify_tokenizer(tokenizer: Any) -> str:
    """Return a text that is the same for tokenizers with the same content, whatever their path."""
    content = {}
    for name, value in vars(tokenizer).items():
        if name not in NOT_CONTENT:
            content[name] = value
    if hasattr(tokenizer, "backend_tokenizer"):
        # Each call leaves its truncation and padding behind.
        backend = copy.deepcopy(tokenizer.backend_tokenizer)
        backend.no_truncation()
        backend.no_padding()
        content["backend"] = backend.to_str()
    return f"{type(tokenizer).__qualname__} {hash_of(content)}"


# ---- Code ----
def identify_function(function: FunctionType) -> str:
    """Return a text that changes with the code that a function reaches and what it closes over."""
    function = inspect.unwrap(function)
    file = inspect.getsourcefile(function)
    if file is None or not Path(file).is_file():  # It was defined in a notebook or a shell.
        return hash_of(function)
    reached = ReachedCode()
    reached.add(Path(file).resolve(), function.__qualname__.split(".")[0])
    closed_over = [identify(cell.cell_contents) for cell in function.__closure__ or ()]
    return json.dumps([function.__qualname__, *sorted(reached.code), *closed_over])


Definitions = dict[str, list[ast.stmt]]  # {name: the statements of a module that define it}


@dataclass
class ReachedCode:
    """The code of this project that a function reaches, directly and through other definitions.

    Names and imports are followed as they are written in the source. A module that is imported as
    a whole is reached as a whole.

    Attributes:
        code: the statements that define what was reached, without comments and layout.
    """

    code: set[str] = field(default_factory=set)
    _seen: set[tuple[Path, str]] = field(default_factory=set)
    _modules: dict[Path, Definitions] = field(default_factory=dict)
    _folders: list[Path] = field(init=False)

    def __post_init__(self) -> None:
        self._folders = project_folders()  # once: that takes longer than to look for a module

    def add(self, file: Path, name: str) -> None:
        """Add what a name in a module reaches; all of the module if it defines no such name."""
        waiting = [(file, name)]
        if name not in self._definitions(file):  # A lambda has no name of its own.
            waiting = list(self._whole(file))
        while waiting:
            place = waiting.pop()
            if place in self._seen:
                continue
            self._seen.add(place)
            file, name = place
            definitions = self._definitions(file)
            # A name without a definition may come from a `from module import *`.
            for statement in definitions.get(name, definitions.get("*", [])):
                self.code.add(f"{name}: {ast.unparse(statement)}")
                waiting += self._references(file, statement)

    def _definitions(self, file: Path) -> Definitions:
        if file not in self._modules:
            self._modules[file] = read_definitions(file)
        return self._modules[file]

    def _references(self, file: Path, statement: ast.stmt) -> Iterator[tuple[Path, str]]:
        """Yield the modules and names to which a statement in a file refers."""
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                yield file, node.id
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._whole(self._find(alias.name))
            elif isinstance(node, ast.ImportFrom):
                yield from self._imported(file, node)

    def _imported(self, file: Path, node: ast.ImportFrom) -> Iterator[tuple[Path, str]]:
        """Yield what `from module import name` refers to: a name of the module, or a submodule."""
        package = f"{node.module}." if node.module else ""
        module = self._find(node.module or "", file, node.level)
        for alias in node.names:
            yield from self._whole(self._find(package + alias.name, file, node.level))
            if module is not None and alias.name == "*":
                yield from self._whole(module)
            elif module is not None:
                yield module, alias.name

    def _find(self, name: str, importer: Path | None = None, level: int = 0) -> Path | None:
        """Return the file of a module of this project, None for a library or what is no module.

        Args:
            name: "components.rows", or what follows the dots of a relative import.
            importer: the file that imports it.
            level: number of dots of a relative import.
        """
        if level > 0 and importer is not None:
            return find_module(name, [importer.parents[level - 1]])
        return find_module(name, self._folders)

    def _whole(self, module: Path | None) -> Iterator[tuple[Path, str]]:
        """Yield all names that a module defines."""
        if module is not None:
            for name in self._definitions(module):
                yield module, name


def read_definitions(file: Path) -> Definitions:
    """Return the statements of a module by the names that they define."""
    return parse_definitions(file.read_text(encoding="utf-8"))


@functools.lru_cache
def parse_definitions(source: str) -> Definitions:
    """Return the same of its text, which is parsed once for all functions and splits."""
    found: Definitions = {}
    for statement in ast.parse(source).body:
        for part in split_import(statement):
            for name in names_defined_by(part):
                found.setdefault(name, []).append(part)
    return found


def split_import(statement: ast.stmt) -> list[ast.stmt]:
    """Return one import statement per name, so that a name does not depend on its neighbors."""
    if isinstance(statement, ast.Import):
        return [ast.Import([alias]) for alias in statement.names]
    if isinstance(statement, ast.ImportFrom):
        module = statement.module
        return [ast.ImportFrom(module, [alias], statement.level) for alias in statement.names]
    return [statement]


def names_defined_by(statement: ast.stmt) -> set[str]:
    """Return the names that a statement of a module defines, in any of its branches."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    names = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.split(".")[0])
    return names


def find_module(name: str, folders: Iterable[Path]) -> Path | None:
    """Return the file of a module, given as "components.rows", in the first folder that has it."""
    for folder in folders:
        module = folder.joinpath(*name.split("."))
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if file.is_file():
                return file
    return None


def project_folders() -> list[Path]:
    """Return the folders that Python imports from, except those of Python and of libraries."""
    python = Path(sysconfig.get_path("stdlib"))
    folders = []
    for folder in map(Path, sys.path):
        is_library = "site-packages" in folder.parts or "dist-packages" in folder.parts
        if not is_library and python not in (folder, *folder.parents):
            folders.append(folder)
    return folders
