# SPDX-License-Identifier: Apache-2.0
"""Where the parts that ranks noted (proof/part_probe.py) are in the whole matrices and rows."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Box = tuple[int, int, int, int]  # top, left, bottom, right: rows and columns of a matrix
Span = tuple[int, int]  # the first token, and the one after the last


class UnknownPartError(Exception):
    """What a rank has is nowhere in the whole, or in several places."""


# ---- Weights ----
def find_box(part: np.ndarray, whole: np.ndarray) -> Box:
    """Return the place of a part in a matrix, both by their values.

    Args:
        part: a block of the matrix, or in one line some of its whole rows.

    Raises:
        UnknownPartError: if it is not in the matrix.
    """
    width = whole.shape[1]
    if part.ndim == 1 and part.size % width == 0:
        part = part.reshape(-1, width)
    if part.ndim == 2:
        height, width = part.shape
        for top, left in np.argwhere(whole == part[0, 0]).tolist():
            box = (top, left, top + height, left + width)
            if np.array_equal(inside(whole, box), part):
                return box
    raise UnknownPartError(f"{part.shape} numbers are nowhere in a matrix of {whole.shape}")


def inside(whole: np.ndarray, box: Box) -> np.ndarray:
    """Return the numbers of a matrix in a box."""
    top, left, bottom, right = box
    return whole[top:bottom, left:right]


# ---- Tokens ----
def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return what a rank noted of its forward passes."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines_of_tokens(noted: Mapping[str, Any], pad: int) -> list[dict[int, int]]:
    """Return {position: token} of each line of a forward pass, without padding."""
    lines = []
    for number, ids in enumerate(noted["ids"]):
        positions = range(len(ids))
        if noted["positions"] is not None:
            given = noted["positions"]
            positions = given[number % len(given)]  # One line of positions may serve all.
        pairs = zip(positions, ids, strict=True)
        lines.append({place: token for place, token in pairs if token != pad})
    return lines


def find_row(tokens: Mapping[int, int], rows: Sequence[Mapping[int, int]]) -> int:
    """Return the number of the row to which all these tokens belong.

    Raises UnknownPartError if it is not exactly one.
    """
    found = []
    for number, row in enumerate(rows):
        if tokens.items() <= row.items():
            found.append(number)
    if len(found) != 1:
        raise UnknownPartError(f"tokens {dict(tokens)} are in the rows {found}")
    return found[0]


def spans_of(positions: Sequence[int]) -> list[Span]:
    """Return the ranges without gaps that positions make."""
    spans: list[Span] = []
    for place in sorted(positions):
        if spans and spans[-1][1] == place:
            spans[-1] = (spans[-1][0], place + 1)
        else:
            spans.append((place, place + 1))
    return spans
