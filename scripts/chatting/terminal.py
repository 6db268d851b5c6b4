# SPDX-License-Identifier: Apache-2.0
"""The conversation in the terminal, or with prompts that come through a pipe."""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chatting.conversation import History, Turn
from chatting.speakers import Speaker
from common import first_line
from generation.answering import STOPPED, UNANSWERED, print_answer, printable
from tasks.illustrated import IllustratedTemplate
from tasks.images import load_picture

HELP = """\
/help           show this list
/image PATH     put an image before the next prompt; may be repeated
/reset          start over
/save [FILE]    append the conversation to a .jsonl file as a row to train on
/model [N]      continue with the answers of model N; without a number list them
/exit           leave, as Ctrl-D does
Ctrl-C stops an answer."""


@dataclass
class Terminal:
    """A conversation on standard input and output.

    Attributes:
        save_to: the file of /save without a name.
        images: absolute paths of those that the next prompt carries.
    """

    speakers: Sequence[Speaker]
    history: History
    save_to: Path
    images: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Converse until the end of the input, /exit, or Ctrl-C at the prompt."""
        is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if is_interactive:
            importlib.import_module("readline")  # It lets `input` edit and recall lines
            self.list_models()
            print("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.")
        text = ""
        while text != "/exit":
            try:
                text = input("> " if is_interactive else "").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            try:  # Whatever is wrong is one line
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
            case "/image":
                self.add_image(str(Path(argument).expanduser().absolute()))
            case "/reset":
                self.history.turns.clear()
                self.images = []
            case "/save":
                print(self.history.save(Path(argument or self.save_to)))
            case "/model":
                if argument:
                    if argument not in map(str, range(1, len(self.speakers) + 1)):
                        raise ValueError(f"/model {argument}: there is no such model")
                    self.history.chosen = int(argument) - 1
                self.list_models()
            case "/exit":
                pass
            case _:
                raise ValueError(f"{name}: no such command; /help lists them")

    def add_image(self, path: str) -> None:
        """Have the next prompt carry an image. Raises ValueError if a model cannot read it."""
        for speaker in self.speakers:
            if not isinstance(speaker.answerer.template, IllustratedTemplate):
                raise ValueError(f"/image: {speaker.name} reads no images")
        picture, _ = load_picture(path, Path(), False)
        self.images.append(path)
        size = "{} x {}".format(*picture.size)
        print(f"Image {len(self.images)} of the next prompt: {size} pixels")

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
        conversation = self.history.asking(prompt, self.images)
        turn = Turn(prompt, images=self.images)
        for number, speaker in enumerate(self.speakers):
            if len(self.speakers) > 1:
                print(f"{number + 1} {speaker.name}:")
            reply = print_answer(speaker.answerer, conversation, speaker.taking_turn())
            if not turn.replies:
                self.history.turns.append(turn)
                self.images = []
            turn.replies[number] = reply
            if reply.mark == STOPPED:
                return
