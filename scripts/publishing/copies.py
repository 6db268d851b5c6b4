# SPDX-License-Identifier: Apache-2.0
"""What is pushed in place of a file as it is here, and what of the others tells who trained where.

Files that runs and commands have written are pushed without paths and names of this machine. Those
of others are pushed as they are, and what is found in them is shown before.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components import folder
from components.folder import CARD, MARKER
from components.private_text import (
    Cleaner,
    home_folder,
    is_hub_id,
    names_of_this_machine,
    pattern_of,
)
from generation.recorded import arguments_of_run, read_run
from publishing import selection

# Arguments by which a result is loaded, merged, asked and evaluated
NEEDED = (
    "assistant_only_loss",
    "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant",
    "chat_template_kwargs",
    "columns",
    "completion_only_loss",
    "dtype",
    "learn",
    "load_in_4bit",
    "load_in_8bit",
    "max_length",
    "model_revision",
)
# Text that people read or programs are set up with; a vocabulary may have any word as a token.
READ = (".json", ".jsonl", ".md", ".txt", ".yaml", ".yml", ".jinja", ".toml", ".csv")
VOCABULARIES = ("tokenizer.json", "vocab*", "merges.txt", "added_tokens.json")


@dataclass(frozen=True)
class Copy:
    """What is pushed under the name of a file.

    Attributes:
        why: how it differs from the file here.
    """

    content: bytes
    why: str


def make_copies(source: Path, names: Mapping[str, Any], base: str | None) -> dict[str, Copy]:
    """Return {name: what is pushed in place of the file that is here, or is not}.

    Args:
        names: those of the files to be pushed.
        base: the hub id that takes the place of a base on this machine, if any.
    """
    copies = {}
    clean = Cleaner(read_run(source).get("arguments", {}))
    if base is not None:
        for name, content in selection.with_base(source, base).items():
            copies[name] = Copy(content, f"with the base {base}")
    record = public_record(source)
    if record is not None:
        copies[folder.PUBLIC_RUN] = Copy(as_json(record), f"what loading reads of {folder.RUN}")
    if CARD in names:
        text = read_text(source, CARD, copies)
        cleaned = clean(text)
        if MARKER in text and cleaned != text:
            copies[CARD] = Copy(cleaned.encode(), "without paths and names of this machine")
    return copies


def as_json(content: Any) -> bytes:
    """Return the bytes of a JSON file."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def read_text(source: Path, name: str, copies: Mapping[str, Copy]) -> str:
    """Return the text of a file as it would be pushed so far."""
    if name in copies:
        return copies[name].content.decode(errors="replace")
    with selection.reading(source / name):
        return (source / name).read_text(encoding="utf-8", errors="replace")


# ---- The record of the run ----
def public_record(source: Path) -> dict[str, Any] | None:
    """Return what of run.json is pushed: the base's fingerprint, and NEEDED. None without one.

    The name of the base is left out where adapter_config.json has it.
    """
    if not (source / folder.RUN).is_file():
        return None
    arguments = arguments_of_run(source)
    kept = {name: arguments[name] for name in NEEDED if name in arguments}
    base = arguments.get("model_name_or_path")
    is_whole = not (source / selection.ADAPTERS).is_file()
    if is_whole and isinstance(base, str) and is_hub_id(base):
        kept["model_name_or_path"] = base
    record: dict[str, Any] = {"arguments": kept}
    fingerprint = read_run(source).get("base_weights")
    if fingerprint is not None:
        record["base_weights"] = fingerprint
    return record


# ---- What is named before the push ----
def find_private(
    source: Path, names: Mapping[str, Any], copies: Mapping[str, Copy], repo_id: str
) -> Iterator[str]:
    """Yield what the texts that are pushed tell of the user and the machine.

    Args:
        repo_id: of the repository; a user's name that is also its owner's is public anyway.
    """
    owner = repo_id.partition("/")[0] if "/" in repo_id else ""
    for name in names:
        is_text = name.endswith(READ) and not selection.matches(name, VOCABULARIES)
        if name not in copies and not is_text:
            continue
        if name not in copies and (source / name).stat().st_size > selection.LARGEST_READ:
            continue
        text = read_text(source, name, copies)
        for words in private_words(text, owner):
            yield f"{name} has {words}"


def private_words(text: str, owner: str) -> Iterator[str]:
    """Yield what a text has of the home folder, the user's names and the host's."""
    home = home_folder()
    if home and re.search(rf"(?<![\w.]){re.escape(home)}(?=/)", text):
        yield f"a path of this machine in {home}"
    for what, found in names_of_this_machine().items():
        for name in found:
            if name != owner and re.search(pattern_of(name), text):
                yield f"the name of this machine's {what}, {name}"
