# SPDX-License-Identifier: Apache-2.0
"""How the answers of a server differ from those of the trained model, and whether they may.

A server returns texts and not tokens. So the tokens of the trained model are followed as far as
they write the server's text. Where they stop doing so, the server took another token.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from generation.trained import Answers
from served.client import Reply

HALF_CHARACTER = "\ufffd"  # what a tokenizer writes where an answer is cut within a character
LONGEST_SHOWN = 60  # characters of an answer in a message


@dataclass(frozen=True)
class Judge:
    """Compares the replies of a server with the trained model.

    Attributes:
        reference: the trained model; it has logits.
        decode: returns the text of tokens, without special tokens.
        bound: the largest difference of a logit that rounding explains.
        max_new_tokens: the most tokens of an answer.
        special: the special tokens as texts; they are in no answer.
    """

    reference: Answers
    decode: Callable[[Sequence[int]], str]
    bound: float
    max_new_tokens: int
    special: Sequence[str] = ()

    def words_of(self, place: int) -> list[int]:
        """Return the tokens of an answer of the trained model without the one that ends it."""
        tokens = list(self.reference.tokens[place])
        if tokens and tokens[-1] in self.reference.stop_tokens:
            tokens.pop()
        return tokens

    def ends(self, place: int) -> bool:
        """Return whether the trained model ends an answer before it has the most tokens."""
        return len(self.words_of(place)) < len(self.reference.tokens[place])

    def text_of(self, place: int) -> str:
        """Return an answer of the trained model as it is compared."""
        return normalize(self.decode(self.words_of(place)))

    def agreed_tokens(self, place: int, text: str) -> int:
        """Return how many of the first tokens of the trained model's answer write a text."""
        tokens = self.words_of(place)
        for number in range(len(tokens), 0, -1):
            if text.lstrip().startswith(self.decode(tokens[:number]).lstrip()):
                return number
        return 0

    def find_special(self, reply: Reply) -> str | None:
        """Return the first special token that is in the text of a reply, or None."""
        found = [token for token in self.special if token in reply.text]
        return min(found, key=reply.text.index, default=None)

    def is_same(self, place: int, reply: Reply) -> bool:
        """Return whether a reply has the text of the trained model and ends as it does."""
        if normalize(reply.text) != self.text_of(place):
            return False
        if reply.end is None or len(self.reference.tokens[place]) == self.max_new_tokens:
            return reply.end != "stop" or self.ends(place)
        return reply.end == "stop"

    def runs_on(self, place: int, reply: Reply) -> bool:
        """Return whether a reply has the whole answer of the trained model, but does not end."""
        words = self.words_of(place)
        if not words or not self.ends(place):  # Every text begins as an empty answer does
            return False
        is_whole = self.agreed_tokens(place, reply.text) == len(words)
        return is_whole and reply.end != "stop" and not self.is_same(place, reply)

    def may_differ(self, place: int, reply: Reply) -> bool:
        """Return whether a reply differs first by a token that is nearly as likely.

        Where two tokens are closer than rounding, either may come first.
        """
        tokens = self.reference.tokens[place]
        step = self.agreed_tokens(place, reply.text)
        if step >= len(tokens):
            return False
        logits = self.logits_of(place)[step]
        near = (logits >= logits[tokens[step]] - 2 * self.bound).nonzero().flatten().tolist()
        before = list(tokens[:step])
        for token in near:
            if token == tokens[step]:
                continue
            if token in self.reference.stop_tokens:
                fits = normalize(reply.text) == normalize(self.decode(before))
            else:
                text = self.decode([*before, token]).rstrip(HALF_CHARACTER)
                fits = reply.text.lstrip().startswith(text.lstrip())
            if fits:
                return True
        return False

    def logits_of(self, place: int) -> torch.Tensor:
        """Return the logits that predict the tokens of an answer, [tokens, vocabulary]."""
        return self.reference.logits[place][-len(self.reference.tokens[place]) :]

    def largest_gap(self, replies: Sequence[Reply]) -> float | None:
        """Return the largest difference of a token's log probability, None if there are none.

        Only tokens that both say are compared.
        """
        gaps = []
        for place, reply in enumerate(replies):
            number = min(self.agreed_tokens(place, reply.text), len(reply.logprobs or ()))
            if reply.logprobs is None or number == 0:
                continue
            tokens = torch.tensor(self.reference.tokens[place][:number])
            logprobs = self.logits_of(place)[:number].log_softmax(-1)
            ours = logprobs.gather(1, tokens[:, None]).flatten()
            gaps.append((ours - torch.tensor(reply.logprobs[:number])).abs().max().item())
        return max(gaps, default=None)


@dataclass(frozen=True)
class Verdict:
    """How a server differs from the trained model.

    Attributes:
        gap: the largest difference of a token's log probability; None if the server has none.
        bound: the largest gap that is not a problem.
        same_answers: the number of prompts with the same answer.
        same_lengths: the number of prompts of as many tokens; None if the server does not say.
    """

    server: str
    gap: float | None
    bound: float
    same_answers: int
    same_lengths: int | None
    num_prompts: int
    problems: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON, which has no number for infinity."""
        gap = self.gap
        if gap is not None and not math.isfinite(gap):
            gap = None
        return {
            "largest_logprob_gap": gap,
            "bound": self.bound,
            "same_answers": self.same_answers,
            "same_lengths_of_prompts": self.same_lengths,
            "prompts": self.num_prompts,
            "passed": not self.problems,
            "problems": list(self.problems),
        }

    def table(self, reference: Answers) -> list[str]:
        """Return the lines of a table of the verdict."""
        number = str(self.num_prompts)
        gap = "not known" if self.gap is None else f"{self.gap:.2e}"
        lengths = "not known"
        if self.same_lengths is not None:
            lengths = f"{self.same_lengths}/{number} same"
        answers = f"{self.same_answers}/{number} same"
        return align(
            [
                ["", "greedy answers", "largest logprob gap", "bound", "tokens of prompts"],
                [f"trained, {reference.dtype}", number, "", "", number],
                [self.server, answers, gap, f"{self.bound:.2e}", lengths],
            ]
        )


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines, with the cells of each column below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def judge(
    reference: Answers,
    replies: Sequence[Reply],
    tokenizer: Any,
    relative_bound: float,
    max_new_tokens: int,
) -> Verdict:
    """Return how the replies of a server differ from the trained model.

    Args:
        relative_bound: of a difference of logits, as a part of the reference's largest logit.
    """

    def decode(tokens: Sequence[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True)

    bound = relative_bound * reference.largest_logit
    special = tuple(tokenizer.all_special_tokens)
    ours = Judge(reference, decode, bound, max_new_tokens, special)
    same_answers = 0
    for place, reply in enumerate(replies):
        same_answers += ours.is_same(place, reply)
    gap = ours.largest_gap(replies)
    # Two logits may each be off by the bound: the token's own, and that of all tokens together
    gap_bound = 2 * bound
    problems = [
        *find_other_prompts(reference, replies),
        *find_split_answers(replies),
        *find_template_tokens(ours, replies),
        *find_other_answers(ours, replies),
    ]
    if gap is not None and not gap <= gap_bound:  # also if it is not a number
        problems.append(
            f"a token's log probability differs by {gap:.3g}, and the bound is {gap_bound:.3g}"
        )
    return Verdict(
        server="server",
        gap=gap,
        bound=gap_bound,
        same_answers=same_answers,
        same_lengths=count_same_lengths(reference, replies),
        num_prompts=len(replies),
        problems=problems,
    )


def count_same_lengths(reference: Answers, replies: Sequence[Reply]) -> int | None:
    """Return how many prompts have as many tokens on the server, None if it does not say."""
    if all(reply.num_prompt_tokens is None for reply in replies):
        return None
    return len(replies) - len(other_lengths(reference, replies))


def other_lengths(reference: Answers, replies: Sequence[Reply]) -> list[int]:
    """Return the places of the prompts of which a server makes another number of tokens."""
    places = []
    for place, reply in enumerate(replies):
        if reply.num_prompt_tokens not in (None, len(reference.prompts[place])):
            places.append(place)
    return places


def find_other_prompts(reference: Answers, replies: Sequence[Reply]) -> Iterator[str]:
    """Yield a problem if the server makes another number of tokens of prompts."""
    places = other_lengths(reference, replies)
    if not places:
        return
    place = places[0]
    theirs = replies[place].num_prompt_tokens
    yield (
        f"the server makes {theirs} tokens of prompt {place + 1}, but training made "
        f"{len(reference.prompts[place])} ({len(places)} of {len(replies)} prompts): its chat "
        "template, the variables of the template, or its tokenizer are other ones"
    )


def find_split_answers(replies: Sequence[Reply]) -> Iterator[str]:
    """Yield a problem if a parser of the server took parts out of the answers."""
    for place, reply in enumerate(replies):
        if reply.split_off:
            what = " and ".join(reply.split_off)
            yield (
                f"the server split {what} off the answer to prompt {place + 1}, so that the text "
                "cannot be compared; start it without a parser of them"
            )
            return


def find_template_tokens(ours: Judge, replies: Sequence[Reply]) -> Iterator[str]:
    """Yield a problem if a server leaves special tokens in the texts of answers."""
    places = [place for place, reply in enumerate(replies) if ours.find_special(reply) is not None]
    if places:
        token = ours.find_special(replies[places[0]])
        yield (
            f"the server writes {token} into the answer to prompt {places[0] + 1} ({len(places)} "
            f"of {len(replies)} prompts): its parser of answers is for another chat template"
        )


def find_other_answers(ours: Judge, replies: Sequence[Reply]) -> Iterator[str]:
    """Yield a problem if answers are other ones, and one if they run on after their end."""
    endless = []
    others = []
    for place, reply in enumerate(replies):
        if reply.split_off or ours.find_special(reply) is not None:
            continue
        if ours.is_same(place, reply) or ours.may_differ(place, reply):
            continue
        if ours.runs_on(place, reply):
            endless.append(place)
        else:
            others.append(place)
    if len(endless) > len(others):  # Some of the others may have another cause
        yield describe_endless(ours, endless, replies)
    if others:
        yield describe_other(ours, others, replies)
    if 0 < len(endless) <= len(others):
        yield describe_endless(ours, endless, replies)


def describe_endless(ours: Judge, places: Sequence[int], replies: Sequence[Reply]) -> str:
    """Return the problem of answers that run on after their end."""
    place = places[0]
    end = ours.reference.tokens[place][-1]
    return (
        f"the answer to prompt {place + 1} runs on after {shorten(ours.text_of(place))} "
        f"({len(places)} of {len(replies)} prompts): the server does not end at token {end}; the "
        "generation_config.json that it reads has to list it as an eos_token_id, and to have no "
        "repetition_penalty"
    )


def describe_other(ours: Judge, places: Sequence[int], replies: Sequence[Reply]) -> str:
    """Return the problem of answers that are other ones."""
    place = places[0]
    theirs = shorten(normalize(replies[place].text))
    return (
        f"the answer to prompt {place + 1} is {theirs}, but the trained model says "
        f"{shorten(ours.text_of(place))} ({len(places)} of {len(replies)} prompts)"
    )


def normalize(text: str) -> str:
    """Return a text without white space around it, which some servers remove.

    Nor is there half a character at its end, which some servers keep back.
    """
    return text.strip().rstrip(HALF_CHARACTER)


def shorten(text: str) -> str:
    """Return the beginning of an answer, quoted."""
    if len(text) > LONGEST_SHOWN:
        text = f"{text[:LONGEST_SHOWN]}..."
    return repr(text)
