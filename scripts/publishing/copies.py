# SPDX-License-Identifier: Apache-2.0
"""What is pushed in place of a file as it is here, and what of the others tells who trained where.

What is made for the push has no paths and names of this machine. All other files are pushed as they
are, and what is found in them is shown before.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generation.loading import PUBLIC_RUN, RUN, arguments_of_run, run_of
from publishing import selection
from publishing.card import CARD, card_of, is_users_own
from publishing.private_text import home_folder, is_hub_id, names_of_this_machine, pattern_of

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


def make_copies(source: Path, base: str | None) -> dict[str, Copy]:
    """Return {name: what is pushed in place of the file that is here, or is not}.

    Args:
        base: the hub id that takes the place of a base on this machine, if any.
    """
    copies = {}
    if base is not None:
        for name, content in selection.with_base(source, base).items():
            copies[name] = Copy(content, f"with the base {base}")
    record = public_record(source)
    if record is not None:
        copies[PUBLIC_RUN] = Copy(as_json(record), f"what loading reads of {RUN}")
    if not is_users_own(source / CARD):
        card = card_of(source, base)
        if card is not None:
            copies[CARD] = Copy(card.encode(), f"written from {RUN} and metrics.jsonl")
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
    if not (source / RUN).is_file():
        return None
    arguments = arguments_of_run(str(source))
    kept = {name: arguments[name] for name in NEEDED if name in arguments}
    base = arguments.get("model_name_or_path")
    is_whole = not (source / selection.ADAPTERS).is_file()
    if is_whole and isinstance(base, str) and is_hub_id(base):
        kept["model_name_or_path"] = base
    record: dict[str, Any] = {"arguments": kept}
    fingerprint = run_of(str(source)).get("base_weights")
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
