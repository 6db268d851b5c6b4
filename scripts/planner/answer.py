# SPDX-License-Identifier: Apache-2.0
"""From a request to its answer: the plan of one config, or what fits a card, as text and JSON.

Without a config it tries the YAMLs below that the number of GPUs allows, with full weights, with
LoRA, and with LoRA on a 4-bit base, each with each --gradient_checkpointing: first one process,
DDP and FSDP2, then DeepSpeed, if nothing before fits without offload. It changes nothing that the
command line sets, and skips what the recipe refuses.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from config_strategy import read
from core.exits import End, Exit
from paths import CONFIGS

from .engines import Held, Profiles
from .plan import (
    DTYPES,
    GIB,
    Plan,
    Request,
    batch_of,
    bytes_of_card,
    plan_of,
    read_arguments,
    with_constants,
)

# Files of accelerate_configs/: those that send least come first, those that offload last
FILES = (
    "single",
    "ddp",
    "fsdp2_shard_grad_op",
    "fsdp",
    "fsdp2_hybrid_shard",
    "fsdp2_cpu_offload",
    "deepspeed_zero1",
    "deepspeed_zero2",
    "deepspeed_zero3",
    "deepspeed_zero2_offload",
    "deepspeed_zero3_offload",
)
OF_YAMLS = "bf16"  # their mixed precision
DECIDES_WEIGHTS = {"use_peft", "load_in_8bit", "load_in_4bit", "load_in_fp8"}
# Step time on a 4-bit base relative to that on a bf16 one: the median of what is published
# (torchtune 1.02 and 1.28, Lightning AI 1.39, litgpt 1.56 and 2.0 for 7B and 13B)
NF4 = 1.39
# Forward passes computed again: on an H200 selective recomputation added a third of what full did
RECOMPUTED = {"no": 0.0, "selective": 0.33, "full": 1.0}
PLACEHOLDER = "YOUR_ROWS.jsonl"  # if the command line names no data set
ABOVE = """Sorted by a rule of thumb, probably the fastest first: nothing was timed.

  #  config                   weights     ckpt          GiB    host"""
BELOW = """
ckpt: --gradient_checkpointing. GiB: peak per GPU. host: GiB per machine.
--json PATH has the command of each. Number 1:
"""


def answer(request: Request) -> tuple[dict[str, Any], str, bool]:
    """Return the answer to a request, as an object and as text, and whether something fits.

    Raises End if it cannot be planned.
    """
    card = bytes_of_card(request.gpu)
    args, request = read_arguments(request)
    if request.config_file:
        report = report_of(request, args, card)
        return report, text_of_report(report), card is None or report["peak"] <= card
    assert card is not None  # The command line has the one or the other.
    tried = find_ways(request, args, card)
    fitting = [way for way in tried if way.held.peak <= card]
    batch = batch_of(args)
    title = (
        f"{args.model_name_or_path} on {request.ranks} x {request.gpu}, {in_gib(card)} each, "
        f"{batch.lines} x {batch.length} tokens per micro-batch: {len(fitting)} of {len(tried)} "
        "ways fit"
    )
    rows = []
    for way in fitting:
        held = {"peak": way.held.peak, "device": way.held.device, "host": way.held.host}
        rows.append(held | {"command": shlex.join(command(request, way))})
    choice = {"title": title, "card": card, "rows": rows}
    return choice, text_of_choice(request, title, tried, card), bool(fitting)


def held_by(plan: Plan, profiles: Profiles) -> Held:
    """Return what a rank holds at its peak, with what is no tensor."""
    held = profiles.held(plan, batch_of(plan.args))
    return Held(with_constants(held.device, plan.ranks), held.host)


def in_gib(size: float) -> str:
    """Return bytes as text."""
    return f"{size / GIB:.1f} GiB"


# ---- One plan ----
def report_of(request: Request, args: Any, card: int | None) -> dict[str, Any]:
    """Return the plan of one config: bytes of a GPU at its peak, and of the host for each rank.

    Raises End if the file is no config, or cannot be planned.
    """
    path: Any = request.config_file
    try:
        config = read(path)
    except ValueError as error:
        raise End(Exit.USAGE, str(error)) from None
    config.values.update(request.mesh)
    plan = plan_of(
        args, config, request.num_processes, request.num_machines, request.mixed_precision
    )
    batch = batch_of(args)
    held = held_by(plan, Profiles())
    holders = f"{plan.copies} ranks" if plan.copies > 1 else "rank"
    title = (
        f"{args.model_name_or_path} under {path}, {plan.ranks} x GPU, mixed precision "
        f"{plan.mixed_precision}: {batch.lines} x {batch.length} tokens per {holders}"
    )
    report = {"title": title, "device": held.device, "peak": held.peak, "host": held.host}
    return report if card is None else report | {"card": card}


def text_of_report(report: Mapping[str, Any]) -> str:
    """Return a plan as text."""
    lines = [f"{report['title']}, GiB"]
    lines += [line(name, size) for name, size in report["device"].items()]
    lines.append(f"{line('peak per GPU', report['peak'])} GiB")
    if report["host"]:
        whole = line("host, per rank", sum(report["host"].values()))
        lines.append(f"{whole} GiB: {', '.join(report['host'])}")
    if "card" in report:
        left = report["card"] - report["peak"]
        verdict = "fits" if left >= 0 else "does not fit"
        lines.append(f"{line('card', report['card'])} GiB: {verdict}, {in_gib(left)} left")
    return "\n".join(lines)


def line(name: str, size: float) -> str:
    """Return a line of a plan: a name, and bytes in GiB."""
    return f"  {name:<16}{size / GIB:10.3f}"


# ---- What fits ----
@dataclass(frozen=True)
class Way:
    """One way to run.

    Attributes:
        file: in accelerate_configs/, without its ending.
        weights: what is trained, on which base.
        added: arguments of the recipe that differ from those of the command line.
        held: at the peak, with what is no tensor.
    """

    file: str
    weights: str
    added: dict[str, Any]
    plan: Plan
    held: Held

    @property
    def order(self) -> tuple[Any, ...]:
        """The sort key of ways: those that offload come last; then by compute, then by traffic.

        Compute is counted in forward passes of a micro-batch: 1 for that, 1 for gradients of
        activations, 1 for those of weights unless only adapters train, and up to 1 to compute
        again; more on a quantized base. Nothing is timed.
        """
        args = self.plan.args
        offloads = self.plan.offloads_optimizer + self.plan.offloads_parameters
        factor = NF4 if getattr(args, "load_in_4bit", False) else 1
        passes = factor * (2 + (not args.use_peft) + RECOMPUTED[args.gradient_checkpointing])
        return offloads, passes, not args.use_peft, FILES.index(self.file)


def find_ways(request: Request, args: Any, card: int) -> list[Way]:
    """Return all ways that can be run, in order. Raises End if nothing can be run."""
    tried: list[Way] = []
    refused: list[End] = []
    profiles = Profiles()
    for file, (weights, added) in product(FILES, kinds_of_weights(request, args)):
        # A single rank splits nothing; only offload makes a difference
        if request.ranks == 1 and file != "single" and "offload" not in file:
            continue
        fits = any(way.held.peak <= card and not way.plan.offloads_optimizer for way in tried)
        if fits and file.startswith("deepspeed"):
            break
        try:
            plan = plan_of(
                replace(args, **added),
                read(CONFIGS / f"{file}.yaml"),
                request.ranks,
                request.num_machines,
                request.mixed_precision,
            )
            tried.append(Way(file, weights, added, plan, held_by(plan, profiles)))
        except End as end:
            refused.append(end)
    if not tried:
        raise refused[-1]
    return sorted(tried, key=lambda way: way.order)


def kinds_of_weights(request: Request, args: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield full weights and adapters over each base, with each kind of recomputation.

    Each is a name of the weights, and the arguments that differ from the given ones. A frozen base
    is loaded in the precision that mixed precision computes in. Kinds that contradict a given
    argument are left out; if none remains, the weights are as given.
    """
    given = request.given
    lora: dict[str, Any] = {"use_peft": True}
    precision = request.mixed_precision or OF_YAMLS
    if precision in DTYPES and "dtype" not in given:
        lora["dtype"] = DTYPES[precision]
    kinds = {"full": {}, "LoRA": lora}
    if hasattr(args, "load_in_4bit"):
        kinds[f"LoRA, {args.bnb_4bit_quant_type}"] = lora | {"load_in_4bit": True}
    fixed = given & DECIDES_WEIGHTS
    possible = {name: values for name, values in kinds.items() if fixed <= values.keys()}
    common = {}
    if "per_device_eval_batch_size" not in given:
        # An evaluation of no more rows than a micro-batch decides nothing
        rows = min(args.per_device_eval_batch_size, args.per_device_train_batch_size)
        common["per_device_eval_batch_size"] = rows
    least = RECOMPUTED[args.gradient_checkpointing]
    for name, values in (possible or {"as given": {}}).items():
        for checkpoints in [kind for kind, passes in RECOMPUTED.items() if passes >= least]:
            values = common | values | {"gradient_checkpointing": checkpoints}
            yield name, {key: one for key, one in values.items() if one != getattr(args, key)}


# ---- What fits, as text ----
def text_of_choice(request: Request, title: str, tried: Sequence[Way], card: int) -> str:
    """Return as text what fits, the cheapest first, and what does not."""
    fitting = [way for way in tried if way.held.peak <= card]
    lines = [title]
    if fitting:
        lines.append(ABOVE)
    for number, way in enumerate(fitting, 1):
        host = sum(way.held.host.values()) * request.ranks / (request.num_machines or 1)
        checkpoints = way.plan.args.gradient_checkpointing
        names = f"{number:>3}  {way.file:<23}  {way.weights:<10}  {checkpoints:<9}"
        lines.append(f"{names}  {way.held.peak / GIB:>6.1f}  {host / GIB:>6.1f}")
    kinds = [way.weights for way in fitting]
    for weights in dict.fromkeys(way.weights for way in tried):
        if weights not in kinds:
            closest = min(way.held.peak for way in tried if way.weights == weights)
            lines.append(f"{weights}: does not fit, at least {in_gib(closest - card)} too much")
    if fitting:
        first = shlex.join(command(request, fitting[0]))
        lines += [BELOW, first.replace(" --", " \\\n    --")]
    return "\n".join(lines)


def command(request: Request, way: Way) -> list[str]:
    """Return the words of the command that launches a way.

    These are the user's arguments and what the way adds, with a learning rate that fits what is
    trained, and a placeholder for the data, if the user gave none.
    """
    args = way.plan.args
    words = ["accelerate", "launch", "--config_file", f"accelerate_configs/{way.file}.yaml"]
    words += ["--num_processes", str(request.ranks)]
    if request.num_machines:
        words += ["--num_machines", str(request.num_machines)]
    if request.mixed_precision:
        words += ["--mixed_precision", request.mixed_precision]
    words += [f"recipes/{type(args).__module__}.py", *request.words]
    if "dataset_name" not in request.given:
        words += ["--dataset_name", PLACEHOLDER]
    if args.use_peft and "learning_rate" not in request.given:
        # About ten times that of full fine-tuning (Schulman et al., "LoRA Without Regret", 2025)
        words += ["--learning_rate", f"{10 * args.learning_rate:.2g}"]
    for name, value in way.added.items():
        words.append(f"--{name}")
        if value is not True:
            words.append(str(value))
    return words
