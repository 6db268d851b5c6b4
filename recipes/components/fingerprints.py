# SPDX-License-Identifier: Apache-2.0
"""The fingerprint that is the key of prepared rows in the cache.

datasets identifies a function of the program by its code, but one of an imported module by its name
only: after an edit it would silently reuse what the old function prepared. So the fingerprint is
computed here, from

- the fingerprint of the rows as they are, which changes with their files,
- the function that prepares them, as datasets identifies it, and the files of the modules beside
  it, wherever their folder is,
- the values that `functools.partial` binds to the function; for a tokenizer, its content.

The code of libraries is not part of it.
"""

import copy
import dataclasses
import functools
import inspect
import json
import sys
from collections.abc import Callable
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
    """Return a text that changes with a function and with the modules beside it."""
    file = inspect.getsourcefile(function)
    if file is None or not Path(file).is_file():  # It was defined in a notebook or a shell.
        return hash_of(function)
    return json.dumps([hash_of(function), hash_of_modules(Path(file).resolve().parent)])


def hash_of_modules(folder: Path) -> str:
    """Return a hash of the modules in a folder that this process has imported.

    Packages count as a whole, since some of their modules are imported later, or on some ranks
    only. The program itself does not: datasets knows its functions by their code, and the rows stay
    cached when its training loop is edited.
    """
    files = set()
    for name in {name.partition(".")[0] for name in sys.modules} - {"__main__"}:
        file = Path(getattr(sys.modules.get(name), "__file__", None) or "").resolve()
        if file.suffix == ".py" and file.is_relative_to(folder) and not is_library(file):
            files.add(file)
            if file.name == "__init__.py":
                files.update(file.parent.rglob("*.py"))
    hashed = xxhash.xxh3_128()
    for file in sorted(files):
        hashed.update(f"{file.relative_to(folder)} ".encode() + file.read_bytes())
    return hashed.hexdigest()


def is_library(file: Path) -> bool:
    """Return whether a file is of an installed package."""
    return not {"site-packages", "dist-packages"}.isdisjoint(file.parts)
