# SPDX-License-Identifier: Apache-2.0
"""A plan as text and as JSON."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cards import GIB
from .errors import CannotWriteError
from .ledger import Sizes
from .saving import Saving

TERMINAL = "-"


@dataclass(frozen=True)
class Report:
    """The memory of one plan, in bytes."""

    title: str
    method: str  # closed form or traced
    device: Sizes  # bytes on a GPU at its peak, by category
    host: Sizes  # bytes that are held on the host, for each rank
    saving: Saving | None = None  # None if it cannot be told
    card: int | None = None
    card_note: str = ""  # how many GiB of the card count
    ranks: Sizes = field(default_factory=dict)  # peaks of the ranks of a pipeline, by their parts
    hints: list[str] = field(default_factory=list)  # what else decides the peak

    @property
    def peak(self) -> int:
        """Bytes of a GPU at its peak."""
        return sum(self.device.values())

    @property
    def fits(self) -> bool:
        """Whether the peak is within the card, if there is one."""
        return self.card is None or self.peak <= self.card

    def as_object(self) -> dict[str, Any]:
        """Return the report as written to JSON."""
        found: dict[str, Any] = {
            "title": self.title,
            "method": self.method,
            "device": self.device,
            "peak": self.peak,
            "host": self.host,
        }
        if self.ranks:
            found["ranks"] = self.ranks
        if self.saving:
            found["saving"] = {"rank": self.saving.most, "host": self.saving.host}
        if self.card:
            found["card"] = self.card
        if self.hints:
            found["hints"] = self.hints
        return found

    def __str__(self) -> str:
        """The plan for a terminal: GiB on the device by category and on the host, and a verdict."""
        lines = [f"{self.title}, {self.method}, GiB"]
        lines += [line(name, size) for name, size in self.device.items()]
        lines.append(f"{line('peak per GPU', self.peak)} GiB")
        for number, (part, size) in enumerate(self.ranks.items()):
            lines.append(f"{line(f'  of rank {number}', size)} GiB: {part}")
        if self.host:
            whole = line("host, per rank", sum(self.host.values()))
            lines.append(f"{whole} GiB: {', '.join(self.host)}")
        if self.saving:
            whole = line("save, per rank", self.saving.most)
            lines.append(f"{whole} GiB of its host: its share, and the largest tensor")
            lines.append(f"{line('save, per host', self.saving.host)} GiB, all its ranks")
        if self.card:
            lines.append(f"{line('card', self.card)} GiB: {self.verdict(self.card)}")
            lines.append(self.card_note)
        lines += self.hints
        return "\n".join(lines)

    def verdict(self, card: int) -> str:
        """Return whether the card is large enough, and by how much."""
        left = (card - self.peak) / GIB
        if self.fits:
            return f"fits, {left:.1f} GiB left"
        return f"does not fit: {-left:.1f} GiB too much"


def line(name: str, size: float) -> str:
    """Return a line of a plan: a name, and bytes in GiB."""
    return f"  {name:<16}{size / GIB:10.3f}"


def write_json(path: str | None, content: dict[str, Any]) -> None:
    """Write to a file, to the terminal for "-", nowhere for None. Raises CannotWriteError."""
    if path is None:
        return
    text = json.dumps(content, indent=2) + "\n"
    if path == TERMINAL:
        print(text, end="")
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise CannotWriteError(path, error) from None
