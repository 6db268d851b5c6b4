# SPDX-License-Identifier: Apache-2.0
"""Tables in Markdown, and numbers in their cells."""

from collections.abc import Sequence
from decimal import Decimal


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return an aligned Markdown table. Every line has as many cells as the header."""
    columns = zip(header, *lines, strict=True)
    widths = [max(len(cell) for cell in column) for column in columns]
    rule = ["-" * width for width in widths]
    rows = [header, rule, *lines]
    return "\n".join(row_of(row, widths) for row in rows)


def row_of(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return one row, each cell as wide as its column."""
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    inner = " | ".join(padded)
    return f"| {inner} |"


def decimal(number: float) -> str:
    """Return a number with one significant digit and without an exponent, such as 0.0000002."""
    return f"{Decimal(f'{number:.0e}'):f}"
