# SPDX-License-Identifier: Apache-2.0
"""What a model says cannot drive a terminal; tests/launch/test_chat.py has whole conversations."""

import pytest

from generation.answering import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),  # would clear the screen and ring the bell
        ("a\rb\x08c\x9bd", "a\\rb\\x08c\\x9bd"),
        ("\ud800", "\\ud800"),
        ("two\n\tlines, Größe 東京 🙂 👩\u200d🔬", "two\n\tlines, Größe 東京 🙂 👩\u200d🔬"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text, shown):
    assert printable(text) == shown
