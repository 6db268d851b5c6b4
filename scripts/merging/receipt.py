# SPDX-License-Identifier: Apache-2.0
"""A receipt: whether forms of a model say the same, which files they are, and what differs.

A difference above its bound is a problem, and a receipt with a problem has not passed. Bounds are
relative to the largest logit of the reference, since a rounding error grows with the numbers.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from merging.contestants import Contestant

NAME = "receipt.json"
CHUNK = 2**20  # bytes that are hashed at a time
# Largest logit difference, relative to the largest logit, that rounding explains: about 1,000 units
# in the last place in fp32, 10 in fp16 and bf16, where weights and activations are rounded too
ROUNDING = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
# An int8 base also rounds activations to 8 bits, which no merged model does
INT8_ACTIVATIONS = 0.15
# Adapters of a quantized base on the 16-bit one: what quantization changed is not trained away. The
# logits of two unrelated models differ by about the largest logit.
OTHER_BASE = 0.5


@dataclass(frozen=True)
class Comparison:
    """How one contestant differs from the reference.

    Attributes:
        gap: the largest difference of a logit; None if there are no logits.
        bound: the largest gap that is not a problem.
        same_answers: the number of prompts whose likeliest tokens are the same.
        same_prompts: the number of prompts whose texts are the same, byte for byte.
    """

    name: str
    dtype: str
    gap: float | None
    bound: float
    same_answers: int
    same_prompts: int
    num_prompts: int
    problems: Sequence[str] = ()


def compare(reference: Contestant, other: Contestant, relative_bound: float) -> Comparison:
    """Return how a contestant differs from the reference.

    Args:
        relative_bound: of the gap, as a part of the reference's largest logit.
    """
    bound = relative_bound * largest_logit(reference)
    gap = largest_gap(reference, other)
    pairs = list(zip(reference.rendered, other.rendered, strict=True))
    same_prompts = sum(ours.encode() == theirs.encode() for ours, theirs in pairs)
    answers = list(zip(reference.tokens, other.tokens, strict=True))
    same_answers = sum(list(ours) == list(theirs) for ours, theirs in answers)
    return Comparison(
        other.name,
        other.dtype,
        gap,
        bound,
        same_answers,
        same_prompts,
        len(pairs),
        tuple(find_problems(reference, other, gap, bound)),
    )


def find_problems(
    reference: Contestant, other: Contestant, gap: float | None, bound: float
) -> Iterator[str]:
    """Yield what differs between two contestants and must not."""
    for place, (ours, theirs) in enumerate(zip(reference.rendered, other.rendered, strict=True)):
        if ours.encode() != theirs.encode():
            yield (
                f"{other.name}: the template writes prompt {place + 1} as {shorten(theirs)}, but "
                f"in training as {shorten(ours)}"
            )
            break
    if [list(row) for row in reference.prompts] != [list(row) for row in other.prompts]:
        yield f"{other.name}: the tokenizer makes other tokens of the prompts"
    if reference.stop_tokens is not None and other.stop_tokens is not None:
        missing = sorted(reference.stop_tokens - other.stop_tokens)
        if missing:
            yield f"{other.name}: the end tokens {missing} are missing in its generation config"
    if gap is not None and not gap <= bound:  # also if it is not a number
        yield f"{other.name}: a logit differs by {gap:.3g}, and the bound is {bound:.3g}"
    elif gap is not None:
        yield from find_other_answers(reference, other, bound)


def find_other_answers(reference: Contestant, other: Contestant, bound: float) -> Iterator[str]:
    """Yield the first answer that differs although its logits decide for one token.

    Where the two likeliest tokens are closer than rounding, either may come first.
    """
    for place, ours in enumerate(reference.tokens):
        theirs = other.tokens[place]
        if list(ours) == list(theirs):
            continue
        step = first_difference(ours, theirs)
        if step < min(len(ours), len(theirs)) and reference.logits is not None:
            logits = reference.logits[place][step - len(ours)]
            if (logits[ours[step]] - logits[theirs[step]]).abs().item() <= 2 * bound:
                continue
        yield f"{other.name}: the answer to prompt {place + 1} differs from token {step + 1} on"
        return


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the first place at which two answers differ, or the length of the shorter one."""
    for place, (one, another) in enumerate(zip(ours, theirs, strict=False)):
        if one != another:
            return place
    return min(len(ours), len(theirs))


def largest_logit(contestant: Contestant) -> float:
    """Return the largest absolute logit, or 0 without logits."""
    largest = 0.0
    for logits in contestant.logits or ():
        largest = max(largest, logits.abs().max().item())
    return largest


def largest_gap(reference: Contestant, other: Contestant) -> float | None:
    """Return the largest difference of a logit, infinity for another vocabulary, None if unknown.

    A logit that is not a number makes the gap one too.
    """
    if reference.logits is None or other.logits is None:
        return None
    gaps = [torch.zeros(())]
    for ours, theirs in zip(reference.logits, other.logits, strict=True):
        if ours.shape != theirs.shape:
            return float("inf")
        gaps.append((ours - theirs).abs().max())
    return torch.stack(gaps).max().item()


def shorten(text: str, longest: int = 60) -> str:
    """Return the end of a text, quoted. Templates differ there more often than at the start."""
    return repr(text if len(text) <= longest else f"...{text[-longest:]}")


# ---- Files ----
def hash_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return {name: bytes and SHA-256} of the files of a folder, without its receipt."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != NAME:
            found[path.name] = {"bytes": path.stat().st_size, "sha256": hash_file(path)}
    return found


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


# ---- The receipt ----
@dataclass
class Receipt:
    """What is known of the forms of a model.

    Attributes:
        facts: what was merged or exported, from what, and how.
        reference: the contestant that the others are compared with.
        answers: {contestant: the likeliest tokens for each prompt}.
        problems: what is wrong apart from the comparisons.
    """

    facts: dict[str, Any]
    reference: Contestant
    comparisons: list[Comparison] = field(default_factory=list)
    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, contestant: Contestant, relative_bound: float) -> Comparison:
        """Compare a contestant with the reference, and keep the result but not its logits."""
        comparison = compare(self.reference, contestant, relative_bound)
        self.comparisons.append(comparison)
        self.answers[contestant.name] = [list(row) for row in contestant.tokens]
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
        prompts = json.dumps(list(self.reference.rendered), ensure_ascii=False)
        answers = {self.reference.name: [list(row) for row in self.reference.tokens]}
        return {
            **self.facts,
            "passed": not self.all_problems,
            "problems": self.all_problems,
            "reference": {
                "name": self.reference.name,
                "dtype": self.reference.dtype,
                "prompts_sha256": hashlib.sha256(prompts.encode()).hexdigest(),
                "stop_tokens": sorted(self.reference.stop_tokens or ()),
                "largest_logit": largest_logit(self.reference),
            },
            "comparisons": [as_dict(comparison) for comparison in self.comparisons],
            "greedy_tokens": answers | self.answers,
            "files": dict(files),
        }

    def write(self, folder: Path) -> dict[str, Any]:
        """Write receipt.json to a folder, with the sizes and hashes of the other files."""
        content = self.to_json(hash_files(folder))
        path = folder / NAME
        lines = []
        for key, value in content.items():
            lines.append(f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return content

    def table(self) -> list[str]:
        """Return the lines of the receipt's table."""
        number = len(self.reference.tokens)
        head = ["", "dtype", "greedy answers", "largest logit gap", "bound", "prompts"]
        rows = [head, [self.reference.name, self.reference.dtype, f"{number}", "", "", f"{number}"]]
        for comparison in self.comparisons:
            rows.append(
                [
                    comparison.name,
                    comparison.dtype,
                    f"{comparison.same_answers}/{comparison.num_prompts} same",
                    "not known" if comparison.gap is None else f"{comparison.gap:.2e}",
                    f"{comparison.bound:.2e}",
                    f"{comparison.same_prompts}/{comparison.num_prompts} same",
                ]
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
        return lines


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON, which has no numbers for infinity and for none."""
    finite = comparison.gap is not None and torch.isfinite(torch.tensor(comparison.gap)).item()
    return {
        "name": comparison.name,
        "dtype": comparison.dtype,
        "largest_logit_gap": comparison.gap if finite else None,
        "bound": comparison.bound,
        "same_greedy_tokens": comparison.same_answers,
        "same_rendered_prompts": comparison.same_prompts,
        "prompts": comparison.num_prompts,
        "problems": list(comparison.problems),
    }


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
