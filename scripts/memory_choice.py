"""Which runs fit a card, the fastest first: scripts/plan_memory.py without --config_file.

Tried is every YAML of accelerate_configs/ that the number of GPUs allows, with full weights, LoRA, and LoRA over an
int8, nf4 and doubly quantized nf4 base, with and without --gradient_checkpointing. What the command line says stays,
and what the recipe refuses is left out.

The order is a ranking of what a step costs, never a promised time. Its unit is the forward pass:

- compute: forward 1, gradients of activations 1, gradients of weights 1 (adapters: 0), --gradient_checkpointing 1
  more. Published LoRA is 1.47 times as fast as full weights (NeMo, Llama 2 7B): 3 to 2 is 1.5.
- a quantized base: all of that times QUANTIZED.
- communication: TOKENS_A_TRIP / tokens for each time that as many numbers as the model has parameters cross the wire.
  All-reduced gradients count twice, reduced or gathered ones once, and gathered parameters once a gather.
- what offloads comes last, as it is bound by host and bus: first the optimizer alone, then parameters too.
"""

import contextlib
import copy
import gc
import math
import shlex
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import memory_plan
from components.config_files import load
from components.config_reading import as_read
from components.config_strategy import strategy_of
from memory_cards import CARDS, GIB, constants_of, pieces_on
from memory_plan import Plan, closed_form, plan_of, strategy_for
from model_shapes import Unplannable
from plan_memory import batch_of, write_json

CONFIGS = Path(__file__).resolve().parent.parent / "accelerate_configs"
# Step time against LoRA over bf16. nf4: the middle of what is published: torchtune 1.02 and 1.28, Lightning AI 1.39,
# litgpt 1.56 and 2.0 (7B and 13B); double quantization: litgpt, 3.83 to 3.68 minutes. int8: "over twice as slow"
# (PhoebusSi/Alpaca-CoT#26); slower than 4-bit (bitsandbytes#490)
QUANTIZED = {"": 1.0, "4-bit": 1.39, "4-bit twice": 1.45, "int8": 2.0}
TOKENS_A_TRIP = (
    2000  # sent forward while all parameters cross the wire once, at 400 TFLOP/s to 200 GB/s
)
PREFERRED = ("single", "ddp", "fsdp2", "zero", "fsdp1")  # engines of equal cost, in this order
SHOWN = 12  # rows in a terminal; and the first of each kind of weights
LINES_AT_MOST, LENGTH_AT_MOST = (
    2**16,
    2**20,
)  # of the largest batch; of the length, where the model says nothing
LEAST_LENGTH = 64  # that is worth a proposal
RANKS_AT_MOST = 1024
SLOW_IN_BF16 = ("t4", "v100", "v100-32gb")  # older than Ampere: not proposed for it
LEGEND = """
ckpt: --gradient_checkpointing. GiB: the peak of a GPU. batch, length: the largest that fit, the other as given.
cost: of a step, next to the first row, +: and what host and bus take; it orders the rows and is no measured time.
Number 1:
"""
DECIDES_WEIGHTS = {"use_peft", "load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"}
CHOSEN = (
    *DECIDES_WEIGHTS,
    "dtype",
    "gradient_checkpointing",
)  # what a row may add to the arguments
NOT_ENOUGH = f"neither a smaller batch, nor shorter rows, nor {RANKS_AT_MOST} GPUs, nor a known card is enough alone."


@dataclass
class Launch:
    """What all rows have in common: plan_memory's options, the defaults of the recipe's arguments and the names of
    those that the user gave, the model's config and parameters, and the card in bytes."""

    options: object
    defaults: dict
    given: set
    model: object
    card: int
    parameters: int = 0

    @property
    def machines(self):
        return self.options.num_machines or 1

    @property
    def ranks(self):
        return self.machines if self.options.num_processes is None else self.options.num_processes


@dataclass
class Row:
    """One way to run: the YAML's name, what is trained on which base, the plan; its bytes and its cost."""

    file: str
    weights: str
    plan: Plan
    peak: int = 0
    device: dict = field(default_factory=dict)
    host: dict = field(default_factory=dict)
    cost: float = 0.0
    reasons: list = field(default_factory=list)
    most_lines: int | None = None
    most_tokens: int | None = None

    @property
    def offloads(self):
        """0: nothing, 1: the optimizer, 2: parameters too."""
        return 2 if self.plan.offloads_parameters else int(self.plan.offloads_optimizer)

    @property
    def order(self):
        return self.offloads, self.cost, PREFERRED.index(self.plan.engine), self.peak


# ---- What can be run ----
def config_files():
    """The YAMLs of accelerate_configs/ by name; of a file and the link to it only the link."""
    found = sorted(CONFIGS.glob("*.yaml"), key=lambda path: (path.is_symlink(), path.name))
    return sorted({path.resolve(): path for path in found}.values())


def read_yaml(path):
    """The config as accelerate reads it."""
    try:
        file = load(path)
    except ValueError as error:
        raise Unplannable(str(error)) from None
    return as_read(file.content, file.deepspeed and file.deepspeed.content)


def allows(config, ranks, machines):
    """Whether a config makes sense for so many ranks: alone nothing is split, so that only offload is another way
    than one plain process; FSDP1's groups are machines of several GPUs."""
    facts = strategy_of(config)
    if ranks == 1:
        return facts["engine"] == "single" or bool(facts["offload"])
    grouped = str(facts["strategy"]).startswith("HYBRID")
    return facts["engine"] != "single" and (not grouped or 1 < ranks // machines < ranks)


def kinds_of_weights(args, given, mixed_precision):
    """{name: arguments} of full weights and adapters over each base, as far as `given` names leave a choice. A frozen
    base is loaded in what mixed precision computes in."""
    low = {"bf16": "bfloat16", "fp16": "float16"}.get(mixed_precision)
    lora = {"use_peft": True} | ({"dtype": low} if low and "dtype" not in given else {})
    four = lora | {"load_in_4bit": True}
    kinds = {
        "full": {},
        "LoRA": lora,
        "LoRA, int8": lora | {"load_in_8bit": True},
        f"LoRA, {args.bnb_4bit_quant_type}": four,
        f"LoRA, {args.bnb_4bit_quant_type} dq": four | {"bnb_4bit_use_double_quant": True},
    }
    fixed = given & DECIDES_WEIGHTS
    return {name: flags for name, flags in kinds.items() if fixed <= flags.keys()} or {
        "as given": {}
    }


def changed(args, **values):
    """A copy of the arguments with other values."""
    args = copy.copy(args)
    vars(args).update(values)
    return args


def ways(launch, recipe_args, ranks, same_weights=None):
    """Yield (file, weights, arguments, config) of everything that may be tried on `ranks` ranks; with the weights and
    the checkpointing of a row, if one is given."""
    for path in config_files():
        config = read_yaml(path)
        if not allows(config, ranks, launch.machines):
            continue
        if same_weights:
            flags = {name: getattr(same_weights.plan.args, name) for name in CHOSEN}
            yield path.name, same_weights.weights, changed(recipe_args, **flags), config
            continue
        precision = launch.options.mixed_precision or config["mixed_precision"]
        for weights, flags in kinds_of_weights(recipe_args, launch.given, precision).items():
            for checkpoints in [True] if recipe_args.gradient_checkpointing else [False, True]:
                yield (
                    path.name,
                    weights,
                    changed(recipe_args, **flags, gradient_checkpointing=checkpoints),
                    config,
                )


def rows_of(launch, recipe_args, ranks, same_weights=None):
    """Every row that the recipe does not refuse, in order of cost.

    Raises Unplannable, with the reason most frequent, where it refuses all."""
    rows, refused = [], []
    for file, weights, args, config in ways(launch, recipe_args, ranks, same_weights):
        try:
            plan = plan_of(
                args, config, ranks, launch.options.num_machines, launch.options.mixed_precision
            )
            rows.append(measured(launch, Row(file, weights, plan)))
        except Unplannable as error:
            refused.append((str(error), error.code))
    if not rows:
        raise Unplannable(*Counter(refused).most_common(1)[0][0])
    return sorted(rows, key=lambda row: row.order)


def measured(launch, row):
    """The row with its bytes on device and host, its cost and the reasons for it."""
    batch = batch_of(row.plan.args, launch.options)
    device, row.host = closed_form(row.plan, launch.model, batch)
    row.device = {
        name: size for name, size in (device | constants_of(row.plan, device)).items() if size
    }
    row.peak = sum(row.device.values())
    row.cost, row.reasons = cost(launch, row.plan, batch.lines * batch.tokens)
    return row


# ---- What it costs ----
def compute(args):
    """(forward passes' worth of a micro-batch, reasons)."""
    units, kind = (
        2 if args.use_peft else 3,
        "int8" if args.load_in_8bit else "4-bit" if args.load_in_4bit else "",
    )
    if kind == "4-bit" and args.bnb_4bit_use_double_quant:
        kind = "4-bit twice"
    reasons = (["recomputes"] if args.gradient_checkpointing else []) + (
        ["dequantizes"] if kind else []
    )
    return (units + args.gradient_checkpointing) * QUANTIZED[kind], reasons


def travels(plan, every, trained):
    """(numbers that a rank sends for a micro-batch, in words why), for `every` number of the model as it is stored
    and those that train. What is reduced once a step counts by the step's micro-batches."""
    once = trained / plan.args.gradient_accumulation_steps
    if plan.ranks == 1:
        return 0, "one process: nothing travels"
    if plan.engine == "zero" and plan.stage == 2:
        return trained + once, "whole parameters: gradients, updates travel"
    if plan.engine == "zero" and plan.stage == 1:
        return 2 * once, "whole parameters: gradients, updates travel"
    if plan.engine == "ddp" or plan.engine == "zero" and plan.stage == 0 or plan.shards == 1:
        return 2 * once, "whole replicas: only gradients travel"
    between = 2 * trained / plan.shards if plan.shards < plan.ranks else 0
    place = " in groups" if between else ""
    if plan.reshards:
        return 2 * every + trained + between, f"gathers parameters twice{place}"
    return every + trained + between, f"gathers parameters once{place}"


def cost(launch, plan, tokens):
    """(forward passes' worth of a micro-batch, reasons in the order of their weight)."""
    weights = strategy_for(plan, launch.model)[0].weights
    sent, way = travels(
        plan, *(sum(w.numel for w in weights if w.trains or every) for every in (True, False))
    )
    units, reasons = compute(plan.args)
    place = ["optimizer on the host"] if plan.offloads_optimizer else []
    if plan.offloads_parameters:
        place = ["state on the host"]
    return units + TOKENS_A_TRIP / tokens * sent / launch.parameters, [*place, way, *reasons]


# ---- What else fits ----
def peak_at(launch, row, **values):
    """Bytes at the peak if the recipe's arguments had other values."""
    plan = copy.copy(row.plan)
    plan.args = changed(row.plan.args, **values)
    device = closed_form(plan, launch.model, batch_of(plan.args, launch.options))[0]
    return sum((device | constants_of(plan, device)).values())


def largest(peak, card, low, at_low, most, guess):
    """The largest whole number from `low`, of which at_low bytes fit, to `most` with peak(number) <= card, for a peak
    that never falls. It is nearly a line, so that a few guesses along it do; where it bends, every other one halves
    what is left, in the logarithm."""
    high, at_high, slope, halves = most + 1, None, 0.0, True
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        size = peak(guess)
        if size <= card:
            slope, low, at_low = (size - at_low) / (guess - low), guess, size
        else:
            high, at_high = guess, size
        if at_high is None:
            guess = low + int((card - at_low) / slope) if slope else 2 * low
            continue
        halves = not halves
        along = low + int((card - at_low) * (high - low) / (at_high - at_low))
        guess = math.isqrt(low * high) if halves else along
    return low


def positions_of(model):
    """Tokens that the model has positions for."""
    return getattr(model.get_text_config(), "max_position_embeddings", None) or LENGTH_AT_MOST


def longest(launch, row, most, guess):
    """The largest --max_length to `most` of a row that fits."""
    return largest(
        lambda length: peak_at(launch, row, max_length=length),
        launch.card,
        row.plan.args.max_length,
        row.peak,
        most,
        guess,
    )


def with_limits(launch, row):
    """The row, which fits, with the largest batch at its length and the largest length at its batch."""
    lines, length = row.plan.args.per_device_train_batch_size, row.plan.args.max_length
    row.most_lines = largest(
        lambda lines: peak_at(launch, row, per_device_train_batch_size=lines),
        launch.card,
        lines,
        row.peak,
        LINES_AT_MOST,
        2 * lines,
    )
    row.most_tokens = longest(
        launch, row, positions_of(launch.model), length * row.most_lines // lines
    )
    return row


# ---- What to change when nothing fits ----
def row_with(launch, row, **values):
    """The row under other arguments of the recipe."""
    plan = copy.copy(row.plan)
    plan.args = changed(row.plan.args, **values)
    return measured(launch, Row(row.file, row.weights, plan))


def leanest(rows):
    """Of each file the row with the lowest peak: what fits of the file fits of these."""
    return list({row.file: row for row in sorted(rows, key=lambda row: -row.peak)}.values())


def cheapest_with(launch, rows, **values):
    """The first of the rows that fits under other arguments of the recipe, or None."""
    if any(peak_at(launch, row, **values) <= launch.card for row in leanest(rows)):
        return next(row for row in rows if peak_at(launch, row, **values) <= launch.card)
    return None


def smaller_batch(launch, rows):
    """The cheapest row of those that fit with one line, with as many lines as fit of those that divide the given
    number, so that a step keeps its rows; or None."""
    args = rows[0].plan.args
    lines, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    parts = [
        {"per_device_train_batch_size": n, "gradient_accumulation_steps": steps * lines // n}
        for n in range(lines - 1, 0, -1)
        if lines % n == 0
    ]
    row = cheapest_with(launch, rows, **parts[-1]) if parts else None
    if row is None:
        return None
    return row_with(
        launch, row, **next(part for part in parts if peak_at(launch, row, **part) <= launch.card)
    )


def shorter_rows(launch, rows):
    """The cheapest row of those that fit once --max_length is halved so often that one does, as long as fits; or
    None."""
    given = rows[0].plan.args.max_length
    length = given // 2
    while length >= LEAST_LENGTH:
        if row := cheapest_with(launch, rows, max_length=length):
            row = row_with(launch, row, max_length=length)
            return row_with(
                launch, row, max_length=longest(launch, row, given - 1, length + length // 2)
            )
        length //= 2
    return None


def more_ranks(launch, recipe_args, closest, offload):
    """The cheapest row on the smallest number of GPUs on which the closest's weights fit, doubling; or None. offload:
    whether rows that offload count."""
    doubled = [
        launch.ranks * 2**power
        for power in range(1, 11)
        if launch.ranks * 2**power <= RANKS_AT_MOST
    ]

    def fit(ranks, same_weights=None):
        with contextlib.suppress(Unplannable):
            rows = rows_of(launch, recipe_args, ranks, same_weights)
            return [
                row for row in rows if row.peak <= launch.card and (offload or not row.offloads)
            ]
        return []

    if not doubled or not fit(doubled[-1], closest):
        return None
    return fit(next(ranks for ranks in doubled if fit(ranks, closest)))[0]


def changes(launch, recipe_args, rows):
    """(the row that is closest to fitting, [{change, peak, command}] that each alone let one fit, and which is the
    cheapest then). rows: all, none of which fits."""
    found, closest = [], min(rows, key=lambda row: row.peak)
    if row := smaller_batch(launch, rows):
        args = row.plan.args
        flags = f"--per_device_train_batch_size {args.per_device_train_batch_size}"
        flags += f" --gradient_accumulation_steps {args.gradient_accumulation_steps}"
        found.append((f"a smaller batch: {flags}", row))
    if row := shorter_rows(launch, rows):
        found.append((f"shorter rows: --max_length {row.plan.args.max_length}", row))
    if row := more_ranks(launch, recipe_args, closest, any(row.offloads for row in rows)):
        found.append((f"more GPUs: {row.plan.ranks}", row))
    unwanted = SLOW_IN_BF16 if closest.plan.mixed_precision == "bf16" else ()
    sizes = {name: int(size * GIB) for name, size in CARDS.items() if name not in unwanted}
    for size, name in sorted((size, name) for name, size in sizes.items() if size >= closest.peak):
        values = {} if "max_logits_mib" in launch.given else {"max_logits_mib": pieces_on(size)}
        row = next((row for row in rows if peak_at(launch, row, **values) <= size), None)
        if row:
            found.append(
                (f"another card: {name}, of {size / GIB:.1f} GiB", row_with(launch, row, **values))
            )
            break
    return closest, [
        {"change": words, "config_file": f"accelerate_configs/{row.file}", "peak": row.peak}
        | {"weights": row.weights, "command": command(launch, row)}
        for words, row in found
    ]


# ---- What is said ----
def command(launch, row):
    """The words of the launch: what the user gave and what the row adds."""
    options, args = launch.options, row.plan.args
    words = ["accelerate", "launch", "--config_file", f"accelerate_configs/{row.file}"]
    words += ["--num_processes", str(row.plan.ranks)]
    words += ["--num_machines", str(options.num_machines)] if launch.machines > 1 else []
    words += ["--mixed_precision", options.mixed_precision] if options.mixed_precision else []
    path = Path(args.model_name_or_path)
    model = (
        str(path.parent)
        if path.name == "config.json" and path.is_file()
        else args.model_name_or_path
    )
    words += ["recipes/llama.py", "--model_name_or_path", model]
    for name, value in vars(args).items():
        if name == "model_name_or_path" or value is None or value == launch.defaults[name]:
            continue
        if (
            name == "max_logits_mib" and name not in launch.given
        ):  # the recipe takes as much by itself, on this card
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        words += [f"--{name}", *map(str, values)]
    return shlex.join(words)


def folded(text, width=112):
    """A command on lines of at most so many characters, where its flags allow it."""
    parts = []
    for word in map(shlex.quote, shlex.split(text)):
        parts += [word] if word.startswith("--") or not parts else [f"{parts.pop()} {word}"]
    lines = [parts[0]]
    for part in parts[1:]:
        fits = len(lines[-1]) + 1 + len(part) <= width
        lines += [f"{lines.pop()} {part}"] if fits else [part]
    return " \\\n    ".join(lines)


def as_object(launch, row, number):
    """A row as written to JSON: bytes of a GPU, and of the host for each rank."""
    return {
        "number": number,
        "config_file": f"accelerate_configs/{row.file}",
        "name": row.plan.name,
        "weights": row.weights,
        "gradient_checkpointing": row.plan.args.gradient_checkpointing,
        "peak": row.peak,
        "device": row.device,
        "host": row.host,
        "cost": row.cost,
        "reasons": row.reasons,
        "largest_per_device_train_batch_size": row.most_lines,
        "largest_max_length": row.most_tokens,
        "command": command(launch, row),
    }


def shown_rows(rows):
    """(number, row) of the first rows, and of the first of each kind of weights."""
    firsts = {}
    for number, row in enumerate(rows, 1):
        firsts.setdefault(row.weights, number)
    return [(n, row) for n, row in enumerate(rows, 1) if n <= SHOWN or n in firsts.values()]


def table(numbered, cheapest, machines):
    """The rows as aligned text of at most 120 characters a line."""
    lines = [("#", "config", "weights", "ckpt", "GiB", "batch", "length", "cost", "why")]
    for number, row in numbered:
        host = sum(row.host.values()) * row.plan.ranks / machines
        lines.append(
            (
                str(number),
                row.file.removesuffix(".yaml"),
                row.weights,
                "yes" if row.plan.args.gradient_checkpointing else "",
                f"{row.peak / GIB:.1f}",
                str(row.most_lines),
                str(row.most_tokens),
                f"{row.cost / cheapest:.2f}{'+' * (row.offloads > 0)}",
                row.reasons[0] + f": {host / GIB:.1f} GiB a machine" * bool(host),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip("><<<>>>><", widths, strict=True))
    return "\n".join(form.format(*line).rstrip() for line in lines)


def say_what_fits(launch, rows, fitting, numbered):
    """The table, what does not fit, and the commands of the first row and of the first with full weights."""
    left = len(fitting) - len(numbered)
    print(table(numbered, fitting[0].cost, launch.machines))
    if left:
        print(f"... and {left} more: --json -")
    for weights in dict.fromkeys(row.weights for row in rows):
        closest = min((row for row in rows if row.weights == weights), key=lambda row: row.peak)
        if closest.peak > launch.card:
            over = (closest.peak - launch.card) / GIB
            print(f"{weights}: does not fit, by {over:.1f} GiB at the least ({closest.file})")
    print(LEGEND)
    print(folded(command(launch, fitting[0])))
    number, full = next(((n, row) for n, row in numbered if row.weights == "full"), (1, None))
    if number > 1:
        print(f"\nNumber {number}, the first with full weights:\n\n{folded(command(launch, full))}")
    if launch.machines > 1:
        print("\non each machine, with its --machine_rank and the --main_process_ip of the first")


def say_what_to_change(launch, closest, suggested):
    """By how much the closest misses, and what would make it fit."""
    checkpoints = ", with --gradient_checkpointing" * closest.plan.args.gradient_checkpointing
    enough = "each of these alone is enough:" if suggested else NOT_ENOUGH
    over = (closest.peak - launch.card) / GIB
    print(f"The closest is {closest.weights} under {closest.file}{checkpoints}.")
    print(f"It takes {closest.peak / GIB:.1f} GiB, {over:.1f} GiB too many; {enough}")
    for one in suggested:
        print(
            f"\n{one['change']} ({one['weights']}, {one['peak'] / GIB:.1f} GiB)\n{folded(one['command'])}"
        )


@contextlib.contextmanager
def models_built_once():
    """Inside of it a model on the meta device is built once for each kind of weights, which is most of what a plan
    takes; its shapes depend on no more than these arguments, and nothing changes it."""
    built, build = {}, memory_plan.build

    def once(args, config):
        quantized = args.load_in_4bit, args.load_in_8bit, args.bnb_4bit_use_double_quant
        key = id(config), args.dtype, args.attn_implementation, *quantized
        if key not in built:
            built[key] = build(args, config)
        return built[key]

    with mock.patch.object(memory_plan, "build", once):
        yield


def launch_of(args, recipe_args, model, card):
    """The Launch of plan_memory's and the recipe's arguments."""
    import llama

    with mock.patch.object(sys, "argv", ["llama.py"]):
        defaults = vars(llama.parse_args())
    given = {word[2:].partition("=")[0] for word in args.words if word.startswith("--")}
    launch = Launch(args, defaults, given, model, card)
    plain = changed(recipe_args, use_peft=False, load_in_4bit=False, load_in_8bit=False)
    launch.parameters = sum(weight.numel for weight in strategy_for(Plan(plain), model)[0].weights)
    return launch


def report(args, recipe_args, model, batch, card):
    """Print, or write to args.json, every way that fits; and what to change where none does, or none without offload.
    Return the exit code.

    args: plan_memory's; recipe_args: the recipe's; batch: memory_plan.Batch; card: bytes. Raises Unplannable."""
    if args.simulate:
        raise Unplannable("--simulate traces one plan: add a --config_file")
    gc.freeze()  # torch's and transformers' objects stay: no need to look at them at each collection
    closest, suggested = None, []
    with models_built_once():
        launch = launch_of(args, recipe_args, model, card)
        rows = rows_of(launch, recipe_args, launch.ranks)
        fitting = [row for row in rows if row.peak <= card]
        numbered = shown_rows(fitting)
        for row in fitting if args.json else [row for _, row in numbered]:
            with_limits(launch, row)
        others = [row for row in rows if not (fitting and row.offloads)]
        if others and (not fitting or fitting[0].offloads):  # which come last
            closest, suggested = changes(launch, recipe_args, others)
    found = {
        "title": f"{recipe_args.model_name_or_path} on {launch.ranks} x {args.gpu}, {card / GIB:.1f} GiB each, "
        f"{batch.lines} x {batch.tokens} tokens a rank: {len(fitting)} of {len(rows)} ways fit",
        "card": card,
        "rows": [as_object(launch, row, number) for number, row in enumerate(fitting, 1)],
        "closest": closest and as_object(launch, closest, None),
        "changes": suggested,
    }
    write_json(args.json, found)
    if args.json != "-":
        print(f"{found['title']}{', the fastest first' * bool(fitting)}\n")
        if fitting:
            say_what_fits(launch, rows, fitting, numbered)
        if closest:
            print("\nWithout offload nothing fits. " * bool(fitting), end="")
            say_what_to_change(launch, closest, suggested)
    return 0 if fitting else 1
