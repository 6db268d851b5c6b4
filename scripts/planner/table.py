"""The ways that fit a card, as text and as JSON, each with the command that launches it."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .candidates import Launch, Way
from .cards import GIB
from .remedies import NOT_ENOUGH, Change, Remedy
from .request import Batch

SHOWN = 12  # ways in a terminal, besides the first of each kind of weights
WIDTH = 112  # characters of a folded command
HEADER = ("#", "config", "weights", "ckpt", "GiB", "batch", "length", "cost", "why")
ALIGNMENT = "><<<>>>><"
LEGEND = (
    "\nckpt: --gradient_checkpointing. GiB: the peak of a GPU. "
    "batch, length: the largest that fit, the other as given.\n"
    "cost: of a step, next to the first row, +: and what host and bus take; "
    "it orders the rows and is no measured time.\n"
    "Number 1:\n"
)


@dataclass(frozen=True)
class Choice:
    """The answer to which ways fit: they, and what to change where none does."""

    launch: Launch
    batch: Batch
    ways: list[Way]  # all that can be run, the cheapest first
    fitting: list[Way]
    remedy: Remedy | None

    @property
    def title(self) -> str:
        """What is asked, and how many ways fit."""
        launch = self.launch
        return (
            f"{launch.args.model_name_or_path} on {launch.ranks} x {launch.request.gpu}, "
            f"{launch.card / GIB:.1f} GiB each, "
            f"{self.batch.sequences} x {self.batch.length} tokens a rank: "
            f"{len(self.fitting)} of {len(self.ways)} ways fit"
        )

    # ---- JSON ----
    def as_object(self) -> dict[str, Any]:
        """Return the choice as written to JSON."""
        rows = [self.row(way, number) for number, way in enumerate(self.fitting, 1)]
        closest = None
        changes = []
        if self.remedy is not None:
            closest = self.row(self.remedy.closest, None)
            changes = [self.change(change) for change in self.remedy.changes]
        return {
            "title": self.title,
            "card": self.launch.card,
            "rows": rows,
            "closest": closest,
            "changes": changes,
        }

    def row(self, way: Way, number: int | None) -> dict[str, Any]:
        """Return a way: bytes of a GPU, and of the host for each rank."""
        return {
            "number": number,
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
            "command": command(self.launch, way),
        }

    def change(self, change: Change) -> dict[str, Any]:
        """Return a change that lets a way fit."""
        way = change.way
        return {
            "change": change.words,
            "config_file": way.path,
            "peak": way.peak,
            "weights": way.weights,
            "command": command(self.launch, way),
        }

    # ---- Text ----
    def __str__(self) -> str:
        order = ", the fastest first" if self.fitting else ""
        lines = [f"{self.title}{order}\n"]
        if self.fitting:
            lines += self.lines_on_what_fits()
        if self.remedy is not None:
            lines += self.lines_on_what_to_change()
        return "\n".join(lines)

    def lines_on_what_fits(self) -> list[str]:
        """Return the table, what does not fit, and the commands of the first way and of the first
        with full weights."""
        launch = self.launch
        numbered = shown(self.fitting)
        lines = [table(numbered, launch.machines)]
        left = len(self.fitting) - len(numbered)
        if left:
            lines.append(f"... and {left} more: --json -")
        lines += self.lines_on_what_does_not_fit()
        lines += [LEGEND, folded(command(launch, self.fitting[0]))]
        full = first_with_full_weights(numbered)
        if full is not None:
            number, way = full
            lines.append(f"\nNumber {number}, the first with full weights:\n")
            lines.append(folded(command(launch, way)))
        if launch.machines > 1:
            lines.append(
                "\non each machine, with its --machine_rank and the --main_process_ip of the first"
            )
        return lines

    def lines_on_what_does_not_fit(self) -> list[str]:
        """Return a line for each kind of weights that does not fit, and by how much."""
        lines = []
        for weights in dict.fromkeys(way.weights for way in self.ways):
            of_kind = [way for way in self.ways if way.weights == weights]
            closest = min(of_kind, key=lambda way: way.peak)
            if closest.peak > self.launch.card:
                lines.append(
                    f"{weights}: does not fit, by {self.excess(closest):.1f} GiB "
                    f"at the least ({closest.file})"
                )
        return lines

    def lines_on_what_to_change(self) -> list[str]:
        """Return by how much the closest way misses, and what would make one fit."""
        closest = self.remedy.closest
        without = "\nWithout offload nothing fits. " if self.fitting else ""
        checkpoints = ", with --gradient_checkpointing" if closest.checkpoints else ""
        enough = "each of these alone is enough:" if self.remedy.changes else NOT_ENOUGH
        lines = [
            f"{without}The closest is {closest.weights} under {closest.file}{checkpoints}.",
            f"It takes {closest.peak / GIB:.1f} GiB, {self.excess(closest):.1f} GiB too many; "
            f"{enough}",
        ]
        for change in self.remedy.changes:
            way = change.way
            lines.append(f"\n{change.words} ({way.weights}, {way.peak / GIB:.1f} GiB)")
            lines.append(folded(command(self.launch, way)))
        return lines

    def excess(self, way: Way) -> float:
        """Return by how many GiB a way does not fit."""
        return (way.peak - self.launch.card) / GIB


# ---- Rows ----
def shown(ways: Sequence[Way]) -> list[tuple[int, Way]]:
    """Return (number, way) of the first ways, and of the first of each kind of weights."""
    first_of_kind = {}
    for number, way in enumerate(ways, 1):
        first_of_kind.setdefault(way.weights, number)
    return [
        (number, way)
        for number, way in enumerate(ways, 1)
        if number <= SHOWN or number in first_of_kind.values()
    ]


def first_with_full_weights(numbered: Sequence[tuple[int, Way]]) -> tuple[int, Way] | None:
    """Return (number, way) of the first with full weights, unless that is number 1."""
    for number, way in numbered:
        if way.weights == "full":
            return (number, way) if number > 1 else None
    return None


def table(numbered: Sequence[tuple[int, Way]], machines: int) -> str:
    """Return ways as aligned text of at most 120 characters in a line."""
    _, cheapest = numbered[0]
    lines = [HEADER]
    lines += [cells(number, way, cheapest.cost, machines) for number, way in numbered]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(ALIGNMENT, widths, strict=True))
    return "\n".join(form.format(*line).rstrip() for line in lines)


def cells(number: int, way: Way, cheapest: float, machines: int) -> tuple[str, ...]:
    """Return a line of the table."""
    cost = f"{way.cost / cheapest:.2f}"
    if way.offloads:
        cost += "+"
    reason = way.reasons[0]
    host = sum(way.host.values()) * way.plan.ranks / machines
    if host:
        reason += f": {host / GIB:.1f} GiB a machine"
    return (
        str(number),
        way.file.removesuffix(".yaml"),
        way.weights,
        "yes" if way.checkpoints else "",
        f"{way.peak / GIB:.1f}",
        str(way.largest_batch),
        str(way.largest_length),
        cost,
        reason,
    )


# ---- Commands ----
def command(launch: Launch, way: Way) -> str:
    """Return the launch of a way: what the user gave and what the way adds."""
    request = launch.request
    words = ["accelerate", "launch", "--config_file", way.path]
    words += ["--num_processes", str(way.plan.ranks)]
    if launch.machines > 1:
        words += ["--num_machines", str(request.num_machines)]
    if request.mixed_precision:
        words += ["--mixed_precision", request.mixed_precision]
    words += ["recipes/llama.py", "--model_name_or_path"]
    words.append(model_to_load(way.plan.args.model_name_or_path))
    words += recipe_flags(launch, way)
    return shlex.join(words)


def model_to_load(name: str) -> str:
    """Return what the recipe can load: the folder of a config.json."""
    path = Path(name)
    if path.name == "config.json" and path.is_file():
        return str(path.parent)
    return name


def recipe_flags(launch: Launch, way: Way) -> list[str]:
    """Return the recipe's arguments that differ from its defaults, as words."""
    left_out = {"model_name_or_path"}
    if "max_logits_mib" not in launch.given:
        left_out.add("max_logits_mib")  # the recipe takes as much by itself, on this card
    words = []
    for name, value in vars(way.plan.args).items():
        if name in left_out or value is None or value == launch.defaults[name]:
            continue
        words.append(f"--{name}")
        if isinstance(value, list):
            words += [str(one) for one in value]
        elif value is not True:
            words.append(str(value))
    return words


def folded(text: str) -> str:
    """Return a command on lines of at most WIDTH characters, where its flags allow it."""
    lines = []
    for part in flags_with_values(text):
        if lines and len(lines[-1]) + 1 + len(part) <= WIDTH:
            lines[-1] += f" {part}"
        else:
            lines.append(part)
    return " \\\n    ".join(lines)


def flags_with_values(text: str) -> list[str]:
    """Return a command in parts that belong together: the program, and each flag with its values."""
    parts = []
    for word in map(shlex.quote, shlex.split(text)):
        if word.startswith("--") or not parts:
            parts.append(word)
        else:
            parts[-1] += f" {word}"
    return parts
