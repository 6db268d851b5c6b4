# SPDX-License-Identifier: Apache-2.0
"""How the contestants of a receipt differ, and whether they may.

Bounds are relative to the largest logit of the reference, since a rounding error grows with the
numbers.
"""

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from merging.contestants import Contestant

# Largest logit difference, relative to the largest logit, that rounding explains: about 1,000 units
# in the last place in fp32, 6 to 10 in fp16 and bf16, where activations are rounded too
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

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "largest_logit_gap": only_finite(self.gap),
            "bound": only_finite(self.bound),
            "same_greedy_tokens": self.same_answers,
            "same_rendered_prompts": self.same_prompts,
            "prompts": self.num_prompts,
            "problems": list(self.problems),
        }

    def cells(self) -> list[str]:
        """Return the cells of the comparison's row in the table of a receipt."""
        gap = "not known"
        if self.gap is not None:
            gap = f"{self.gap:.2e}"
        return [
            self.name,
            self.dtype,
            f"{self.same_answers}/{self.num_prompts} same",
            gap,
            f"{self.bound:.2e}",
            f"{self.same_prompts}/{self.num_prompts} same",
        ]


def compare(reference: Contestant, other: Contestant, relative_bound: float) -> Comparison:
    """Return how a contestant differs from the reference.

    Args:
        relative_bound: of the gap, as a part of the reference's largest logit.
    """
    bound = relative_bound * largest_logit(reference)
    gap = largest_gap(reference, other)
    problems = tuple(find_problems(reference, other, gap, bound))
    return Comparison(
        other.name,
        other.dtype,
        gap,
        bound,
        same_answers=count_same(as_lists(reference.tokens), as_lists(other.tokens)),
        same_prompts=count_same(as_bytes(reference.rendered), as_bytes(other.rendered)),
        num_prompts=len(reference.tokens),
        problems=problems,
    )


def only_finite(number: float | None) -> float | None:
    """Return a number for JSON, which has none for infinity and for what is not a number."""
    if number is None or not math.isfinite(number):
        return None
    return number


def count_same(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    """Return at how many places two sequences of one length have the same."""
    return sum(map(operator.eq, ours, theirs))


def as_lists(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return sequences of tokens as lists, which can be compared."""
    return [list(row) for row in rows]


def as_bytes(texts: Sequence[str]) -> list[bytes]:
    """Return texts as bytes."""
    return [text.encode() for text in texts]


def find_problems(
    reference: Contestant, other: Contestant, gap: float | None, bound: float
) -> Iterator[str]:
    """Yield what differs between two contestants and must not."""
    for place, ours in enumerate(reference.rendered):
        theirs = other.rendered[place]
        if ours.encode() != theirs.encode():
            yield (
                f"{other.name}: the template writes prompt {place + 1} as {shorten(theirs)}, but "
                f"in training as {shorten(ours)}"
            )
            break
    if as_lists(reference.prompts) != as_lists(other.prompts):
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
            margin = logits[ours[step]] - logits[theirs[step]]
            if margin.abs().item() <= 2 * bound:
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
    """Return the largest absolute logit, or 0 without logits.

    A logit that is not a number makes the largest one too.
    """
    largest = [torch.zeros(())]
    for logits in contestant.logits or ():
        largest.append(logits.abs().max())
    return torch.stack(largest).max().item()


def largest_gap(reference: Contestant, other: Contestant) -> float | None:
    """Return the largest difference of a logit, infinity for another vocabulary, None if unknown.

    A logit that is not a number makes the gap one too.
    """
    if reference.logits is None or other.logits is None:
        return None
    return gap_of_logits(reference.logits, other.logits)


def gap_of_logits(one: Sequence[torch.Tensor], another: Sequence[torch.Tensor]) -> float:
    """Return the largest difference, as `largest_gap`, of the logits of the same places."""
    gaps = [torch.zeros(())]
    for ours, theirs in zip(one, another, strict=True):
        if ours.shape != theirs.shape:
            return float("inf")
        gaps.append((ours - theirs).abs().max())
    return torch.stack(gaps).max().item()


def shorten(text: str, longest: int = 60) -> str:
    """Return the end of a text, quoted. Templates differ there more often than at the start."""
    if len(text) > longest:
        text = f"...{text[-longest:]}"
    return repr(text)
