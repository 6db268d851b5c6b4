# SPDX-License-Identifier: Apache-2.0
"""From a request to its answer: the plan of one config, or what fits a card, as text and JSON."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common import Exit
from core.cli import parse

from . import choose
from .choose import EVALUATION, Launch, Profiles, Way
from .engines import Saving, saving_of
from .plan import plan_of
from .request import (
    GIB,
    Batch,
    Request,
    UnplannableError,
    batch_of,
    bytes_of_card,
    describe_card,
    read_arguments,
    read_config,
    with_constants,
)

FITS, DOES_NOT_FIT = 0, 1
TERMINAL = "-"
SIZES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
PLACEHOLDER = "YOUR_ROWS.jsonl"  # if the command line names no data set
WIDTH = 110  # characters of a line of a folded command, before its backslash
HEADER = ("#", "config", "weights", "ckpt", "GiB", "cost", "why")
ALIGNMENT = "><<<>><"
LEGEND = (
    "\nckpt: with --gradient_checkpointing. GiB: peak per GPU.\n"
    "cost: per step, relative to the first row; +: and what host and bus take. "
    "It is a rule of thumb, no measured time.\n"
)


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
        give(request, args, report)
        return FITS if report.fits else DOES_NOT_FIT
    assert card is not None  # Request.check: without a config there is a card.
    defaults = vars(parse(recipe.Arguments, words=[]))
    choice = choice_of(Launch(request, recipe, args, defaults, card))
    give(request, args, choice)
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


def give(request: Request, args: Any, found: "Report | Choice") -> None:
    """Print or write what was found, and what it does not count."""
    notes = []
    if getattr(args, "predict_with_generate", False):
        notes = [
            "the key-value cache of --predict_with_generate; a smaller "
            "--per_device_eval_batch_size or --generation_max_new_tokens shrinks it"
        ]
    content = found.as_object()
    if notes:
        content["not_counted"] = notes
    if request.json:
        text = json.dumps(content, indent=2)
        if request.json == TERMINAL:
            print(text)
            return
        try:
            Path(request.json).write_text(text + "\n")
        except OSError as error:
            message = f"cannot write {request.json}: {error}"
            raise UnplannableError(message, Exit.CANNOT_WRITE) from None
    print(found)
    for note in notes:
        print(f"not counted: {note}")


def in_gib(size: float) -> str:
    """Return bytes as text."""
    return f"{size / GIB:.1f} GiB"


# ---- One plan ----
@dataclass(frozen=True)
class Report:
    """The memory of one plan, in bytes.

    Attributes:
        device: on a GPU at its peak, by category; host: for each rank.
        hints: what else decides the peak.
    """

    title: str
    device: dict[str, int]
    host: dict[str, int]
    saving: Saving
    card: int | None = None
    card_note: str = ""
    hints: list[str] = field(default_factory=list)

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
            "method": "traced",
            "device": self.device,
            "peak": self.peak,
            "host": self.host,
            "saving": {"rank": self.saving.most, "host": self.saving.host},
        }
        if self.card:
            found["card"] = self.card
        if self.hints:
            found["hints"] = self.hints
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
            lines.append(self.card_note)
        return "\n".join([*lines, *self.hints])


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
    hints = []
    light = replace(plan, args=replace(args, **{EVALUATION: 1}))
    lower = sum(with_constants(profiles.held(light, batch).device, plan.ranks).values())
    if lower < sum(device.values()):
        hints.append(
            f"evaluation, of {getattr(args, EVALUATION)} rows at a time, takes more than training: "
            f"with --{EVALUATION} 1 the peak is {lower / GIB:.3f} GiB"
        )
    saving = saving_of(plan, profiles.of(plan, batch).weights)
    host = {category: round(size) for category, size in held.host.items()}
    if args.async_save:
        host["checkpoint"] = saving.share
    holders = f"{plan.copies} ranks" if plan.copies > 1 else "rank"
    title = (
        f"{args.model_name_or_path} under {plan.name}, {plan.ranks} x GPU, mixed precision "
        f"{plan.mixed_precision}: {batch.lines} x {batch.length} tokens per {holders}"
    )
    note = describe_card(request.gpu) if request.gpu else ""
    return Report(title, device, host, saving, card, note, hints)


# ---- What fits ----
@dataclass(frozen=True)
class Choice:
    """The ways that fit a card, and what to change if none does without offload.

    Attributes:
        closest: the way that is closest to fitting; changes: with each of which it does.
        room: for the first way, the largest batch and length that fit.
    """

    launch: Launch
    batch: Batch
    fitting: list[Way]
    tried: list[Way]
    closest: Way | None
    changes: list[tuple[str, Way]]
    room: tuple[int, int] | None

    @property
    def title(self) -> str:
        """The question, and how many ways fit of those that were tried."""
        launch = self.launch
        return (
            f"{launch.args.model_name_or_path} on {launch.ranks} x {launch.request.gpu}, "
            f"{in_gib(launch.card)} each, {self.batch.lines} x {self.batch.length} tokens per "
            f"micro-batch: {len(self.fitting)} of {len(self.tried)} ways fit"
        )

    # ---- JSON ----
    def as_object(self) -> dict[str, Any]:
        """Return the choice as written to JSON."""
        found: dict[str, Any] = {
            "title": self.title,
            "card": self.launch.card,
            "rows": [self.row(way) for way in self.fitting],
            "closest": self.row(self.closest) if self.closest else None,
            "changes": [{"change": words} | self.row(way) for words, way in self.changes],
        }
        if self.room:
            batch, length = self.room
            found["rows"][0]["largest_per_device_train_batch_size"] = batch
            found["rows"][0]["largest_max_length"] = length
        return found

    def row(self, way: Way) -> dict[str, Any]:
        """Return a way: bytes of a GPU, and of the host for each rank."""
        assert way.held is not None
        return {
            "number": way.number,
            "config_file": f"accelerate_configs/{way.file}",
            "name": way.plan.name,
            "weights": way.weights,
            "gradient_checkpointing": way.plan.args.gradient_checkpointing,
            "peak": way.peak,
            "device": way.held.device,
            "host": way.held.host,
            "cost": way.cost,
            "reasons": way.reasons,
            "command": shlex.join(command(self.launch, way)),
        }

    # ---- Text ----
    def __str__(self) -> str:
        card = self.launch.request.gpu
        assert card is not None  # without a card there is nothing to choose for
        lines = [self.title, describe_card(card)]
        if self.fitting:
            lines.append(
                "Sorted by a rule of thumb, probably the fastest first: nothing was timed."
            )
            lines += ["", table(self.fitting, self.launch.machines), *self.misfits(), LEGEND]
            lines += self.commands()
        else:
            lines.append("")
        if self.closest is not None:
            lines += self.remedies(self.closest)
        return "\n".join(lines)

    def misfits(self) -> Iterator[str]:
        """Yield a line for each kind of weights that does not fit, with how much is missing."""
        kinds = {way.weights for way in self.fitting}
        for weights in dict.fromkeys(way.weights for way in self.tried):
            if weights not in kinds:
                closest = min((w for w in self.tried if w.weights == weights), key=lambda w: w.peak)
                excess = in_gib(closest.peak - self.launch.card)
                yield f"{weights}: does not fit, at least {excess} too much ({name_of(closest)})"

    def commands(self) -> Iterator[str]:
        """Yield the commands of the first way and of the first with full weights."""
        first = self.fitting[0]
        yield f"Number 1:\n\n{folded(command(self.launch, first))}"
        if self.room:
            batch, length = self.room
            yield (
                f"\nIt has room for --per_device_train_batch_size {batch}, or for --max_length "
                f"{length}."
            )
        full = next((way for way in self.fitting if way.weights == "full"), first)
        if full is not first:
            yield f"\nNumber {full.number}, the first with full weights:\n"
            yield folded(command(self.launch, full))
        if self.launch.machines > 1:
            yield (
                "\nRun it on each machine with its own --machine_rank and the --main_process_ip of "
                "the first."
            )

    def remedies(self, closest: Way) -> Iterator[str]:
        """Yield how much the closest way lacks, and changes with which it fits."""
        sentence = f"The closest is {closest.weights} under {name_of(closest)}"
        if closest.plan.args.gradient_checkpointing:
            sentence += ", with --gradient_checkpointing"
        if self.fitting:
            sentence = f"\nWithout offload nothing fits. {sentence}"
        yield f"{sentence}."
        enough = "each of these changes is enough by itself:"
        if not self.changes:
            enough = "no smaller batch, shorter rows, more GPUs or known card is enough by itself."
        excess = in_gib(closest.peak - self.launch.card)
        yield f"It takes {in_gib(closest.peak)}, {excess} too much; {enough}"
        for words, way in self.changes:
            yield f"\n{words} ({way.weights}, {in_gib(way.peak)})"
            yield folded(command(self.launch, way))


def choice_of(launch: Launch) -> Choice:
    """Return which ways fit, and what to change if none does without offload.

    Raises:
        UnplannableError: if nothing can be run.
    """
    found = choose.find_ways(launch)
    fitting = found.fitting
    room = closest = None
    changes = []
    if fitting:
        first = fitting[0]
        most = choose.longest_of(
            read_config(launch.args.model_name_or_path, launch.args.model_revision)
        )
        room = (
            choose.largest(launch, first, "per_device_train_batch_size", choose.MOST_LINES),
            choose.largest(launch, first, "max_length", most),
        )
    on_gpus = [way for way in found.tried if not way.offloads]
    if on_gpus and (not fitting or fitting[0].offloads):
        closest = min(on_gpus, key=lambda way: way.peak)
        changes = list(choose.changes_for(launch, closest))
    batch = batch_of(launch.args, launch.request)
    return Choice(launch, batch, fitting, found.tried, closest, changes, room)


def name_of(way: Way) -> str:
    """Return the YAML of a way, with the ranks that share each row: "fsdp2_cp, CP 4"."""
    return ", ".join(word for word in (Path(way.file).stem, way.plan.describe("")) if word)


def table(ways: Sequence[Way], machines: int) -> str:
    """Return ways as aligned text of at most 120 characters in a line."""
    lines = [HEADER]
    for way in ways:
        assert way.held is not None
        cost = f"{way.cost / ways[0].cost:.2f}" + ("+" if way.offloads else "")
        reason = way.reasons[0]
        host = sum(way.held.host.values()) * way.plan.ranks / machines
        if host:
            reason += f": {in_gib(host)} per machine"
        checkpoints = "yes" if way.plan.args.gradient_checkpointing else ""
        size = f"{way.peak / GIB:.1f}"
        lines.append((str(way.number), name_of(way), way.weights, checkpoints, size, cost, reason))
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
    words += ["--num_processes", str(way.plan.ranks), *sizes_of_mesh(way)]
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


def sizes_of_mesh(way: Way) -> list[str]:
    """Return the launcher's options for the mesh of a way under which ranks share rows."""
    plan = way.plan
    if plan.copies == 1:
        return []
    groups = plan.ranks // plan.copies
    replicas = plan.replicas if plan.engine == "fsdp2" else 1
    sizes = zip(SIZES, (replicas, groups // replicas, plan.cp, plan.sp, plan.tp), strict=True)
    words = []
    for key, size in sizes:
        if size > 1 or (key == "dp_shard" and plan.engine != "single"):
            words += [f"--parallelism_config_{key}_size", str(size)]
    return words


def folded(words: Sequence[str]) -> str:
    """Return a command as text, folded between its flags with a backslash.

    A flag whose value is wider than a line keeps it whole.
    """
    parts: list[str] = []
    for word in map(shlex.quote, words):
        if word.startswith("--") or not parts:
            parts.append(word)
        else:
            parts[-1] += f" {word}"
    lines: list[str] = []
    for part in parts:
        if lines and len(f"{lines[-1]} {part}") <= WIDTH:
            lines[-1] += f" {part}"
        else:
            lines.append(f"    {part}" if lines else part)
    return " \\\n".join(lines)
