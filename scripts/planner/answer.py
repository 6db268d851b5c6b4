# SPDX-License-Identifier: Apache-2.0
"""From a request to its answer: the plan of one config, or what fits a card, as text and JSON."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Exit
from core.cli import parse

from .choose import Launch, Profiles, Way, find_ways
from .engines import Saving, saving_of
from .plan import plan_of
from .request import (
    GIB,
    Request,
    UnplannableError,
    batch_of,
    bytes_of_card,
    read_arguments,
    with_constants,
)

FITS, DOES_NOT_FIT = 0, 1
TERMINAL = "-"
PLACEHOLDER = "YOUR_ROWS.jsonl"  # if the command line names no data set
HEADER = ("#", "config", "weights", "ckpt", "GiB", "host")
ALIGNMENT = "><<<>>"
LEGEND = "\nckpt: with --gradient_checkpointing. GiB: peak per GPU. host: GiB per machine.\n"


def answer(request: Request) -> int:
    """Print or write the answer to a request; return the exit code.

    Raises:
        UnplannableError, SystemExit: if it cannot be planned, or not be written.
    """
    request.check()
    card = bytes_of_card(request.gpu)
    config = None
    if request.config_file:
        config = read_yaml(request)
    recipe, args, request = read_arguments(request)
    if config is not None:
        report = report_of(request, args, config, card)
        give(request, report)
        return FITS if report.fits else DOES_NOT_FIT
    assert card is not None  # Request.check: without a config there is a card.
    defaults = vars(parse(recipe.Arguments, words=[]))
    launch = Launch(request, recipe, args, defaults, card)
    choice = Choice(launch, *find_ways(launch))
    give(request, choice)
    return FITS if choice.fitting else DOES_NOT_FIT


def read_yaml(request: Request) -> dict[str, Any]:
    """Return a user's config, with the sizes of its mesh that the command line sets.

    Raises:
        UnplannableError: if it is none, or accelerate would run something else than it says.
    """
    from config_strategy import read
    from core.config_names import find_unknown_keys
    from extras.configs.rules import check

    assert request.config_file is not None
    try:
        config = read(request.config_file)
    except ValueError as error:
        raise UnplannableError(str(error)) from None
    faults = [
        *find_unknown_keys(request.config_file),
        *check(request.config_file, for_recipes=False),
    ]
    for fault in faults:
        if fault.severity == "error":
            raise UnplannableError(f"{request.config_file} would not do what it says: {fault}")
    if request.sizes:
        sizes = {f"parallelism_config_{key}": size for key, size in request.sizes.items()}
        config["parallelism_config"] = (config.get("parallelism_config") or {}) | sizes
    return config


def give(request: Request, found: "Report | Choice") -> None:
    """Print or write what was found."""
    if not request.json:
        print(found)
        return
    text = json.dumps(found.as_object(), indent=2)
    if request.json == TERMINAL:
        print(text)
        return
    try:
        Path(request.json).write_text(text + "\n")
    except OSError as error:
        message = f"cannot write {request.json}: {error}"
        raise UnplannableError(message, Exit.CANNOT_WRITE) from None
    print(found)


def in_gib(size: float) -> str:
    """Return bytes as text."""
    return f"{size / GIB:.1f} GiB"


# ---- One plan ----
@dataclass(frozen=True)
class Report:
    """The memory of one plan, in bytes.

    Attributes:
        device: on a GPU at its peak, by category; host: for each rank.
    """

    title: str
    device: dict[str, int]
    host: dict[str, int]
    saving: Saving
    card: int | None = None

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
            "device": self.device,
            "peak": self.peak,
            "host": self.host,
            "saving": {"rank": self.saving.most, "host": self.saving.host},
        }
        if self.card:
            found["card"] = self.card
        return found

    def __str__(self) -> str:
        lines = [f"{self.title}, GiB"]
        lines += [line(name, size) for name, size in self.device.items()]
        lines.append(f"{line('peak per GPU', self.peak)} GiB")
        if self.host:
            whole = line("host, per rank", sum(self.host.values()))
            lines.append(f"{whole} GiB: {', '.join(self.host)}")
        whole = line("save, per rank", self.saving.most)
        lines.append(f"{whole} GiB of its host: its share, and the largest tensor")
        lines.append(f"{line('save, per host', self.saving.host)} GiB, all its ranks")
        if self.card:
            left = (self.card - self.peak) / GIB
            verdict = f"fits, {left:.1f} GiB left"
            if not self.fits:
                verdict = f"does not fit: {-left:.1f} GiB too much"
            lines.append(f"{line('card', self.card)} GiB: {verdict}")
        return "\n".join(lines)


def line(name: str, size: float) -> str:
    """Return a line of a plan: a name, and bytes in GiB."""
    return f"  {name:<16}{size / GIB:10.3f}"


def report_of(request: Request, args: Any, config: dict[str, Any], card: int | None) -> Report:
    """Return the plan of one config."""
    plan = plan_of(
        args, config, request.num_processes, request.num_machines, request.mixed_precision
    )
    batch = batch_of(args, request)
    profiles = Profiles()
    held = profiles.held(plan, batch)
    device = with_constants(held.device, plan.ranks)
    saving = saving_of(plan, profiles.of(plan, batch).weights)
    host = {category: round(size) for category, size in held.host.items()}
    if args.async_save:
        host["checkpoint"] = saving.share
    holders = f"{plan.copies} ranks" if plan.copies > 1 else "rank"
    title = (
        f"{args.model_name_or_path} under {plan.name}, {plan.ranks} x GPU, mixed precision "
        f"{plan.mixed_precision}: {batch.lines} x {batch.length} tokens per {holders}"
    )
    return Report(title, device, host, saving, card)


# ---- What fits ----
@dataclass(frozen=True)
class Choice:
    """The ways that fit a card, the cheapest first, and all that were tried."""

    launch: Launch
    fitting: list[Way]
    tried: list[Way]

    @property
    def title(self) -> str:
        """The question, and how many ways fit of those that were tried."""
        launch = self.launch
        batch = batch_of(launch.args, launch.request)
        return (
            f"{launch.args.model_name_or_path} on {launch.ranks} x {launch.request.gpu}, "
            f"{in_gib(launch.card)} each, {batch.lines} x {batch.length} tokens per "
            f"micro-batch: {len(self.fitting)} of {len(self.tried)} ways fit"
        )

    # ---- JSON ----
    def as_object(self) -> dict[str, Any]:
        """Return the choice as written to JSON."""
        return {
            "title": self.title,
            "card": self.launch.card,
            "rows": [self.row(way) for way in self.fitting],
        }

    def row(self, way: Way) -> dict[str, Any]:
        """Return a way: bytes of a GPU, and of the host for each rank."""
        assert way.held is not None
        return {
            "config_file": f"accelerate_configs/{way.file}",
            "name": way.plan.name,
            "weights": way.weights,
            "gradient_checkpointing": way.plan.args.gradient_checkpointing,
            "peak": way.peak,
            "device": way.held.device,
            "host": way.held.host,
            "command": shlex.join(command(self.launch, way)),
        }

    # ---- Text ----
    def __str__(self) -> str:
        lines = [self.title]
        if self.fitting:
            lines.append(
                "Sorted by a rule of thumb, probably the fastest first: nothing was timed."
            )
            lines += ["", table(self.fitting, self.launch.machines)]
        lines += self.misfits()
        if self.fitting:
            lines += [LEGEND, *self.commands()]
        return "\n".join(lines)

    def misfits(self) -> Iterator[str]:
        """Yield a line for each kind of weights that does not fit, with how much is missing."""
        kinds = {way.weights for way in self.fitting}
        for weights in dict.fromkeys(way.weights for way in self.tried):
            if weights not in kinds:
                closest = min((w for w in self.tried if w.weights == weights), key=lambda w: w.peak)
                excess = in_gib(closest.peak - self.launch.card)
                name = Path(closest.file).stem
                yield f"{weights}: does not fit, at least {excess} too much ({name})"

    def commands(self) -> Iterator[str]:
        """Yield the commands of the first way and of the first with full weights."""
        yield f"Number 1:\n\n{folded(command(self.launch, self.fitting[0]))}"
        kinds = [way.weights for way in self.fitting]
        if kinds[0] != "full" and "full" in kinds:
            place = kinds.index("full")
            yield f"\nNumber {place + 1}, the first with full weights:\n"
            yield folded(command(self.launch, self.fitting[place]))
        if self.launch.machines > 1:
            yield (
                "\nRun it on each machine with its own --machine_rank and the --main_process_ip of "
                "the first."
            )


def table(ways: Sequence[Way], machines: int) -> str:
    """Return ways as aligned text."""
    lines = [HEADER]
    for number, way in enumerate(ways, 1):
        assert way.held is not None
        host = sum(way.held.host.values()) * way.plan.ranks / machines
        checkpoints = "yes" if way.plan.args.gradient_checkpointing else ""
        sizes = (f"{way.peak / GIB:.1f}", f"{host / GIB:.1f}" if host else "")
        lines.append((str(number), Path(way.file).stem, way.weights, checkpoints, *sizes))
    formats = []
    for side, *column in zip(ALIGNMENT, *lines, strict=True):
        formats.append(f"{{:{side}{max(len(cell) for cell in column)}}}")
    line_format = "  ".join(formats)
    return "\n".join(line_format.format(*cells).rstrip() for cells in lines)


# ---- Commands ----
def command(launch: Launch, way: Way) -> list[str]:
    """Return the words of the command that launches a way.

    These are the user's arguments and what the way adds, with a learning rate that fits what is
    trained, and a placeholder for the data, if the user gave none.
    """
    request = launch.request
    args = way.plan.args
    words = ["accelerate", "launch", "--config_file", f"accelerate_configs/{way.file}"]
    words += ["--num_processes", str(way.plan.ranks)]
    if launch.machines > 1:
        words += ["--num_machines", str(request.num_machines)]
    if request.mixed_precision:
        words += ["--mixed_precision", request.mixed_precision]
    words.append(f"recipes/{launch.recipe.__name__}.py")
    model = Path(args.model_name_or_path)
    if model.name == "config.json" and model.is_file():
        model = model.parent
    words += ["--model_name_or_path", str(model)]
    rows = args.dataset_name if "dataset_name" in request.given else [PLACEHOLDER]
    words += ["--dataset_name", *rows]
    rate = args.learning_rate
    if args.use_peft and "learning_rate" not in request.given:
        # About ten times that of full fine-tuning (Schulman et al., "LoRA Without Regret", 2025)
        rate = float(f"{10 * type(args).learning_rate:.2g}")
    words += ["--learning_rate", str(rate)]
    placed = {"model_name_or_path", "dataset_name", "learning_rate"}
    if "max_logits_mib" not in request.given:
        placed.add("max_logits_mib")  # The recipe chooses the same value on this card.
    if "dataset_config" not in request.given:
        placed.add("dataset_config")
    others = {name: value for name, value in vars(args).items() if name not in placed}
    return words + words_of(others, launch.defaults)


def words_of(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a recipe that differ from its defaults, as words."""
    words = []
    for name, value in values.items():
        if value is None or value == defaults[name]:
            continue
        words.append(f"--{name}")
        if isinstance(value, list):
            words += [str(item) for item in value]
        elif value is not True:
            words.append(str(value))
    return words


def folded(words: Sequence[str]) -> str:
    """Return a command as text, each flag with its values in a line."""
    lines = [""]
    for word in map(shlex.quote, words):
        if word.startswith("--"):
            lines.append("")
        lines[-1] += f" {word}"
    return " \\\n   ".join(lines).strip()
