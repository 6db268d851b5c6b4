# SPDX-License-Identifier: Apache-2.0
"""What is evaluated: trained folders, and the bases that they were trained from."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from core.chat import ChatTemplate
from core.generation import most_positions
from exits import Exit, first_line, stop
from generation.loading import (
    LOAD_ERRORS,
    PUBLIC_RUN,
    RUN,
    Source,
    arguments_of_run,
    base_of,
    find_source,
    load_tokenizer,
)
from generation.rows import columns_of_run

WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class Contestant:
    """A model, and how it is asked.

    A base is asked as the run that began with it: with the tokenizer and the chat template of the
    run's folder, and its settings. So the prompts are the same before and after the training.

    Attributes:
        name: as the command line or the run names it.
        source: where the weights are.
        tokenizer: pads on the left; with or without a chat template.
        arguments: of the run, by which rows are read and rendered; {} without a run.json.
        columns: {role: column} of the run.
        longest: the number of positions of the model.
        before: the name of the base, for a run whose base is evaluated too.
    """

    name: str
    source: Source
    tokenizer: Any
    arguments: Mapping[str, Any]
    columns: Mapping[str, str]
    longest: int
    before: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Return the variables of the chat template."""
        return dict(self.arguments.get("chat_template_kwargs") or {})

    @property
    def template(self) -> ChatTemplate:
        """Return the chat template, which the tokenizer must have."""
        return ChatTemplate(self.tokenizer, self.settings)

    def is_asked_like(self, other: "Contestant") -> bool:
        """Return whether another contestant is the same model, asked with the same prompts."""
        ours = (self.source, self.tokenizer.chat_template, self.settings, self.columns)
        theirs = (other.source, other.tokenizer.chat_template, other.settings, other.columns)
        return ours == theirs

    def to_json(self) -> dict[str, Any]:
        """Return what identifies the model, as results.json has it."""
        return {
            "name": self.name,
            "adapters_on": self.source.base,
            "before": self.before,
            "chat_template_kwargs": self.settings,
            "sha256": hash_weights(self.source),
        }


def find_contestants(names: Sequence[str], with_base: bool) -> list[Contestant]:
    """Return the models of the command line, each base before the first of its runs.

    Raises SystemExit with 64 for a folder that is no model, or whose base is unknown; with 65 for
    one that cannot be read; with 69 without the hub.
    """
    found: list[Contestant] = []
    for name in names:
        source = find_source(name)
        before = None
        if with_base:
            base = base_of(source)
            before = add_base(found, make(base.name, base, source, name))
        found.append(make(name, source, source, name, before))
    return found


def add_base(found: list[Contestant], base: Contestant) -> str:
    """Add a base unless it is there already, and return its name.

    A base that is asked with other prompts for another run is evaluated again for it.
    """
    for other in found:
        if other.is_asked_like(base):
            return other.name
    if any(other.name == base.name for other in found):
        place = len(found) + 1
        name = f"{base.name} ({place})"
        base = Contestant(**vars(base) | {"name": name})
    found.append(base)
    return base.name


def make(
    name: str, source: Source, tokenizer: Source, run: str, before: str | None = None
) -> Contestant:
    """Return a contestant.

    Args:
        tokenizer: where the tokenizer is.
        run: the folder by whose run.json it is asked.
    """
    return Contestant(
        name,
        source,
        load_tokenizer(tokenizer, needs_template=False),
        arguments_of_run(run),
        columns_of_run(run),
        longest_of(source),
        before,
    )


def longest_of(source: Source) -> int:
    """Return the number of positions of a model, which is 10^9 if it has no limit."""
    try:
        config = AutoConfig.from_pretrained(
            source.weights, revision=source.revision, trust_remote_code=False
        )
    except LOAD_ERRORS as error:
        code = Exit.DATA if source.is_local else Exit.NO_HUB
        stop(code, f"{source.weights}: cannot be loaded: {first_line(error)}")
    return most_positions(config)


def hash_weights(source: Source) -> dict[str, str]:
    """Return {file: SHA-256} of the weights, and of the run.json beside them.

    A folder of adapters has those of its base too. {} for a model on the hub.
    """
    found = {}
    for name in (source.name, source.base):
        if name is None or not Path(name).is_dir():
            continue
        for pattern in (*WEIGHTS, RUN, PUBLIC_RUN):
            for path in sorted(Path(name).glob(pattern)):
                found[str(path)] = hash_file(path)
    return found


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
