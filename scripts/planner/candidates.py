# SPDX-License-Identifier: Apache-2.0
"""Which ways to run fit a card, the cheapest first: plan_memory.py without --config_file.

It tries every YAML of accelerate_configs/ that the number of GPUs allows, with full weights, with
LoRA, and with LoRA on an int8, nf4 and doubly quantized nf4 base, each with and without
--gradient_checkpointing. It changes nothing that the command line sets, and skips what the recipe
refuses. cost.py determines the order.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from . import recipe, yaml_files
from .cards import with_constants
from .closed_form import Build, closed_form, run_step, strategy_for
from .cost import cost_of
from .errors import UnplannableError
from .ledger import Sizes
from .plan import DTYPES, Plan, plan_of
from .recipe import RecipeArguments
from .request import Request, batch_of
from .search import largest_that_fits
from .shapes import MemoizedBuild
from .yaml_files import Config

PREFERRED = ("single", "ddp", "fsdp2", "zero", "fsdp1")  # order of engines at equal cost
MOST_SEQUENCES = 2**16  # sequences of the largest batch that is searched for
MOST_TOKENS = 2**20  # the longest sequence that is tried if the model has no maximum
DECIDES_WEIGHTS = {"use_peft", "load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"}
EVALUATION = "per_device_eval_batch_size"
# Arguments of the recipe that a way may add to the user's
CHOSEN = (*DECIDES_WEIGHTS, "lora_target_parameters", "dtype", "gradient_checkpointing")


@dataclass(frozen=True)
class Launch:
    """What all ways to run have in common."""

    request: Request
    args: RecipeArguments
    defaults: dict[str, Any]  # default values of the recipe's arguments
    given: set[str]  # names of the recipe's arguments that the user gave
    config: PretrainedConfig  # the model's config
    card: int  # bytes
    parameters: int  # parameters of the model without adapters
    build: Build  # makes the model on the meta device

    @property
    def machines(self) -> int:
        """Hosts, with as many GPUs each."""
        return self.request.machines

    @property
    def ranks(self) -> int:
        """Processes, one per GPU: by default one per machine."""
        if self.request.num_processes is None:
            return self.machines
        return self.request.num_processes


def launch_of(
    request: Request, args: RecipeArguments, config: PretrainedConfig, card: int
) -> Launch:
    """Return the Launch of a request. card: bytes."""
    build = MemoizedBuild()
    plain = recipe.with_plain_weights(args)
    strategy, _ = strategy_for(Plan(plain), config, build)
    return Launch(
        request=request,
        args=with_light_evaluation(args, request),
        defaults=vars(recipe.parse_words([], request.recipe)),
        given=request.given,
        config=config,
        card=card,
        parameters=sum(weight.numel for weight in strategy.weights),
        build=build,
    )


def with_light_evaluation(args: RecipeArguments, request: Request) -> RecipeArguments:
    """Return the arguments with an evaluation of one row at a time, unless the user says how many.

    How many are evaluated at a time changes no result, so it should not decide what fits.
    """
    if EVALUATION in request.given:
        return args
    return recipe.with_values(args, **{EVALUATION: 1})


@dataclass(frozen=True, eq=False)
class Way:
    """One way to run: a YAML, what is trained on which base, and the plan; its bytes and cost."""

    file: str  # in accelerate_configs/
    weights: str
    plan: Plan
    device: Sizes
    host: Sizes  # what each rank holds there
    cost: float
    reasons: list[str]  # explain the cost
    number: int | None = None  # among the ways that fit, from 1
    largest_batch: int | None = None  # sequences, at the given length
    largest_length: int | None = None  # tokens, at the given batch

    @property
    def peak(self) -> int:
        """Bytes of a GPU."""
        return sum(self.device.values())

    @property
    def name(self) -> str:
        """The YAML, with the ranks that share each row where it has such: "fsdp2_cp, CP 4"."""
        return name_of(self.file.removesuffix(".yaml"), self.plan)

    @property
    def path(self) -> str:
        """The YAML from the repository's root."""
        return f"accelerate_configs/{self.file}"

    @property
    def checkpoints(self) -> bool:
        """Whether it recomputes activations."""
        return self.plan.args.gradient_checkpointing

    @property
    def offloads(self) -> int:
        """0: nothing, 1: the optimizer, 2: parameters too."""
        if self.plan.offloads_parameters:
            return 2
        return int(self.plan.offloads_optimizer)

    @property
    def order(self) -> tuple[int, float, int, int]:
        """The sort key of ways: those that offload come last; then by cost."""
        return self.offloads, self.cost, PREFERRED.index(self.plan.engine), self.peak


def name_of(stem: str, plan: Plan) -> str:
    """Return the name of a YAML with the ranks of a plan that share each row, as `Way.name` has it.

    stem: the name of the file without its suffix.
    """
    return ", ".join(word for word in (stem, plan.mesh.describe("")) if word)


# ---- What can be run ----
@dataclass(frozen=True)
class Candidate:
    """A config and arguments that may be tried."""

    file: str
    weights: str
    args: RecipeArguments
    config: Config


def ways_on(launch: Launch, ranks: int, like: Way | None = None) -> list[Way]:
    """Return every way to run on a number of ranks that the recipe accepts, in order of cost.

    like: a way whose weights and checkpointing all ways must have. Raises UnplannableError with the
    most frequent reason if all are refused.
    """
    ways = []
    refused = []
    for candidate in candidates_on(launch, ranks, like):
        try:
            ways.append(way_of(launch, candidate, ranks))
        except UnplannableError as error:
            refused.append((str(error), error.code))
    if not ways:
        most_frequent, _ = Counter(refused).most_common(1)[0]
        raise UnplannableError(*most_frequent)
    return sorted(ways, key=lambda way: way.order)


def candidates_on(launch: Launch, ranks: int, like: Way | None) -> Iterator[Candidate]:
    """Yield every candidate on a number of ranks."""
    for path, config, sizes in launches_on(launch.args, ranks, launch.machines):
        if like is None:
            for candidate in candidates_under(launch, path, config):
                args = recipe.with_values(candidate.args, **sizes)
                yield replace(candidate, args=args)
        else:
            chosen = [name for name in CHOSEN if recipe.takes(launch.args, [name])]
            values = {name: getattr(like.plan.args, name) for name in chosen}
            args = recipe.with_values(launch.args, **values, **sizes)
            yield Candidate(path.name, like.weights, args, config)


def launches_on(
    args: RecipeArguments, ranks: int, machines: int
) -> Iterator[tuple[Path, Config, dict[str, int]]]:
    """Yield what is worth trying on a number of ranks: (file, config, sizes that are arguments).

    Experts are spread over groups of ranks if the recipe trains a mixture.
    """
    size = recipe.expert_ranks_of(args)
    if size == 1:
        for path, config in configs_on(ranks, machines):
            yield path, config, {}
    if not recipe.takes(args, ["ep_size"]):
        return
    for path in yaml_files.expert_files():
        for ep in expert_groups(ranks // machines, size):
            yield path, yaml_files.read(path), {"ep_size": ep}


def expert_groups(ranks: int, size: int) -> Iterator[int]:
    """Yield the sizes of groups that share experts in a machine: powers of two, or the given one.

    Tokens travel between the ranks of a group in each layer.
    """
    if size > 1:
        yield size
        return
    group = 2
    while group <= ranks:
        if ranks % group == 0:
            yield group
        group *= 2


def configs_on(ranks: int, machines: int) -> Iterator[tuple[Path, Config]]:
    """Yield the shipped configs that are worth trying on a number of ranks.

    Those under which ranks share rows are tried with each size of their mesh.
    """
    for path in yaml_files.shipped_files():
        config = yaml_files.read(path)
        if yaml_files.makes_sense_on(config, ranks, machines):
            yield path, config
    for path in yaml_files.mesh_files():
        config = yaml_files.read(path)
        for sizes in yaml_files.sizes_on(config, ranks, machines):
            yield path, yaml_files.with_sizes(config, sizes)


def candidates_under(launch: Launch, path: Path, config: Config) -> Iterator[Candidate]:
    """Yield every candidate under a config."""
    precision = launch.request.mixed_precision or config.get("mixed_precision", "no")
    checkpointing = [False, True]
    if launch.args.gradient_checkpointing:
        checkpointing = [True]
    for weights, values in kinds_of_weights(launch.args, launch.given, precision).items():
        for checkpoints in checkpointing:
            args = recipe.with_values(launch.args, **values, gradient_checkpointing=checkpoints)
            yield Candidate(path.name, weights, args, config)


def kinds_of_weights(
    args: RecipeArguments, given: set[str], mixed_precision: str
) -> dict[str, dict[str, Any]]:
    """Return {name: values of arguments} of full weights, and of adapters over each base.

    A frozen base is loaded in the precision that mixed precision computes in. Kinds that contradict
    a given argument are left out; if none remains, the weights are as given.
    """
    lora: dict[str, Any] = {"use_peft": True}
    if mixed_precision in DTYPES and "dtype" not in given:
        lora["dtype"] = DTYPES[mixed_precision]
    kinds = {"full": {}, "LoRA": lora}
    if recipe.takes(args, ["lora_target_parameters"]):
        lora["lora_target_parameters"] = []  # adapters of experts are not planned
    if recipe.takes(args, DECIDES_WEIGHTS):
        four_bit = lora | {"load_in_4bit": True}
        kind = args.bnb_4bit_quant_type
        kinds |= {
            "LoRA, int8": lora | {"load_in_8bit": True},
            f"LoRA, {kind}": four_bit,
            f"LoRA, {kind} dq": four_bit | {"bnb_4bit_use_double_quant": True},
        }
    fixed = given & DECIDES_WEIGHTS
    possible = {name: values for name, values in kinds.items() if fixed <= values.keys()}
    return possible or {"as given": {}}


def way_of(launch: Launch, candidate: Candidate, ranks: int) -> Way:
    """Return a candidate as a way, with bytes and cost.

    Raises UnplannableError if it cannot run.
    """
    request = launch.request
    plan = plan_of(
        candidate.args, candidate.config, ranks, request.num_machines, request.mixed_precision
    )
    return way_under(launch, candidate.file, candidate.weights, plan)


def way_under(launch: Launch, file: str, weights: str, plan: Plan) -> Way:
    """Return a way with its bytes on device and host, its cost and the reasons for it."""
    batch = batch_of(plan.args, launch.request)
    strategy, decoder = strategy_for(plan, launch.config, launch.build)
    device, host = run_step(plan, strategy, decoder, batch)
    device = with_constants(device, plan.ranks)
    device = {category: size for category, size in device.items() if size}
    tokens = batch.sequences * batch.length
    cost, reasons = cost_of(plan, strategy, decoder, launch.parameters, tokens)
    return Way(file, weights, plan, device, host, cost, reasons)


def with_arguments(launch: Launch, way: Way, **values: Any) -> Way:
    """Return the way under other arguments of the recipe."""
    return way_under(launch, way.file, way.weights, changed_plan(way, **values))


def peak_with(launch: Launch, way: Way, **values: Any) -> int:
    """Return the bytes at the peak under other arguments of the recipe."""
    plan = changed_plan(way, **values)
    batch = batch_of(plan.args, launch.request)
    device, _ = closed_form(plan, launch.config, batch, launch.build)
    return sum(with_constants(device, plan.ranks).values())


def changed_plan(way: Way, **values: Any) -> Plan:
    """Return the plan of a way under other arguments of the recipe."""
    return replace(way.plan, args=recipe.with_values(way.plan.args, **values))


def with_usual_evaluation(launch: Launch, way: Way) -> Way:
    """Return the way with the recipe's own batch of evaluation, if that does not raise its peak."""
    if EVALUATION in launch.given:
        return way
    usual = {EVALUATION: launch.defaults[EVALUATION]}
    if peak_with(launch, way, **usual) > way.peak:
        return way
    return replace(way, plan=changed_plan(way, **usual))


# ---- Those that fit ----
def fitting_among(launch: Launch, ways: Sequence[Way]) -> list[Way]:
    """Return the ways that fit the card, numbered from 1."""
    fitting = [way for way in ways if way.peak <= launch.card]
    return [replace(way, number=number) for number, way in enumerate(fitting, 1)]


def with_limits(launch: Launch, way: Way) -> Way:
    """Return a way with its largest batch that fits at its length, and the other way round.

    Evaluation then takes one row at a time if more would not fit.
    """
    sequences = way.plan.args.per_device_train_batch_size
    length = way.plan.args.max_length
    batch = largest_that_fits(
        lambda number: peak_with(launch, way, per_device_train_batch_size=number),
        launch.card,
        low=sequences,
        at_low=way.peak,
        most=MOST_SEQUENCES,
        guess=2 * sequences,
    )
    length = largest_length(
        launch,
        way,
        most=positions_of(launch.config),
        guess=length * batch // sequences,
    )
    limited = replace(way, largest_batch=batch, largest_length=length)
    return with_usual_evaluation(launch, limited)


def largest_length(launch: Launch, way: Way, most: int, guess: int) -> int:
    """Return the largest --max_length, up to `most`, at which a way fits."""
    return largest_that_fits(
        lambda length: peak_with(launch, way, max_length=length),
        launch.card,
        low=way.plan.args.max_length,
        at_low=way.peak,
        most=most,
        guess=guess,
    )


def positions_of(config: PretrainedConfig) -> int:
    """Return how many tokens the model has positions for."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or MOST_TOKENS
