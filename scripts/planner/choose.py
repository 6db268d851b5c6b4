# SPDX-License-Identifier: Apache-2.0
"""Which ways to run fit a card, the cheapest first: plan_memory.py without --config_file.

It tries the YAMLs of accelerate_configs/ that the number of GPUs allows, with full weights, with
LoRA, and with LoRA on an int8, nf4 and doubly quantized nf4 base, each with and without
--gradient_checkpointing, until enough fit: first one process, DDP and FSDP2, then DeepSpeed, if
nothing before fits without offload. It changes nothing that the command line sets, and skips what
the recipe refuses.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from config_strategy import read, strategy_of
from paths import CONFIGS, OF_EXPERTS, OF_PIPELINES, SAME_AS_FIRST_CHOICE

from .engines import Held, at_rest, peak_of
from .plan import DTYPES, Plan, plan_of
from .request import Batch, Request, UnplannableError, batch_of, with_constants
from .trace import Profile, profile_of

SHOWN = 12  # ways, besides the first of each kind of weights
EVALUATION = "per_device_eval_batch_size"
DECIDES_WEIGHTS = {"use_peft", "load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"}
PREFERRED = ("single", "ddp", "fsdp2", "zero")  # order of engines at equal cost; FSDP1 is not tried
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
        cost: of a micro-batch in forward passes.
        held: at the peak, with what is not tensors; None before it is traced.
    """

    file: str
    weights: str
    plan: Plan
    cost: float
    held: Held | None = None

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


def traced(launch: Launch, way: Way) -> Way:
    """Return a way with what it holds at its peak, or at rest if that is too much already.

    Raises UnplannableError if it cannot run.
    """
    held = Held(*at_rest(way.plan, launch.profiles.of(way.plan, None)))
    if held.peak <= launch.card:
        held = launch.profiles.held(way.plan, batch_of(way.plan.args, launch.request))
    device = with_constants(held.device, way.plan.ranks)
    return replace(way, held=Held(device, held.host))


def find_ways(launch: Launch) -> tuple[list[Way], list[Way]]:
    """Return the first ways that fit, with the first of each kind of weights, and all traced ones.

    Raises:
        UnplannableError: if nothing can be run.
    """
    fitting: list[Way] = []
    tried: list[Way] = []
    refused: list[UnplannableError] = []
    untraceable: list[UnplannableError] = []
    for by_deepspeed in (False, True):
        ways = ways_on(launch, by_deepspeed, refused)
        tried += trace_until_enough(launch, ways, untraceable)
        fits = [way for way in tried if way.peak <= launch.card]
        fitting = sorted(fits, key=lambda way: way.order)
        if fitting and not fitting[0].offloads:
            break
    if not tried:
        raise (untraceable or refused)[0]
    return fitting, tried


def trace_until_enough(
    launch: Launch, ways: Iterable[Way], untraceable: list[UnplannableError]
) -> list[Way]:
    """Trace ways in order of cost until SHOWN fit, and one of each kind of weights.

    Args:
        untraceable: gets why others cannot be traced.
    """
    tried: list[Way] = []
    fitting: list[str] = []  # weights of the ways that fit
    for way in ways:
        if len(fitting) >= SHOWN and way.weights in fitting:
            continue
        try:
            tried.append(traced(launch, way))
        except UnplannableError as error:
            untraceable.append(error)
            continue
        if tried[-1].peak <= launch.card:
            fitting.append(way.weights)
    return tried


# ---- What can be run ----
def ways_on(launch: Launch, by_deepspeed: bool, refused: list[UnplannableError]) -> list[Way]:
    """Return every way that the recipe accepts, in order of cost.

    Args:
        by_deepspeed: those of DeepSpeed, or else those of torch.
        refused: gets why it does not accept others.
    """
    ways = []
    for name, config in configs_on(launch.ranks, by_deepspeed):
        for weights, values in kinds_of_weights(launch, config).items():
            for checkpoints in (False, True):
                if launch.args.gradient_checkpointing and not checkpoints:
                    continue
                args = replace_all(launch.args, **values, gradient_checkpointing=checkpoints)
                try:
                    ways.append(way_under(launch, name, weights, args, config))
                except UnplannableError as error:
                    refused.append(error)
    return sorted(ways, key=lambda way: way.order)


def way_under(launch: Launch, file: str, weights: str, args: Any, config: Mapping[str, Any]) -> Way:
    """Return a way under a config. Raises UnplannableError if it cannot run."""
    request = launch.request
    if EVALUATION not in request.given:
        # An evaluation of no more rows than a micro-batch decides nothing
        rows = min(launch.defaults[EVALUATION], args.per_device_train_batch_size)
        args = replace_all(args, **{EVALUATION: rows})
    plan = plan_of(args, config, launch.ranks, request.num_machines, request.mixed_precision)
    batch = batch_of(args, request)
    return Way(file, weights, plan, cost_of(plan, batch.lines * batch.length))


def configs_on(ranks: int, by_deepspeed: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the shipped YAMLs, as (name of the file, content), that make sense on some ranks."""
    others = {SAME_AS_FIRST_CHOICE, OF_PIPELINES, *OF_EXPERTS}
    for path in sorted(set(CONFIGS.glob("*.yaml")) - others):
        config = read(path)
        strategy = strategy_of(config)
        is_other = strategy.engine == "fsdp1" or (strategy.engine == "zero") != by_deepspeed
        if is_other or strategy.ranks_per_row > 1:
            continue
        if ranks == 1:  # A single rank splits nothing; only offload makes a difference.
            if strategy.engine == "single" or strategy.offload:
                yield path.name, config
        elif strategy.engine != "single":
            yield path.name, config


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
def cost_of(plan: Plan, tokens: int) -> float:
    """Return the cost of a micro-batch in forward passes. Nothing is timed.

    Compute is 1 for the forward pass, 1 for gradients of activations, 1 for those of weights unless
    only adapters train, and 1 to compute again; more on a quantized base. Communication is
    TOKENS_PER_TRIP / tokens each time that as many numbers as the model has cross the wire.
    """
    args = plan.args
    factor = 1.0
    if getattr(args, "load_in_8bit", False):
        factor = INT8
    elif getattr(args, "load_in_4bit", False):
        factor = NF4_TWICE if args.bnb_4bit_use_double_quant else NF4
    compute = factor * (2 + (not args.use_peft) + args.gradient_checkpointing)
    return compute + TOKENS_PER_TRIP / tokens * trips_of(plan)


def trips_of(plan: Plan) -> float:
    """Return how often a rank sends as many numbers as the model has.

    A ring's all-reduce sends each number twice, a reduce-scatter or a gather once. What is reduced
    once per step is divided by its micro-batches. Adapters are next to nothing.
    """
    trained = 0 if plan.args.use_peft else 1
    per_step = trained / plan.args.gradient_accumulation_steps
    if plan.ranks == 1:
        return 0
    if plan.engine == "zero" and plan.stage == 2:
        return trained + per_step
    if plan.engine == "ddp" or (plan.engine == "zero" and plan.stage < 2):
        return 2 * per_step
    between = 2 * trained / plan.shards if plan.replicas > 1 else 0
    gathers = 2 if plan.reshards else 1
    return gathers + trained + between
