# SPDX-License-Identifier: Apache-2.0
"""What to change if nothing fits, or only what offloads.

Each remedy suffices by itself: a smaller batch, shorter rows, more GPUs, or a larger card.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import recipe
from .candidates import (
    Launch,
    Way,
    largest_length,
    peak_with,
    ways_on,
    with_arguments,
    with_usual_evaluation,
)
from .cards import CARDS, GIB, SLOW_IN_BF16, bytes_of_known
from .errors import UnplannableError

LEAST_LENGTH = 64  # tokens of the shortest rows that are proposed
MOST_RANKS = 1024
NOT_ENOUGH = (
    f"neither a smaller batch, nor shorter rows, nor {MOST_RANKS} GPUs, "
    "nor a known card is enough by itself."
)


@dataclass(frozen=True)
class Change:
    """A change, in words and flags, and the cheapest way that fits with it."""

    words: str
    way: Way


@dataclass(frozen=True)
class Remedy:
    """The way that is closest to fitting, and changes with which a way fits."""

    closest: Way
    changes: list[Change]


def remedy_for(launch: Launch, ways: Sequence[Way], fitting: Sequence[Way]) -> Remedy | None:
    """Return what to change, or None if a way fits that leaves everything on the GPUs.

    ways: all of them, in order of cost; fitting: those that fit.
    """
    if fitting and not fitting[0].offloads:  # Ways that offload come last.
        return None
    if fitting:
        ways = [way for way in ways if not way.offloads]
    if not ways:
        return None
    closest = min(ways, key=lambda way: way.peak)
    changes = [
        replace(change, way=with_usual_evaluation(launch, change.way))
        for change in changes_for(launch, ways, closest)
    ]
    return Remedy(closest, changes)


def changes_for(launch: Launch, ways: Sequence[Way], closest: Way) -> Iterator[Change]:
    """Yield changes with which one of the ways fits. None of them fits unchanged."""
    way = smaller_batch(launch, ways)
    if way is not None:
        args = way.plan.args
        flags = (
            f"--per_device_train_batch_size {args.per_device_train_batch_size} "
            f"--gradient_accumulation_steps {args.gradient_accumulation_steps}"
        )
        yield Change(f"a smaller batch: {flags}", way)
    way = shorter_rows(launch, ways)
    if way is not None:
        yield Change(f"shorter rows: --max_length {way.plan.args.max_length}", way)
    way = more_ranks(launch, closest, any(way.offloads for way in ways))
    if way is not None:
        yield Change(f"more GPUs: {way.plan.ranks}", way)
    change = larger_card(launch, ways, closest)
    if change is not None:
        yield change


def smaller_batch(launch: Launch, ways: Sequence[Way]) -> Way | None:
    """Return the cheapest way that fits with one sequence, at the largest batch that fits.

    Only divisors of the given batch are tried, with more accumulation steps, so that a step has the
    same rows.
    """
    args = ways[0].plan.args
    sequences = args.per_device_train_batch_size
    parts = []
    for number in range(sequences - 1, 0, -1):
        if sequences % number == 0:
            steps = args.gradient_accumulation_steps * sequences // number
            parts.append(
                {"per_device_train_batch_size": number, "gradient_accumulation_steps": steps}
            )
    if not parts:
        return None
    way = cheapest_that_fits(launch, ways, **parts[-1])
    if way is None:
        return None
    fitting = next(part for part in parts if peak_with(launch, way, **part) <= launch.card)
    return with_arguments(launch, way, **fitting)


def shorter_rows(launch: Launch, ways: Sequence[Way]) -> Way | None:
    """Return the cheapest way that fits after halving --max_length until one does.

    It is returned at the largest length at which it fits.
    """
    given = ways[0].plan.args.max_length
    length = given // 2
    while length >= LEAST_LENGTH:
        way = cheapest_that_fits(launch, ways, max_length=length)
        if way is not None:
            way = with_arguments(launch, way, max_length=length)
            guess = length + length // 2
            longest = largest_length(launch, way, most=given - 1, guess=guess)
            return with_arguments(launch, way, max_length=longest)
        length //= 2
    return None


def more_ranks(launch: Launch, closest: Way, may_offload: bool) -> Way | None:
    """Return the cheapest way on more GPUs.

    Their number is doubled until the kind of weights of the closest way fits.
    """
    doubled = []
    ranks = 2 * launch.ranks
    while ranks <= MOST_RANKS:
        doubled.append(ranks)
        ranks *= 2
    if not doubled or not fitting_ways(launch, doubled[-1], may_offload, like=closest):
        return None
    for ranks in doubled:
        if fitting_ways(launch, ranks, may_offload, like=closest):
            return fitting_ways(launch, ranks, may_offload)[0]
    return None


def fitting_ways(
    launch: Launch, ranks: int, may_offload: bool, like: Way | None = None
) -> list[Way]:
    """Return the ways that fit on a number of ranks, in order of cost.

    like: a way whose weights and checkpointing all ways must have.
    """
    try:
        ways = ways_on(launch, ranks, like)
    except UnplannableError:
        return []
    return [way for way in ways if way.peak <= launch.card and (may_offload or not way.offloads)]


def larger_card(launch: Launch, ways: Sequence[Way], closest: Way) -> Change | None:
    """Return the smallest known card on which a way fits."""
    for size, name in suitable_cards(closest):
        values = {}
        if "max_logits_mib" not in launch.given:  # The recipe derives it from the card.
            values = {"max_logits_mib": recipe.logits_mib_on(size)}
        for way in ways:
            if peak_with(launch, way, **values) <= size:
                words = f"another card: {name}, of {size / GIB:.1f} GiB"
                return Change(words, with_arguments(launch, way, **values))
    return None


def suitable_cards(closest: Way) -> list[tuple[int, str]]:
    """Return (bytes, name) of known cards that hold as much as the closest way takes, by size."""
    unwanted = ()
    if closest.plan.mixed_precision == "bf16":
        unwanted = SLOW_IN_BF16
    cards = [(bytes_of_known(name), name) for name in CARDS if name not in unwanted]
    return sorted((size, name) for size, name in cards if size >= closest.peak)


def cheapest_that_fits(launch: Launch, ways: Sequence[Way], **values: Any) -> Way | None:
    """Return the first of the ways that fits under other arguments of the recipe."""

    def fits(way: Way) -> bool:
        return peak_with(launch, way, **values) <= launch.card

    if not any(fits(way) for way in leanest(ways)):
        return None
    return next(way for way in ways if fits(way))


def leanest(ways: Sequence[Way]) -> list[Way]:
    """Return the way with the lowest peak of each file: if any way fits, one of these does."""
    by_file = {}
    for way in sorted(ways, key=lambda way: way.peak, reverse=True):
        by_file[way.file] = way
    return list(by_file.values())
