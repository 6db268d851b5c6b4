# SPDX-License-Identifier: Apache-2.0
"""A conversation as a row of a .jsonl file, which recipes/llama.py trains on."""

import json
from pathlib import Path

from chatting.history import History
from llama import row_to_conversation


def save_row(history: History, path: Path) -> int:
    """Append a conversation to a file as one row and return how many rows the file has now.

    The rows that are in the file remain as they are.

    Raises:
        ValueError: if the file is not a .jsonl file or the conversation cannot be trained on.
        OSError: if the file cannot be written.
    """
    if path.suffix != ".jsonl":
        raise ValueError(f"{path}: the name of the file must end in .jsonl")
    if not history.turns:
        raise ValueError("nothing was said yet")
    row = history.row()
    try:
        row_to_conversation(row)
    except ValueError as error:
        advice = "only complete answers are trained on"
        raise ValueError(f"the conversation {error}; {advice}") from None
    text = json.dumps(row) + "\n"
    with path.open("a+b") as file:
        file.seek(0)
        before = file.read()
        if before and not before.endswith(b"\n"):
            text = "\n" + text  # a last line without its end would run into the new row
        file.write(text.encode())
    lines = before.splitlines() + text.encode().splitlines()
    return sum(1 for line in lines if line.strip())
