# SPDX-License-Identifier: Apache-2.0
"""Prompts for a receipt, and where they come from.

From --prompts, or else from the evaluation rows of the run, then from its training rows, which were
not held out, then from a list of simple questions. A receipt says how many came from where.
"""

import argparse
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets.exceptions import DatasetGenerationError

from components.chat_template import ChatTemplate, fit_arguments
from components.conversations import Conversation
from components.data_files import FILE_TYPES
from exits import Exit, first_line, stop
from generation.loading import find_device_problem
from generation.questions import read_rows, to_question

LONGEST = 1024  # tokens of a prompt: longer ones make a receipt slow
LONGEST_TEXT = 200  # characters of a row of raw text that are a prompt
SUBJECTS = (
    "a lamp",
    "the moon",
    "bread",
    "a river",
    "music",
    "winter",
    "a bridge",
    "tea",
    "a library",
    "the sea",
)
REQUESTS = (
    "Describe {} in one sentence.",
    "What is the color of {}?",
    "Write a short poem about {}.",
    "Why do people like {}?",
    "Name three words that go with {}.",
    "Explain {} to a child.",
    "Translate into French: {}.",
    "Is {} older than a car?",
    "Ask me a question about {}.",
    "How would you draw {}?",
)


def find_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield what is wrong with the options of usage.add_prompt_options, and with --bound."""
    if args.num_prompts < 1:
        yield "--num_prompts must be at least 1"
    if args.max_new_tokens < 1:
        yield "--max_new_tokens must be at least 1"
    if args.bound is not None and not 0 < args.bound < math.inf:
        yield "--bound must be above 0"
    if args.device is not None:
        yield from find_device_problem(args.device)


@dataclass(frozen=True)
class Prompt:
    """A conversation to be answered, or a text to be continued."""

    conversation: Conversation | None
    text: str = ""

    def render(self, template: ChatTemplate | None) -> str:
        """Return the text that the model sees. A conversation needs a template."""
        if self.conversation is None or template is None:
            return self.text
        conversation = fit_arguments(self.conversation, template)
        return template.render(conversation, add_generation_prompt=True)


@dataclass
class Prompts:
    """Prompts of a receipt.

    Attributes:
        sources: {where prompts come from: how many}.
    """

    items: list[Prompt] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)

    def take(self, source: str, candidates: Iterator[Prompt], number: int) -> None:
        """Add prompts of a source until there are as many as wanted."""
        for prompt in candidates:
            if len(self.items) >= number:
                return
            self.items.append(prompt)
            self.sources[source] = self.sources.get(source, 0) + 1


@dataclass(frozen=True)
class Reader:
    """Reads rows as prompts.

    Attributes:
        template: None for a model without a chat template, which continues texts.
        columns: {role: column} of the run.
        longest: tokens; longer prompts are left out.
    """

    tokenizer: Any
    template: ChatTemplate | None
    columns: Mapping[str, str]
    longest: int = LONGEST

    @property
    def taken(self) -> str:
        """Which rows are read, for the message that a file has none of them."""
        return f"rows of at most {self.longest} tokens"

    def read(self, path: Path, skip_bad_rows: bool) -> Iterator[Prompt]:
        """Yield the prompts in a file, without those that are too long.

        Raises SystemExit with 65 after a line that names a bad row, unless it is to be skipped.
        """
        try:
            for place, row in read_rows(path, self.columns):
                try:
                    prompt = self._read_row(place, row)
                except ValueError:
                    if not skip_bad_rows:
                        raise
                    continue
                if self.is_short(prompt):
                    yield prompt
        except (OSError, ValueError, DatasetGenerationError) as error:
            if not skip_bad_rows:
                reason = first_line(error.__cause__ or error)
                stop(Exit.DATA, reason if str(path) in reason else f"{path}: {reason}")

    def make(self) -> Iterator[Prompt]:
        """Yield simple questions, or for a model without a template their beginnings."""
        for request, subject in itertools.product(REQUESTS, SUBJECTS):
            text = request.format(subject)
            if self.template is None:
                yield Prompt(None, text)
            else:
                messages = [{"role": "user", "content": text}]
                yield Prompt(Conversation(messages, tools=[], is_trained_on=[False]))

    def is_short(self, prompt: Prompt) -> bool:
        """Return whether a prompt has at least one token, and is not too long."""
        text = prompt.render(self.template)
        num_tokens = len(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return 0 < num_tokens <= self.longest

    def _read_row(self, place: str, row: Any) -> Prompt:
        if self.template is not None:
            return Prompt(to_question(place, with_completion(row), None, self.columns).conversation)
        column = self.columns.get("text", "text")
        text = row.get(column) if isinstance(row, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{place}: has no text in the column {column}")
        return Prompt(None, text.strip()[:LONGEST_TEXT].rstrip())


def longest_prompt(config: Any, max_new_tokens: int) -> int:
    """Return the most tokens of a prompt that leave a model enough positions for an answer.

    config: that of the model.
    Raises SystemExit with 64 if no prompt does.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return LONGEST
    if positions <= max_new_tokens:
        stop(Exit.USAGE, f"--max_new_tokens {max_new_tokens}: the model has {positions} positions")
    return min(LONGEST, positions - max_new_tokens)


def with_completion(row: Any) -> Any:
    """Return a row of preference tuning with its chosen answer as the completion."""
    if isinstance(row, dict) and "prompt" in row and "chosen" in row and "completion" not in row:
        return {**row, "completion": row["chosen"]}
    return row


def files_of_run(arguments: Mapping[str, Any]) -> Sequence[tuple[str, Path]]:
    """Return (what rows they are, path) of the files of rows that a run read and that are here."""
    found = []
    for what, key in (
        ("evaluation rows of the run", "eval_dataset_name"),
        ("training rows of the run, not held out", "dataset_name"),
    ):
        given = arguments.get(key) or []
        names = [given] if isinstance(given, str) else given
        for path in map(Path, names):
            if path.suffix in FILE_TYPES and path.is_file():
                found.append((what, path))
    return found


def collect(
    reader: Reader, path: Path | None, arguments: Mapping[str, Any], number: int
) -> Prompts:
    """Return at least one and at most `number` prompts.

    Args:
        path: the file that the user named, if any. Then no other rows are read.
        arguments: those of the run.

    Raises SystemExit with 65 if there is none.
    """
    prompts = Prompts()
    if path is not None:
        if not path.is_file():
            stop(Exit.DATA, f"{path}: no such file")
        prompts.take(str(path), reader.read(path, skip_bad_rows=False), number)
        if not prompts.items:
            stop(Exit.DATA, f"{path}: no {reader.taken}")
    else:
        for what, file in files_of_run(arguments):
            prompts.take(what, reader.read(file, skip_bad_rows=True), number)
    made = filter(reader.is_short, reader.make())
    prompts.take("simple questions, made here", made, number)
    if not prompts.items:
        fix = "name a file of shorter ones with --prompts"
        stop(Exit.DATA, f"no prompt has at most {reader.longest} tokens; {fix}")
    return prompts
