# SPDX-License-Identifier: Apache-2.0
"""Lines that begin with a slash."""

import pytest

from chatting import commands
from chatting.commands import Call, read_command


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("/help", Call("help", "")),
        ("/system  Be brief. /now ", Call("system", "Be brief. /now")),
        ("/model 2", Call("model", "2")),
    ],
)
def test_a_command_is_read_with_what_follows_it(text, call):
    assert commands.is_command(text) and read_command(text) == call


@pytest.mark.parametrize("text", [" /home/me", "a /help", "/a\nb", "what is 1/2?"])
def test_other_texts_are_for_the_model(text):
    assert not commands.is_command(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("/", "/: no such command; /help lists them"),
        ("/Help", "/Help: no such command"),
        ("/undo 2", "/undo is followed by nothing else"),
    ],
)
def test_a_wrong_command_is_named(text, problem):
    with pytest.raises(ValueError, match=problem):
        read_command(text)


def test_the_help_has_every_command_in_80_columns():
    lines = commands.help_text().splitlines()
    named = [line.split()[0].removeprefix("/") for line in lines if line.startswith("/")]
    assert named == list(commands.COMMANDS)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("text", ["", "-1", "inf", "nan", "hot"])
def test_what_is_no_temperature_is_refused(text):
    with pytest.raises(ValueError, match="/temperature needs a number"):
        commands.read_temperature(text)


def test_models_are_numbered_from_one():
    assert [commands.read_model_number(text, 2) for text in ("1", "2")] == [0, 1]
    for text in ("0", "3", "-1", "a", "²"):
        with pytest.raises(ValueError, match="from 1 to 2"):
            commands.read_model_number(text, 2)
