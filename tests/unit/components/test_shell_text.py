# SPDX-License-Identifier: Apache-2.0
"""A folded command pastes into a shell, and fits the screen."""

import subprocess

from components.shell_text import folded

WORDS = ["printf", "%s,", "--name", "two words", "--flag", "--list", "a", "b", "--last", "it's"]


def test_a_folded_command_is_the_same_command():
    text = folded(WORDS, width=24)
    lines = text.splitlines()
    assert len(lines) > 2 and max(map(len, lines)) <= 24
    said = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert said.stdout == "".join(f"{word}," for word in WORDS[2:])


def test_a_short_command_stays_on_one_line():
    assert folded(["ls", "--all"], width=80) == "ls --all"
