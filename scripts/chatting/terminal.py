# SPDX-License-Identifier: Apache-2.0
"""The conversation in the terminal, or with prompts that come through a pipe."""

import contextlib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chatting.conversation import History, Turn
from chatting.speakers import Speaker
from common import first_line
from generation.answering import UNANSWERED, Ending, Reply, print_parts, printable

HELP = """\
/help           show this list
/system [TEXT]  set the system prompt; without a text remove it
/reset          start over; the system prompt remains
/retry          answer the last prompt again
/save [FILE]    append the conversation to a .jsonl file as a row to train on
/model [N]      continue with the answers of model N; without a number list them
/exit           leave, as Ctrl-D does
A line that ends in a backslash continues in the next one. Ctrl-C stops an answer."""


@dataclass
class Terminal:
    """A conversation on standard input and output.

    Attributes:
        save_to: the file of /save without a name.
    """

    speakers: Sequence[Speaker]
    history: History
    save_to: Path
    is_interactive: bool

    def run(self) -> None:
        """Converse until the end of the input, /exit, or Ctrl-C at the prompt."""
        if self.is_interactive:
            with contextlib.suppress(ImportError):  # It lets `input` edit and recall lines
                importlib.import_module("readline")
            self.list_models()
            print("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.")
        while True:
            try:
                text = self.read_text().strip()
                if text == "/exit":
                    return
                if text:
                    self.react(text)
            except (EOFError, KeyboardInterrupt):
                print()
                return

    def read_text(self) -> str:
        """Return the next text, of several lines where each but the last ends in a backslash.

        Raises EOFError at the end of the input.
        """
        line = self.read_line("> ")
        lines = []
        while line.endswith("\\"):
            lines.append(line.removesuffix("\\"))
            line = self.read_line(". ")
        return "\n".join([*lines, line])

    def read_line(self, prompt: str) -> str:
        """Return the next line of the input; only a person sees the prompt."""
        return input(prompt if self.is_interactive else "")

    def react(self, text: str) -> None:
        """Answer a text, or carry out a command. Whatever is wrong is one line."""
        try:
            if text.startswith("/"):
                self.obey(*text.partition(" ")[::2])
            else:
                self.ask(text)
        except UNANSWERED as error:
            print(f"error: {printable(first_line(error))}", file=sys.stderr)

    def obey(self, name: str, argument: str) -> None:
        """Carry out a command. Raises ValueError if it cannot be."""
        match name:
            case "/help":
                print(HELP)
            case "/system":
                self.history.system = argument.strip()
            case "/reset":
                self.history.turns.clear()
            case "/retry":
                self.retry()
            case "/save":
                print(self.history.save(Path(argument.strip() or self.save_to)))
            case "/model":
                self.choose(argument.strip())
            case _:
                raise ValueError(f"{name}: no such command; /help lists them")

    def retry(self) -> None:
        """Answer the last prompt again. If that fails the old answers remain."""
        if not self.history.turns:
            raise ValueError("nothing was said yet")
        before = list(self.history.turns)
        turn = self.history.turns.pop()
        try:
            self.ask(turn.prompt)
        except UNANSWERED:
            self.history.turns = before  # Models before the one that failed may have answered
            raise

    def choose(self, number: str) -> None:
        """Continue with the answers of another model, or list the models."""
        count = len(self.speakers)
        if number:
            if number not in map(str, range(1, count + 1)):
                raise ValueError(f"/model needs a number from 1 to {count}")
            self.history.chosen = int(number) - 1
        self.list_models()

    def list_models(self) -> None:
        """Print the models, and which of them the conversation continues with."""
        for number, speaker in enumerate(self.speakers, 1):
            print(f"{number} {speaker.name}")
        if len(self.speakers) > 1:
            chosen = self.history.chosen + 1
            print(f"The conversation continues with the answers of {chosen}; /model N changes it.")

    def ask(self, prompt: str) -> None:
        """Print the answer of each model, and add them to the conversation.

        Raises ValueError, or another of UNANSWERED, if a model cannot answer; the answers of those
        before it are kept.
        """
        turn = Turn(prompt)
        try:
            for number, speaker in enumerate(self.speakers):
                if len(self.speakers) > 1:
                    print(f"{number + 1} {speaker.name}:")
                turn.replies[number] = self.show_answer(speaker, prompt)
                if turn.replies[number].ending is Ending.STOPPED:
                    return
        finally:
            if turn.replies:
                self.history.turns.append(turn)

    def show_answer(self, speaker: Speaker, prompt: str) -> Reply:
        """Print an answer while it is generated, and return it. Ctrl-C stops it."""
        running = speaker.answer(self.history, prompt)
        try:
            print_parts(running)
        except KeyboardInterrupt:
            running.stop()
            print_parts(running)
        reply = running.result()
        print(reply.ending.value)
        return reply
