# SPDX-License-Identifier: Apache-2.0
"""A receipt: whether forms of a model say the same, and which files they are.

A receipt with a problem has not passed. The forms are contestants, so that one that was exported to
another format has a receipt too.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.folder import CARD
from merging.comparing import Comparison, as_lists, compare, largest_logit, only_finite
from merging.contestants import Contestant
from merging.disk import writing_to

NAME = "receipt.json"
MARKER = ".made_by_merge"  # a file that marks a folder which is not complete yet
NOT_HASHED = (NAME, MARKER, CARD)  # People write into cards.
CHUNK = 2**20  # bytes that are hashed at a time


@dataclass
class Receipt:
    """What is known of the forms of a model.

    Attributes:
        facts: what was merged or exported, from what, and how.
        reference: the contestant that the others are compared with.
        answers: {contestant: the likeliest tokens for each prompt}.
        problems: what is wrong apart from the comparisons.
        gap_without_adapters: the largest difference of a logit between the reference and its base.
            A gap as large as this one could hide adapters that were left out. None if unknown.
    """

    facts: dict[str, Any]
    reference: Contestant
    comparisons: list[Comparison] = field(default_factory=list)
    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    gap_without_adapters: float | None = None

    def add(self, contestant: Contestant, relative_bound: float) -> Comparison:
        """Compare a contestant with the reference, and keep the result but not its logits."""
        comparison = compare(self.reference, contestant, relative_bound)
        self.comparisons.append(comparison)
        self.answers[contestant.name] = as_lists(contestant.tokens)
        return comparison

    @property
    def all_problems(self) -> list[str]:
        """Return everything that is wrong."""
        found = list(self.problems)
        for comparison in self.comparisons:
            found += comparison.problems
        return found

    def to_json(self, files: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of receipt.json.

        Args:
            files: as `hash_files` returns them.
        """
        answers = {self.reference.name: as_lists(self.reference.tokens)}
        return {
            **self.facts,
            "passed": not self.all_problems,
            "problems": self.all_problems,
            "reference": self._reference_to_json(),
            "comparisons": [comparison.to_json() for comparison in self.comparisons],
            "greedy_tokens": answers | self.answers,
            "files": dict(files),
        }

    def _reference_to_json(self) -> dict[str, Any]:
        prompts = json.dumps(list(self.reference.rendered), ensure_ascii=False)
        return {
            "name": self.reference.name,
            "dtype": self.reference.dtype,
            "prompts_sha256": hashlib.sha256(prompts.encode()).hexdigest(),
            "stop_tokens": sorted(self.reference.stop_tokens or ()),
            "largest_logit": only_finite(largest_logit(self.reference)),
            "largest_logit_gap_without_adapters": only_finite(self.gap_without_adapters),
        }

    def write(self, folder: Path) -> dict[str, Any]:
        """Write receipt.json to a folder, with the sizes and hashes of the other files.

        Raises SystemExit with 73 if it cannot be written.
        """
        path = folder / NAME
        with writing_to(path):
            content = self.to_json(hash_files(folder))
        lines = []
        for key, value in content.items():
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            lines.append(f"  {json.dumps(key)}: {text}")
        with writing_to(path):
            path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return content

    def table(self) -> list[str]:
        """Return the lines of the receipt's table."""
        number = str(len(self.reference.tokens))
        head = ["", "dtype", "greedy answers", "largest logit gap", "bound", "prompts"]
        rows = [head, [self.reference.name, self.reference.dtype, number, "", "", number]]
        if self.gap_without_adapters is not None:
            gap = f"{self.gap_without_adapters:.2e}"
            rows.append(["its base", self.reference.dtype, "", gap, "", ""])
        for comparison in self.comparisons:
            rows.append(comparison.cells())
        return align(rows)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines, with the cells of each column below each other."""
    widths = []
    for column in zip(*rows, strict=True):
        widths.append(max(map(len, column)))
    lines = []
    for row in rows:
        line = ""
        for cell, width in zip(row, widths, strict=True):
            line += cell.ljust(width) + "  "
        lines.append(line.rstrip())
    return lines


# ---- Files ----
def hash_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return {name: bytes and SHA-256} of the files of a folder, but for NOT_HASHED."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name not in NOT_HASHED:
            found[path.name] = {"bytes": path.stat().st_size, "sha256": hash_file(path)}
    return found


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def find_changed_files(folder: Path) -> Iterator[str]:
    """Yield a problem for each file of a folder that is not the one of its receipt, if it has one.

    Only what is needed to read it is checked of the receipt itself.
    """
    path = folder / NAME
    if not path.is_file():
        return
    try:
        recorded = dict(json.loads(path.read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, LookupError, TypeError):
        yield f"{path}: not a receipt"
        return
    found = hash_files(folder)
    for name, facts in recorded.items():
        if name not in found:
            yield f"{name} is missing; receipt.json lists it"
        elif found[name] != facts:
            yield f"{name} is not the file of receipt.json: {found[name]['bytes']} bytes"
