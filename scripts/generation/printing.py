# SPDX-License-Identifier: Apache-2.0
"""Text of a model on a terminal, which must not obey it."""

import unicodedata
from typing import Any

from transformers import TextStreamer

KEPT = "\n\t"
# Control characters, lone surrogates, private use, not assigned
ESCAPED_CATEGORIES = ("Cc", "Cs", "Co", "Cn")


def printable(text: str) -> str:
    """Return a text with the characters that a terminal obeys or cannot show as escapes.

    An untrained model writes random bytes. They would move the cursor or change colors, and tools
    such as grep would take the output for a binary file.
    """
    return "".join(map(printable_character, text))


def printable_character(character: str) -> str:
    """Return a character as it is, or its escape, such as `\\x1b`."""
    if character in KEPT or unicodedata.category(character) not in ESCAPED_CATEGORIES:
        return character
    return character.encode("unicode_escape").decode()


class PrintableStreamer(TextStreamer):
    """Prints an answer while it is generated, without the prompt and special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a part of the answer."""
        super().on_finalized_text(printable(text), stream_end)
