# SPDX-License-Identifier: Apache-2.0
"""Commands of the terminal: lines that begin with a slash."""

from typing import NamedTuple


class Command(NamedTuple):
    """A command: what follows its name, and what it does."""

    argument: str
    meaning: str


COMMANDS = {
    "help": Command("", "show this list"),
    "system": Command("[TEXT]", "set the system prompt; without a text remove it"),
    "reset": Command("", "start over; the system prompt remains"),
    "undo": Command("", "take the last prompt and its answers back"),
    "retry": Command("", "answer the last prompt again"),
    "save": Command("[FILE]", "append the conversation to a .jsonl file as a row to train on"),
    "model": Command("[N]", "continue with the answers of model N; without a number list them"),
    "temperature": Command("X", "0 always takes the likeliest token, more samples"),
    "exit": Command("", "leave, as Ctrl-D does"),
}
NOTES = (
    "A line that ends in a backslash continues in the next one, and so does a text",
    'that begins with """, up to the next """. Ctrl-C stops an answer.',
    "To say something that begins with a slash, put a space before it.",
)


class Call(NamedTuple):
    """A command as it was typed, with what follows its name."""

    name: str
    argument: str


def is_command(text: str) -> bool:
    """Return whether a text is a command."""
    return text.startswith("/") and "\n" not in text


def read_command(text: str) -> Call:
    """Return a text that begins with a slash as a call. Raises ValueError for an unknown one."""
    name, _, argument = text[1:].partition(" ")
    if name not in COMMANDS:
        raise ValueError(f"/{name}: no such command; /help lists them")
    argument = argument.strip()
    if argument and not COMMANDS[name].argument:
        raise ValueError(f"/{name} is followed by nothing else")
    return Call(name, argument)


def help_text() -> str:
    """Return the list of commands."""
    calls = {name: f"/{name} {command.argument}" for name, command in COMMANDS.items()}
    width = max(len(call) for call in calls.values())
    lines = [f"{calls[name]:{width}}  {COMMANDS[name].meaning}" for name in COMMANDS]
    return "\n".join([*lines, *NOTES])


def read_temperature(text: str) -> float:
    """Return a temperature. Raises ValueError if a text is none."""
    try:
        temperature = float(text)
    except ValueError:
        temperature = -1.0
    if not 0 <= temperature < float("inf"):
        raise ValueError("/temperature needs a number of 0 (greedy) or more, such as 0.7")
    return temperature


def read_model_number(text: str, count: int) -> int:
    """Return the number of a model, from 0, of one that is typed from 1.

    Raises ValueError if there is no such model.
    """
    if text not in [str(number) for number in range(1, count + 1)]:
        raise ValueError(f"/model needs a number from 1 to {count}")
    return int(text) - 1
