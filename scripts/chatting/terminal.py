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
from generation.answering import STOPPED, UNANSWERED, print_answer, printable

HELP = """\
/help           show this list
/system [TEXT]  set the system prompt; without a text remove it
/reset          start over; the system prompt remains
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

    def run(self) -> None:
        """Converse until the end of the input, /exit, or Ctrl-C at the prompt."""
        is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if is_interactive:
            with contextlib.suppress(ImportError):  # It lets `input` edit and recall lines
                importlib.import_module("readline")
            self.list_models()
            print("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.")
        first, following = ("> ", ". ") if is_interactive else ("", "")
        text = ""
        while text != "/exit":
            try:
                text = input(first)
                while text.endswith("\\"):
                    text = text.removesuffix("\\") + "\n" + input(following)
            except (EOFError, KeyboardInterrupt):
                print()
                return
            self.react(text.strip())

    def react(self, text: str) -> None:
        """Answer a text, or carry out a command. Whatever is wrong is one line."""
        try:
            if text.startswith("/"):
                name, _, argument = text.partition(" ")
                self.obey(name, argument.strip())
            elif text:
                self.ask(text)
        except (*UNANSWERED, OSError) as error:
            print(f"error: {printable(first_line(error))}", file=sys.stderr)

    def obey(self, name: str, argument: str) -> None:
        """Carry out a command. Raises ValueError if it cannot be."""
        match name:
            case "/help":
                print(HELP)
            case "/system":
                self.history.system = argument
            case "/reset":
                self.history.turns.clear()
            case "/save":
                print(self.history.save(Path(argument or self.save_to)))
            case "/model":
                if argument:
                    self.choose(argument)
                self.list_models()
            case "/exit":
                pass
            case _:
                raise ValueError(f"{name}: no such command; /help lists them")

    def choose(self, number: str) -> None:
        """Continue with the answers of another model. Raises ValueError if there is none."""
        count = len(self.speakers)
        if number not in map(str, range(1, count + 1)):
            raise ValueError(f"/model needs a number from 1 to {count}")
        self.history.chosen = int(number) - 1

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
        conversation = self.history.asking(prompt)
        turn = Turn(prompt)
        for number, speaker in enumerate(self.speakers):
            if len(self.speakers) > 1:
                print(f"{number + 1} {speaker.name}:")
            reply = print_answer(speaker.answerer, conversation, speaker.taking_turn())
            if not turn.replies:
                self.history.turns.append(turn)
            turn.replies[number] = reply
            if reply.mark == STOPPED:
                return
