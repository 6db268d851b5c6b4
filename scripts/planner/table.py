# SPDX-License-Identifier: Apache-2.0
"""The ways that fit a card, as text and as JSON."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .candidates import Launch, Way
from .cards import GIB, describe
from .commands import command, folded
from .remedies import NOT_ENOUGH, Change, Remedy
from .request import Batch

SHOWN = 12  # ways in a terminal, besides the first of each kind of weights
HEADER = ("#", "config", "weights", "ckpt", "GiB", "batch", "length", "cost", "why")
ALIGNMENT = "><<<>>>><"
FIRST = "Sorted by a rule of thumb, probably the fastest first: nothing was timed."
LEGEND = (
    "\nckpt: with --gradient_checkpointing. GiB: peak per GPU.\n"
    "batch, length: the largest that fits, with the other as given, "
    "if need be with --per_device_eval_batch_size 1.\n"
    "cost: per step, relative to the first row; +: and what host and bus take. "
    "It is a rule of thumb, no measured time.\n"
    "Number 1:\n"
)


@dataclass(frozen=True)
class Choice:
    """The answer to which ways fit: those that do, and what to change if none does."""

    launch: Launch
    batch: Batch
    ways: list[Way]  # all that can be run, the cheapest first
    fitting: list[Way]
    remedy: Remedy | None

    @property
    def title(self) -> str:
        """The question, and how many ways fit."""
        launch = self.launch
        model = launch.args.model_name_or_path
        cards = f"{launch.ranks} x {launch.request.gpu}, {in_gib(launch.card)} each"
        tokens = f"{self.batch.sequences} x {self.batch.length} tokens per micro-batch"
        count = f"{len(self.fitting)} of {len(self.ways)} ways fit"
        return f"{model} on {cards}, {tokens}: {count}"

    # ---- JSON ----
    def as_object(self) -> dict[str, Any]:
        """Return the choice as written to JSON."""
        closest = None
        changes = []
        if self.remedy is not None:
            closest = self.row(self.remedy.closest)
            changes = [self.change(change) for change in self.remedy.changes]
        return {
            "title": self.title,
            "card": self.launch.card,
            "rows": [self.row(way) for way in self.fitting],
            "closest": closest,
            "changes": changes,
        }

    def row(self, way: Way) -> dict[str, Any]:
        """Return a way: bytes of a GPU, and of the host for each rank."""
        return {
            "number": way.number,
            "config_file": way.path,
            "name": way.plan.name,
            "weights": way.weights,
            "gradient_checkpointing": way.checkpoints,
            "peak": way.peak,
            "device": way.device,
            "host": way.host,
            "cost": way.cost,
            "reasons": way.reasons,
            "largest_per_device_train_batch_size": way.largest_batch,
            "largest_max_length": way.largest_length,
            "command": shlex.join(command(self.launch, way)),
        }

    def change(self, change: Change) -> dict[str, Any]:
        """Return a change that lets a way fit."""
        way = change.way
        return {
            "change": change.words,
            "config_file": way.path,
            "peak": way.peak,
            "weights": way.weights,
            "command": shlex.join(command(self.launch, way)),
        }

    # ---- Text ----
    def __str__(self) -> str:
        card = self.launch.request.gpu
        assert card is not None  # without a card there is nothing to choose for
        lines = [self.title, describe(card)]
        if self.fitting:
            lines += [FIRST, "", *self.lines_on_what_fits()]
        else:
            lines.append("")
        if self.remedy is not None:
            lines += self.lines_on_what_to_change(self.remedy)
        return "\n".join(lines)

    def lines_on_what_fits(self) -> list[str]:
        """Return the table, what does not fit, and commands.

        The commands are those of the first way and of the first with full weights.
        """
        launch = self.launch
        first = self.fitting[0]
        ways = shown(self.fitting)
        lines = [table(ways, launch.machines)]
        left = len(self.fitting) - len(ways)
        if left:
            lines.append(f"... and {left} more: --json -")
        lines += self.lines_on_what_does_not_fit()
        lines += [LEGEND, folded(command(launch, first))]
        full = next((way for way in ways if way.weights == "full"), first)
        if full is not first:
            lines.append(f"\nNumber {full.number}, the first with full weights:\n")
            lines.append(folded(command(launch, full)))
        if launch.machines > 1:
            lines.append(
                "\nRun it on each machine with its own --machine_rank "
                "and the --main_process_ip of the first."
            )
        return lines

    def lines_on_what_does_not_fit(self) -> list[str]:
        """Return a line for each kind of weights that does not fit, with how much is missing."""
        lines = []
        for weights in dict.fromkeys(way.weights for way in self.ways):
            of_kind = [way for way in self.ways if way.weights == weights]
            closest = min(of_kind, key=lambda way: way.peak)
            if closest.peak > self.launch.card:
                excess = in_gib(self.excess(closest))
                lines.append(
                    f"{weights}: does not fit, at least {excess} too much ({closest.name})"
                )
        return lines

    def lines_on_what_to_change(self, remedy: Remedy) -> list[str]:
        """Return how much the closest way lacks, and changes with which a way fits."""
        closest = remedy.closest
        sentence = f"The closest is {closest.weights} under {closest.name}"
        if closest.checkpoints:
            sentence += ", with --gradient_checkpointing"
        if self.fitting:
            sentence = f"\nWithout offload nothing fits. {sentence}"
        enough = NOT_ENOUGH
        if remedy.changes:
            enough = "each of these changes is enough by itself:"
        excess = in_gib(self.excess(closest))
        lines = [f"{sentence}."]
        lines.append(f"It takes {in_gib(closest.peak)}, {excess} too much; {enough}")
        for change in remedy.changes:
            way = change.way
            lines.append(f"\n{change.words} ({way.weights}, {in_gib(way.peak)})")
            lines.append(folded(command(self.launch, way)))
        return lines

    def excess(self, way: Way) -> int:
        """Return how many bytes a way takes beyond the card."""
        return way.peak - self.launch.card


def in_gib(size: float) -> str:
    """Return bytes as text."""
    return f"{size / GIB:.1f} GiB"


# ---- Rows ----
def shown(ways: Sequence[Way]) -> list[Way]:
    """Return the first ways, and the first of each kind of weights."""
    first_of_kind = {}
    for way in ways:
        first_of_kind.setdefault(way.weights, way)
    later = [way for way in ways[SHOWN:] if way is first_of_kind[way.weights]]
    return [*ways[:SHOWN], *later]


def table(ways: Sequence[Way], machines: int) -> str:
    """Return ways as aligned text of at most 120 characters in a line."""
    lines = [HEADER]
    lines += [cells(way, ways[0].cost, machines) for way in ways]
    formats = []
    for side, *column in zip(ALIGNMENT, *lines, strict=True):
        width = max(len(cell) for cell in column)
        formats.append(f"{{:{side}{width}}}")
    line_format = "  ".join(formats)
    return "\n".join(line_format.format(*line).rstrip() for line in lines)


def cells(way: Way, cheapest: float, machines: int) -> tuple[str, ...]:
    """Return a line of the table; `cheapest` is the cost of its first way."""
    checkpoints = "yes" if way.checkpoints else ""
    cost = f"{way.cost / cheapest:.2f}"
    if way.offloads:
        cost += "+"
    reason = way.reasons[0]
    host = sum(way.host.values()) * way.plan.ranks / machines
    if host:
        reason += f": {in_gib(host)} per machine"
    return (
        str(way.number),
        way.name,
        way.weights,
        checkpoints,
        f"{way.peak / GIB:.1f}",
        str(way.largest_batch),
        str(way.largest_length),
        cost,
        reason,
    )
