# SPDX-License-Identifier: Apache-2.0
"""The conversation in the terminal, or with prompts that come through a pipe."""

import contextlib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from chatting import commands
from chatting.history import History, Turn
from chatting.rows import save_row
from chatting.speakers import Decoding, Speaker
from exits import first_line
from generation.answering import UNANSWERED, Ending, Reply, print_parts, printable

MORE = ". "  # the prompt of the lines that continue a text
QUOTES = '"""'


@dataclass
class Terminal:
    """A conversation on standard input and output.

    Attributes:
        save_to: the file of /save without a name.
    """

    speakers: Sequence[Speaker]
    history: History
    decoding: Decoding
    save_to: Path
    is_interactive: bool

    def run(self) -> None:
        """Converse until the end of the input, /exit, or Ctrl-C at the prompt."""
        self.greet()
        while True:
            try:
                text = self.read_text()
                if text == "/exit":
                    return
                self.react(text)
            except (EOFError, KeyboardInterrupt):
                print()
                return

    def greet(self) -> None:
        """Say who answers, and how to get help."""
        if not self.is_interactive:
            return
        import_line_editing()
        self.list_models()
        print("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.")

    # ---- Input ----
    def read_text(self) -> str:
        """Return the next text, of several lines where they are marked as belonging together.

        Raises EOFError at the end of the input.
        """
        line = self.read_line("> ")
        if line.lstrip().startswith(QUOTES):
            return self.read_quoted(line.lstrip().removeprefix(QUOTES))
        lines = []
        while line.endswith("\\"):
            lines.append(line.removesuffix("\\"))
            try:
                line = self.read_line(MORE)
            except EOFError:
                line = ""
        return "\n".join([*lines, line])

    def read_quoted(self, line: str) -> str:
        """Return the text up to the next three quotes, or to the end of the input."""
        lines = []
        while QUOTES not in line:
            lines.append(line)
            try:
                line = self.read_line(MORE)
            except EOFError:
                break
        else:
            lines.append(line.partition(QUOTES)[0])
        return "\n".join(lines).strip("\n")

    def read_line(self, prompt: str) -> str:
        """Return the next line of the input; only a person sees the prompt."""
        return input(prompt if self.is_interactive else "")

    # ---- Reactions ----
    def react(self, text: str) -> None:
        """Answer a text, or carry out a command. Whatever is wrong is one line."""
        if not text.strip():
            return
        try:
            if commands.is_command(text):
                self.obey(commands.read_command(text))
            else:
                self.ask(text.strip())
        except UNANSWERED as error:
            print(f"error: {printable(first_line(error))}", file=sys.stderr)

    def obey(self, call: commands.Call) -> None:
        """Carry out a command. Raises ValueError if it cannot be."""
        match call.name:
            case "help":
                print(commands.help_text())
            case "system":
                self.history.system = call.argument
                print("The system prompt is set." if call.argument else "No system prompt.")
            case "reset":
                self.history.reset()
                print("The conversation starts over.")
            case "undo":
                self.undo()
            case "retry":
                self.retry()
            case "save":
                self.save(call.argument)
            case "model":
                self.choose(call.argument)
            case "temperature":
                self.decoding.temperature = commands.read_temperature(call.argument)

    def undo(self) -> None:
        """Take the last turn back."""
        turn = self.history.undo()
        if turn is None:
            raise ValueError("nothing was said yet")
        print(f"Taken back: {printable(turn.prompt)}")

    def retry(self) -> None:
        """Answer the last prompt again. If that fails the old answers remain."""
        before = list(self.history.turns)
        turn = self.history.undo()
        if turn is None:
            raise ValueError("nothing was said yet")
        try:
            self.ask(turn.prompt)
        except UNANSWERED:
            self.history.turns = before  # Models before the one that failed may have answered
            raise

    def save(self, name: str) -> None:
        """Append the conversation to a file as a row. Raises ValueError if that is not possible."""
        path = Path(name) if name else self.save_to
        try:
            count = save_row(self.history, path)
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}") from None
        whose = ""
        if len(self.speakers) > 1:
            whose = f", with the answers of {self.speakers[self.history.chosen].name}"
        print(f"Saved{whose}: {path} has {count} row{'' if count == 1 else 's'}.")

    def choose(self, number: str) -> None:
        """Continue with the answers of another model, or list the models."""
        if number:
            self.history.chosen = commands.read_model_number(number, len(self.speakers))
        self.list_models()

    def list_models(self) -> None:
        """Print the models, and which of them the conversation continues with."""
        for number, speaker in enumerate(self.speakers):
            print(f"{number + 1} {speaker.name}")
        if len(self.speakers) > 1:
            chosen = self.history.chosen + 1
            print(f"The conversation continues with the answers of {chosen}; /model N changes it.")

    # ---- Answers ----
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
                reply = self.show_answer(speaker, prompt)
                turn.replies[number] = reply
                if reply.ending is Ending.STOPPED:
                    return
        finally:
            if turn.replies:
                self.history.turns.append(turn)

    def show_answer(self, speaker: Speaker, prompt: str) -> Reply:
        """Print an answer while it is generated, and return it. Ctrl-C stops it."""
        running = speaker.answer(self.history, prompt, self.decoding, Event())
        try:
            print_parts(running)
        except KeyboardInterrupt:
            running.stop()
            print_parts(running)
        reply = running.result()
        print(reply.ending.value)
        return reply


def import_line_editing() -> None:
    """Let `input` edit lines and recall earlier ones, where Python has readline."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")
