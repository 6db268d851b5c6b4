# SPDX-License-Identifier: Apache-2.0
"""Which ways to run fit a card, the cheapest first: plan_memory.py without --config_file.

It tries the YAMLs of accelerate_configs/ that the number of GPUs allows, with full weights, with
LoRA, and with LoRA on an int8, nf4 and doubly quantized nf4 base, each with and without
--gradient_checkpointing, until enough fit: first one process, DDP and FSDP2, then DeepSpeed, then
ways under which ranks share rows or matrices, each only if nothing before fits without offload. It
changes nothing that the command line sets, and skips what the recipe refuses.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from config_strategy import SHARING_KINDS, ConfigStrategy, read, strategy_of
from paths import CONFIGS, OF_EXPERTS, OF_PIPELINES, SAME_AS_FIRST_CHOICE

from .engines import Held, at_rest, peak_of
from .plan import DTYPES, Plan, plan_of
from .request import (
    CARDS,
    GIB,
    ROUNDING,
    SLOW_IN_BF16,
    Batch,
    Request,
    UnplannableError,
    batch_of,
    logits_mib_on,
    with_constants,
)
from .trace import Profile, profile_of

SHOWN = 12  # ways, besides the first of each kind of weights
MOST_LINES = 2**16  # of the largest batch that is searched for
MOST_TOKENS = 2**20  # of the longest row that is searched for
LEAST_TOKENS = 64  # of the shortest rows that are proposed
MOST_RANKS = 1024
EVALUATION = "per_device_eval_batch_size"
DECIDES_WEIGHTS = {"use_peft", "load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"}
PREFERRED = ("single", "ddp", "fsdp2", "zero")  # order of engines at equal cost; FSDP1 is not tried
KINDS = ("torch", "DeepSpeed", "sharing")  # of ways, in the order in which they are tried
# Step time relative to LoRA on a bf16 base. nf4: the median of what is published (torchtune 1.02
# and 1.28, Lightning AI 1.39, litgpt 1.56 and 2.0 for 7B and 13B). Double quantization: 3.83
# against 3.68 minutes (litgpt). int8: "over twice as slow" (PhoebusSi/Alpaca-CoT#26).
NF4, NF4_TWICE, INT8 = 1.39, 1.45, 2.0
# Tokens that a forward pass computes while all parameters cross the wire once, at 400 TFLOP/s and
# 200 GB/s: a parameter takes 2 bytes to send, and 2 FLOP per token.
TOKENS_PER_TRIP = 2000


class Profiles:
    """Profiles of micro-batches, each traced once; engines and numbers of ranks share them."""

    def __init__(self) -> None:
        self._found: dict[Any, Profile] = {}

    def held(self, plan: Plan, batch: Batch) -> Held:
        """Return what a rank holds at its peak, in training or in evaluation."""
        evaluated = None
        lines = getattr(plan.args, EVALUATION)
        if plan.args.eval_strategy != "no" and lines * plan.sp > batch.lines:
            # DeepSpeed gives each rank whole rows in evaluation
            supervised = -(-batch.supervised * lines // batch.lines)
            evaluation = Batch(lines, batch.length, supervised)
            evaluated = self.of(replace(plan, sp=1), evaluation, trains=False)
        return peak_of(plan, self.of(plan, batch), evaluated)

    def of(self, plan: Plan, batch: Batch | None, trains: bool = True) -> Profile:
        """Return the profile of a micro-batch under all that a trace depends on."""
        if batch is not None and getattr(plan.args, "bnb_4bit_use_double_quant", False):
            # It changes only scales
            plain = replace_all(plan.args, bnb_4bit_use_double_quant=False)
            phases = self.of(replace(plan, args=plain), batch, trains).phases
            return replace(self.of(plan, None), phases=phases)
        args = replace_all(plan.args, gradient_accumulation_steps=1, optim="")
        engine = (plan.engine == "fsdp2", plan.engine == "zero", plan.stage == 3, plan.casts)
        key = (repr(args), engine, plan.mixed_precision, plan.tp, plan.cp, plan.sp, batch, trains)
        if key not in self._found:
            self._found[key] = profile_of(plan, batch, trains)
        return self._found[key]


def replace_all(args: Any, **values: Any) -> Any:
    """Return arguments of a recipe with other values, those of flags that it has."""
    names = {one.name for one in dataclasses.fields(args)}
    return replace(args, **{name: value for name, value in values.items() if name in names})


@dataclass(frozen=True)
class Launch:
    """What all ways to run have in common.

    Attributes:
        defaults: values of the recipe's arguments without a command line.
        card: its bytes.
    """

    request: Request
    recipe: Any
    args: Any
    defaults: Mapping[str, Any]
    card: int
    profiles: Profiles = field(default_factory=Profiles)

    @property
    def machines(self) -> int:
        """Hosts, with as many GPUs each."""
        return self.request.num_machines or 1

    @property
    def ranks(self) -> int:
        """Processes, one per GPU: by default one per machine."""
        if self.request.num_processes is None:
            return self.machines
        return self.request.num_processes


@dataclass(frozen=True)
class Way:
    """One way to run.

    Attributes:
        file: in accelerate_configs/.
        weights: what is trained, on which base.
        cost: of a micro-batch in forward passes, and the reasons for it.
        held: at the peak, with what is not tensors; None before it is traced.
        number: among the ways that fit, from 1.
    """

    file: str
    weights: str
    plan: Plan
    cost: float
    reasons: list[str]
    held: Held | None = None
    number: int | None = None

    @property
    def peak(self) -> int:
        """Bytes of a GPU."""
        assert self.held is not None
        return self.held.peak

    @property
    def offloads(self) -> int:
        """0: nothing, 1: the optimizer, 2: parameters too."""
        return self.plan.offloads_optimizer + self.plan.offloads_parameters

    @property
    def order(self) -> tuple[Any, ...]:
        """The sort key of ways: those that offload come last; then by cost."""
        return self.offloads, self.cost, PREFERRED.index(self.plan.engine), self.file


@dataclass(frozen=True)
class Found:
    """Ways that fit, the cheapest first, and all that were traced."""

    fitting: list[Way]
    tried: list[Way]


def traced(launch: Launch, way: Way) -> Way:
    """Return a way with what it holds at its peak, or at rest if that is too much already.

    Raises UnplannableError if it cannot run.
    """
    held = Held(*at_rest(way.plan, launch.profiles.of(way.plan, None)))
    if held.peak <= launch.card:
        held = launch.profiles.held(way.plan, batch_of(way.plan.args, launch.request))
    device = with_constants(held.device, way.plan.ranks)
    return replace(way, held=Held(device, held.host))


def changed(launch: Launch, way: Way, **values: Any) -> Way:
    """Return a way under other arguments of the recipe."""
    args = replace_all(way.plan.args, **values)
    return traced(launch, replace(way, plan=replace(way.plan, args=args)))


def fits(launch: Launch, way: Way, **values: Any) -> bool:
    """Return whether a way fits under other arguments of the recipe."""
    return changed(launch, way, **values).peak <= launch.card


def find_ways(launch: Launch) -> Found:
    """Return the first ways that fit, and the first of each kind of weights.

    Raises:
        UnplannableError: if nothing can be run.
    """
    fitting: list[Way] = []
    tried: list[Way] = []
    refusal = None
    for kind in KINDS:
        try:
            found = first_that_fit(launch, ways_on(launch, launch.ranks, kind))
        except UnplannableError as error:
            refusal = refusal or error
            continue
        fitting = sorted([*fitting, *found.fitting], key=lambda way: way.order)
        tried += found.tried
        if fitting and not fitting[0].offloads:
            break
    if refusal is not None and not tried:
        raise refusal
    numbered = [replace(way, number=number) for number, way in enumerate(fitting, 1)]
    return Found(numbered, tried)


def first_that_fit(launch: Launch, ways: Iterable[Way]) -> Found:
    """Trace ways in order of cost until SHOWN fit, and one of each kind of weights."""
    fitting: list[Way] = []
    tried: list[Way] = []
    refusal = None
    for way in ways:
        if len(fitting) >= SHOWN and way.weights in {one.weights for one in fitting}:
            continue
        try:
            way = traced(launch, way)
        except UnplannableError as error:
            refusal = error
            continue
        tried.append(way)
        if way.peak <= launch.card:
            fitting.append(way)
    if refusal is not None and not tried:
        raise refusal
    return Found(fitting, tried)


# ---- What can be run ----
def ways_on(launch: Launch, ranks: int, kind: str) -> list[Way]:
    """Return every way on a number of ranks that the recipe accepts, in order of cost."""
    ways = []
    refusal = None
    for name, config in configs_on(ranks, launch.machines, kind):
        for weights, values in kinds_of_weights(launch, config).items():
            for checkpoints in (False, True):
                if launch.args.gradient_checkpointing and not checkpoints:
                    continue
                args = replace_all(launch.args, **values, gradient_checkpointing=checkpoints)
                try:
                    ways.append(way_under(launch, name, weights, args, config, ranks))
                except UnplannableError as error:
                    refusal = error
    if refusal is not None and not ways:
        raise refusal
    return sorted(ways, key=lambda way: way.order)


def way_under(
    launch: Launch, file: str, weights: str, args: Any, config: Mapping[str, Any], ranks: int
) -> Way:
    """Return a way under a config. Raises UnplannableError if it cannot run."""
    request = launch.request
    if EVALUATION not in request.given:
        # An evaluation of no more rows than a micro-batch decides nothing
        rows = min(launch.defaults[EVALUATION], args.per_device_train_batch_size)
        args = replace_all(args, **{EVALUATION: rows})
    plan = plan_of(args, config, ranks, request.num_machines, request.mixed_precision)
    batch = batch_of(args, request)
    return Way(file, weights, plan, *cost_of(plan, batch.lines * batch.length))


def configs_on(ranks: int, machines: int, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the shipped YAMLs, as (name of the file, content), that make sense on some ranks.

    Those under which ranks share rows come with each size of their mesh. Ranks that share them are
    in one machine, since they wait for each other in every layer.
    """
    for path in sorted(
        set(CONFIGS.glob("*.yaml")) - {SAME_AS_FIRST_CHOICE, OF_PIPELINES, *OF_EXPERTS}
    ):
        config = read(path)
        strategy = strategy_of(config)
        if strategy.engine == "fsdp1" or kind_of(strategy) != kind:
            continue
        if kind == "sharing":
            for sizes in sizes_on(strategy, ranks, machines):
                mesh = {f"parallelism_config_{key}_size": size for key, size in sizes.items()}
                written = config["parallelism_config"]
                yield path.name, config | {"parallelism_config": written | mesh}
        elif ranks == 1:  # A single rank splits nothing; only offload makes a difference.
            if strategy.engine == "single" or strategy.offload:
                yield path.name, config
        elif strategy.engine != "single":
            yield path.name, config


def kind_of(strategy: ConfigStrategy) -> str:
    """Return which of KINDS a strategy is."""
    if strategy.ranks_per_row > 1:
        return "sharing"
    return "DeepSpeed" if strategy.engine == "zero" else "torch"


def sizes_on(strategy: ConfigStrategy, ranks: int, machines: int) -> Iterator[dict[str, int]]:
    """Yield the sizes of a mesh that are worth trying: powers of two; replicas are machines."""
    if strategy.replicas > 1 and machines == 1:
        return
    sizes = {"dp_replicate": machines} if strategy.replicas > 1 else {}
    kind = next(kind for kind in SHARING_KINDS if getattr(strategy, kind) > 1)
    share = 2
    while share <= ranks // machines:
        groups = ranks // (share * sizes.get("dp_replicate", 1))
        if strategy.engine == "ddp":  # Without an engine that shards there is one group.
            if groups == 1:
                yield {kind: share}
        elif groups > 1 or kind != "tp":  # FSDP2 needs several shards besides TP.
            yield sizes | {"dp_shard": groups, kind: share}
        share *= 2


def kinds_of_weights(launch: Launch, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return {name: values of arguments} of full weights, and of adapters over each base.

    A frozen base is loaded in the precision that mixed precision computes in. Kinds that contradict
    a given argument are left out; if none remains, the weights are as given.
    """
    precision = launch.request.mixed_precision or config.get("mixed_precision", "no")
    given = launch.request.given
    lora: dict[str, Any] = {"use_peft": True}
    if precision in DTYPES and "dtype" not in given:
        lora["dtype"] = DTYPES[precision]
    kinds = {"full": {}, "LoRA": lora}
    if hasattr(launch.args, "load_in_4bit"):
        four_bit = lora | {"load_in_4bit": True}
        kind = launch.args.bnb_4bit_quant_type
        kinds |= {
            "LoRA, int8": lora | {"load_in_8bit": True},
            f"LoRA, {kind}": four_bit,
            f"LoRA, {kind} dq": four_bit | {"bnb_4bit_use_double_quant": True},
        }
    fixed = given & DECIDES_WEIGHTS
    possible = {name: values for name, values in kinds.items() if fixed <= values.keys()}
    return possible or {"as given": {}}


# ---- What it costs ----
def cost_of(plan: Plan, tokens: int) -> tuple[float, list[str]]:
    """Return the cost of a micro-batch in forward passes, and the reasons. Nothing is timed.

    Compute is 1 for the forward pass, 1 for gradients of activations, 1 for those of weights unless
    only adapters train, and 1 to compute again; more on a quantized base. Communication is
    TOKENS_PER_TRIP / tokens each time that as many numbers as the model has cross the wire. Ranks
    that share rows do the work of one row together, and exchange tokens in each layer.
    """
    args = plan.args
    factor = 1.0
    if getattr(args, "load_in_8bit", False):
        factor = INT8
    elif getattr(args, "load_in_4bit", False):
        factor = NF4_TWICE if args.bnb_4bit_use_double_quant else NF4
    compute = factor * (2 + (not args.use_peft) + args.gradient_checkpointing)
    trips, reason = trips_of(plan)
    reasons = [reason]
    if plan.copies > 1:
        trips += 1
        reasons = ["tokens, or keys and values, travel in each layer"]
    if args.gradient_checkpointing:
        reasons.append("recomputes")
    if factor > 1:
        reasons.append("dequantizes")
    if plan.offloads_optimizer:
        reasons.insert(
            0, "state on the host" if plan.offloads_parameters else "optimizer on the host"
        )
    return compute + TOKENS_PER_TRIP / tokens * trips * plan.copies, reasons


def trips_of(plan: Plan) -> tuple[float, str]:
    """Return how often a rank sends as many numbers as the model has, and why.

    A ring's all-reduce sends each number twice, a reduce-scatter or a gather once. What is reduced
    once per step is divided by its micro-batches. Adapters are next to nothing.
    """
    trained = 0 if plan.args.use_peft else 1
    per_step = trained / plan.args.gradient_accumulation_steps
    if plan.ranks == 1:
        return 0, "one process: nothing travels"
    if plan.engine == "zero" and plan.stage in (1, 2):
        more = 2 * per_step if plan.stage == 1 else trained + per_step
        return more, "whole parameters: gradients, updates travel"
    if plan.engine in ("single", "ddp") or (plan.engine == "zero" and plan.stage == 0):
        return 2 * per_step, "whole replicas: only gradients travel"
    between = 2 * trained / plan.shards if plan.replicas > 1 else 0
    place = " in groups" if plan.replicas > 1 else ""
    if plan.reshards:
        return 2 + trained + between, f"gathers parameters twice{place}"
    return 1 + trained + between, f"gathers parameters once{place}"


# ---- How far it goes, and what to change ----
def largest(launch: Launch, way: Way, name: str, most: int) -> int:
    """Return the largest value of an argument, from its own to `most`, under which a way fits.

    Memory grows nearly as a line, so that a few guesses along it suffice.
    """
    low = getattr(way.plan.args, name)
    at_low = way.peak
    high = most + 1  # the least that does not fit
    assert way.held is not None
    slope = (1 + ROUNDING) * way.held.device["activations"] / low
    while high - low > 1:
        guess = low + int((launch.card - at_low) / slope) if slope > 0 else high - 1
        guess = min(max(guess, low + 1), high - 1)
        size = changed(launch, way, **{name: guess}).peak
        if size > launch.card and guess == low + 1:
            break
        slope = (size - at_low) / (guess - low)
        if size <= launch.card:
            low, at_low = guess, size
        else:
            high = guess
    return low


def longest_of(config: Any) -> int:
    """Return how many tokens a model has positions for."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or MOST_TOKENS


def changes_for(launch: Launch, closest: Way) -> Iterator[tuple[str, Way]]:
    """Yield (words, way) of each change with which the closest way fits by itself."""
    args = closest.plan.args
    rows = args.per_device_train_batch_size
    for number in range(rows - 1, 0, -1):
        steps = args.gradient_accumulation_steps * rows // number
        part = {"per_device_train_batch_size": number, "gradient_accumulation_steps": steps}
        if EVALUATION not in launch.request.given:
            part[EVALUATION] = min(getattr(args, EVALUATION), number)
        if rows % number == 0 and fits(launch, closest, **part):
            flags = " ".join(f"--{name} {part[name]}" for name in list(part)[:2])
            yield f"a smaller batch: {flags}", changed(launch, closest, **part)
            break
    shorter = changed(launch, closest, max_length=LEAST_TOKENS)
    if shorter.peak <= launch.card:
        length = largest(launch, shorter, "max_length", args.max_length - 1)
        yield f"shorter rows: --max_length {length}", changed(launch, closest, max_length=length)
    yield from more_ranks(launch, closest)
    yield from larger_card(launch, closest)


def more_ranks(launch: Launch, closest: Way) -> Iterator[tuple[str, Way]]:
    """Yield the number of GPUs, doubled until they suffice, and the cheapest way on them."""
    ranks = 2 * launch.ranks
    while ranks <= MOST_RANKS:
        others = ways_on(launch, ranks, KINDS[closest.plan.engine == "zero"])
        alike = [traced(launch, way) for way in others if is_like(way, closest)]
        found = [way for way in alike if way.peak <= launch.card]
        if found:
            yield f"more GPUs: {ranks}", found[0]
            return
        ranks *= 2


def larger_card(launch: Launch, closest: Way) -> Iterator[tuple[str, Way]]:
    """Yield the smallest known card on which the way fits."""
    for size, name in sorted((int(size * GIB), name) for name, size in CARDS.items()):
        if size < closest.peak or (closest.plan.mixed_precision == "bf16" and name in SLOW_IN_BF16):
            continue
        larger = replace(launch, card=size)
        values = {}
        if "max_logits_mib" not in launch.request.given:  # The recipe derives it from the card.
            values = {"max_logits_mib": logits_mib_on(size)}
        way = changed(larger, closest, **values)
        if way.peak <= size:
            yield f"another card: {name}, of {size / GIB:.1f} GiB", way
            return


def is_like(way: Way, other: Way) -> bool:
    """Return whether a way trains the same weights as another one, and leaves them on the GPUs."""
    same = way.plan.args.gradient_checkpointing == other.plan.args.gradient_checkpointing
    return same and way.weights == other.weights and way.offloads <= other.offloads
