# SPDX-License-Identifier: Apache-2.0
"""Control characters in the output of a model are shown, and do not reach the terminal."""

import pytest
from transformers import PreTrainedTokenizerFast

from generation.printing import PrintableStreamer, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),  # would clear the screen and ring the bell
        ("a\rb\x08c\x9bd", "a\\rb\\x08c\\x9bd"),
        ("\ud800\ue000", "\\ud800\\ue000"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text, shown):
    assert printable(text) == shown and printable(text).isprintable()


@pytest.mark.parametrize(
    "text", ["two\n\tlines", "Größe 東京 🙂", "👩\u200d🔬", "می\u200cخواهم", "\\x1b"]
)
def test_text_of_every_language_stays_as_it_is(text):
    assert printable(text) == text


def test_an_answer_that_is_streamed_is_escaped_too(capsys):
    PrintableStreamer(PreTrainedTokenizerFast).on_finalized_text("a\x1bb", stream_end=True)
    assert capsys.readouterr().out == "a\\x1bb\n"
