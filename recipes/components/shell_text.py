# SPDX-License-Identifier: Apache-2.0
"""Commands as text that is read on a screen and pasted into a shell."""

import shlex
from collections.abc import Sequence


def folded(words: Sequence[str], width: int, indent: int = 4) -> str:
    """Return a command, folded between its flags with a backslash.

    Args:
        width: the most columns of a line; a flag whose value is wider keeps it whole.
        indent: columns before each line but the first.
    """
    ending = " \\"
    lines: list[str] = []
    for part in flags_with_values(words):
        taken = len(ending) + (indent if len(lines) > 1 else 0)
        if lines and len(lines[-1]) + 1 + len(part) <= width - taken:
            lines[-1] += f" {part}"
        else:
            lines.append(part)
    return f"{ending}\n{indent * ' '}".join(lines)


def flags_with_values(words: Sequence[str]) -> list[str]:
    """Return the parts of a command: the program, and each flag with its values."""
    parts: list[str] = []
    for word in map(shlex.quote, words):
        if word.startswith("--") or not parts:
            parts.append(word)
        else:
            parts[-1] += f" {word}"
    return parts
