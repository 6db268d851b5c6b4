"""What scripts/benchmark.py measured: which runs count, ratios between contestants, tables and a picture.

    python scripts/benchmark_tables.py                              # every cell of results/benchmark.json as a table
    python scripts/benchmark_tables.py --picture results/speed.png  # and the picture

A ratio is taken within a repeat, between processes that ran one after the other, and then the median of these
ratios: never the ratio of two means, which a slow minute of the machine would bend. Ranges are those of the repeats.
"""

import argparse
import json
import math
import statistics
from pathlib import Path

from proof.markdown import table
from usage import Parser

MOST_LOAD = 1.8  # load average: the run itself is 1, and a second core has to be free for the rest
CURVE = {
    "float32": 1e-5,
    "bfloat16": 1e-2,
}  # largest difference of a step's loss from the bare loop's, in nats
HELD_OUT = 0.02  # largest relative difference of the loss on held-out rows from the bare loop's
PEAK = {
    "H100": 989e12,
    "H200": 989e12,
}  # FLOP/s in dense bf16 (NVIDIA's data sheets; twice that with sparsity)
NAMES = {
    "floor": "bare PyTorch loop",
    "lean": "lean loop",
    "ours": "this recipe",
    "trainer": "Trainer",
    "trl": "SFTTrainer",
    "trl packed": "SFTTrainer",
}
TOOLS = ("lean", "ours", "trainer", "trl")


# ---- Which runs count ----


def judge(runs, kind, dtype="float32"):
    """The runs with `difference` from the bare loop of their repeat and `void`: why a run does not count, or "".

    kind and dtype: the cell's. The losses of the steps, with which it is decided, are left out of what is returned.
    """
    floors = {run["repeat"]: run for run in runs if run["contestant"] == "floor"}
    judged = []
    for run in runs:
        found, floor = (
            {name: value for name, value in run.items() if name != "losses"},
            floors.get(run["repeat"], {}),
        )
        difference, why = None, ""
        if "failed" in run:
            why = "failed"
        elif kind == "shipped":
            difference, why = held_out_gate(run, floor)
        elif kind == "growth":
            why = (
                ""
                if all(loss is not None and math.isfinite(loss) for loss in run["losses"])
                else "loss not finite"
            )
        else:
            difference, why = curve_gate(run, floor, CURVE[dtype])
        judged.append(
            found
            | {"difference": difference, "void": why or ("loaded" if run.get("loaded") else "")}
        )
    return judged


def curve_gate(run, floor, bound):
    """(largest difference of a step's loss from the floor's, why the run is void or "")."""
    ours, theirs = run["losses"], floor.get("losses") or []
    if len(ours) != len(theirs) or None in ours:
        return None, f"{len(ours)} losses, the bare loop has {len(theirs)}"
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    if not all(map(math.isfinite, differences)):  # max would pass over a NaN
        return None, "loss not finite"
    return max(differences), "" if max(
        differences
    ) <= bound else f"loss differs by {max(differences):.1e}"


def held_out_gate(run, floor):
    """(relative difference of the loss on held-out rows from the floor's, why the run is void or "")."""
    if "held_out_loss" not in floor:
        return None, "the bare loop failed"
    difference = abs(run["held_out_loss"] / floor["held_out_loss"] - 1)
    return (
        difference,
        "" if difference <= HELD_OUT else f"held-out loss differs by {difference:.1%}",
    )


# ---- Numbers of a cell ----


def values(cell, label, key):
    """A number of each run of a contestant that counts, by repeat; key: of a run, or memory.NAME."""
    found = {}
    for run in cell["runs"]:
        kind, _, name = key.rpartition(".")
        number = run.get("memory_mib", {}).get(name) if kind == "memory" else run.get(key)
        if run["contestant"] == label and not run["void"] and number is not None:
            found[run["repeat"]] = number
    return found


def paired(cell, label, other, key="seconds_per_step", of=lambda a, b: a / b):
    """`of` a number of `label` and of `other`, for each repeat in which both count."""
    ours, theirs = values(cell, label, key), values(cell, other, key)
    return [of(ours[repeat], theirs[repeat]) for repeat in sorted(ours.keys() & theirs.keys())]


def spread(numbers, form="{:.2f}"):
    """The median of some numbers and their range, as text; "" without numbers."""
    if not numbers:
        return ""
    middle, low, high = (
        form.format(number) for number in (statistics.median(numbers), min(numbers), max(numbers))
    )
    return middle if low == high else f"{middle} ({low} to {high})"


def name_of(cell, label):
    """How a contestant of a cell is called in a table."""
    return NAMES.get(label, label) + ", --packing" * cell["flags"][label].get("packing", False)


def labels_of(cell):
    return list(dict.fromkeys(run["contestant"] for run in cell["runs"]))


def reasons_of(cell, label):
    """Why runs of a contestant do not count: each reason once."""
    return list(
        dict.fromkeys(
            run["void"] for run in cell["runs"] if run["contestant"] == label and run["void"]
        )
    )


def matmul_weights(shape):
    """Weights of a Llama that multiply: the head among them, the embedding of the input not.

    shape: arguments of scripts/make_tiny.py llama.
    """
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner
    return shape["num_hidden_layers"] * layer + hidden * shape["vocab_size"]


def flops_per_token(shape, length, lora=False, causal=False):
    """Floating-point operations to train on one token of a row of `length`, recomputation not counted.

    6 a weight: 2 forward, 2 for the gradient of its input, 2 for its own, which a frozen base under adapters does not
    need (4). And 12 x layers x hidden x length for attention, as torchtitan and PaLM (arXiv 2204.02311, appendix B)
    count; half of that with causal=True, which leaves out what the mask hides. Adapters are left out, under 1 %.
    """
    attention = 12 * shape["num_hidden_layers"] * shape["hidden_size"] * length
    return (4 if lora else 6) * matmul_weights(shape) + attention // (2 if causal else 1)


# ---- Tables ----


def line_of(name, run):
    """One line on a run that has just ended."""
    if "failed" in run:
        return f"FAILED  {name}: {run['contestant']}: {run['failed']}"
    step = f"{run['seconds_per_step'] * 1e3:,.1f} ms a step, " if "seconds_per_step" in run else ""
    return (
        f"{run['repeat']:>6}  {name}: {run['contestant']}: {step}first after "
        f"{run['seconds_to_first_step']:.1f} s, load {run['load'][0]:.2f}"
    )


def whole_table(cell):
    """Everything about a cell as one Markdown table; empty columns left out."""
    loops = (
        () if cell["kind"] == "shipped" else ("floor", "lean")
    )  # there steps are not of equal work
    header = [
        "contestant",
        "runs",
        "ms a step",
        "x bare loop",
        "x lean loop",
        "ms over lean",
        "real tokens/s",
        "ours is faster by",
        "s to the first step",
        "MiB",
        "MiB allocated",
        "MiB active",
        "MiB reserved",
        "TFLOP/s",
        "MFU",
        "MFU, causal",
        "difference",
        "void",
    ]
    lines = []
    for label in labels_of(cell):
        counted = values(cell, label, "seconds_to_first_step")
        steps, rate = (
            values(cell, label, "seconds_per_step"),
            values(cell, label, "tokens_per_second"),
        )
        lines.append(
            [
                label,
                str(len(counted)),
                spread([s * 1e3 for s in steps.values()], "{:,.1f}"),
                *(
                    spread(paired(cell, label, loop), "{:.3f}") if loops else ""
                    for loop in ("floor", "lean")
                ),
                spread(paired(cell, label, "lean", of=lambda a, b: 1e3 * (a - b)), "{:+.2f}"),
                spread(list(rate.values()), "{:,.0f}"),
                "" if loops else spread(paired(cell, "ours", label, "tokens_per_second")),
                spread(list(counted.values())),
                *(
                    spread(list(values(cell, label, f"memory.{name}").values()), "{:,.0f}")
                    for name in ("resident", "allocated", "active", "reserved")
                ),
                *utilisation(cell, label, list(rate.values())),
                spread([d for d in values(cell, label, "difference").values()], "{:.1e}"),
                "; ".join(reasons_of(cell, label)),
            ]
        )
    kept = [i for i in range(len(header)) if i < 2 or any(line[i] for line in lines)]
    return table([header[i] for i in kept], [[line[i] for i in kept] for line in lines])


def utilisation(cell, label, rate):
    """TFLOP/s and the share of the device's peak in both conventions, as text; only where all rows are full."""
    flags = cell["flags"][label]
    if cell["rows"] != "long" or not rate:
        return ["", "", ""]
    model = cell["models"].get(label) or next(iter(cell["models"].values()))
    whole, causal = (
        flops_per_token(model, flags["max_length"], flags.get("use_peft", False), half)
        * statistics.median(rate)
        for half in (False, True)
    )
    peak = next((peak for name, peak in PEAK.items() if name in cell["device"]), None)
    return [
        f"{whole / 1e12:.3g}",
        *([f"{whole / peak:.1%}", f"{causal / peak:.1%}"] if peak else ["", ""]),
    ]


def named(results, name):
    """A cell of --json by name, or None."""
    return next((cell for cell in results["cells"] if cell["cell"] == name), None)


def matched_table(results):
    """README: what each tool takes for the batches of a bare loop."""
    lines = []
    for name, text in (
        ("matched, medium", "36M parameters, 2 rows"),
        ("matched, medium, LoRA", "the same, LoRA"),
        ("matched, medium, accumulation", "the same, 2 x 2 rows accumulated"),
    ):
        if cell := named(results, name):
            lines.append(
                [
                    f"{text}: step time, x bare loop",
                    *(spread(paired(cell, label, "floor"), "{:.3f}") or "void" for label in TOOLS),
                ]
            )
    if cell := named(results, "matched, near zero"):
        lines.append(
            [
                "next to no compute: ms a step over the bare loop",
                *(
                    spread(paired(cell, label, "floor", of=lambda a, b: 1e3 * (a - b)), "{:.2f}")
                    or "void"
                    for label in TOOLS
                ),
            ]
        )
    for cache in ("cold", "warm"):
        if cell := named(results, f"start, {cache} cache"):
            seconds = [
                list(values(cell, label, "seconds_to_first_step").values()) for label in TOOLS
            ]
            lines.append(
                [
                    f"start to the end of the first step, {cache} data cache: s",
                    *(spread(found, "{:.1f}") for found in seconds),
                ]
            )
    return table(["same batches, same losses", *(NAMES[label] for label in TOOLS)], lines)


def shipped_table(results):
    """README: the tools with their own defaults."""
    cell = named(results, "shipped, medium")
    lines = []
    for label in labels_of(cell) if cell else []:
        rate = list(values(cell, label, "tokens_per_second").values())
        ratio = paired(cell, "ours", label, "tokens_per_second") if label != "ours" else []
        memory = list(values(cell, label, "memory.resident").values())
        loss = list(values(cell, label, "held_out_loss").values())
        speed = spread(rate, "{:,.0f}") or f"void: {'; '.join(reasons_of(cell, label))}"
        lines.append(
            [
                name_of(cell, label),
                speed,
                spread(ratio),
                f"{statistics.median(memory):,.0f}" if memory else "",
                spread(loss, "{:.3f}"),
            ]
        )
    header = ["as shipped", "real tokens/s", "ours is faster by", "peak MiB", "held-out loss"]
    return table(header, lines) if lines else ""


def block(results):
    """README's tables of speed."""
    if not results:
        return "Not measured yet."
    return "\n\n".join(part for part in (matched_table(results), shipped_table(results)) if part)


def details(results):
    """The section of results/README.md: every cell with how to measure it again."""
    parts = []
    for cell in results["cells"]:
        versions = ", ".join(f"{name} {version}" for name, version in cell["versions"].items())
        commands = "\n".join(f"# {label}\n{command}" for label, command in cell["commands"].items())
        facts = f"{cell['date']}, commit {cell['commit']}, {cell['device']}, {versions}"
        parts += [
            f"## {cell['cell']}",
            f"{facts}; {cell['warmup']} steps of warm-up.",
            whole_table(cell),
            f"```\n{commands}\n```",
        ]
    return "\n\n".join(parts)


def as_text(cells):
    """The cells as JSON with one line a run, so that a change can be read."""
    parts = []
    for cell in cells:
        facts = json.dumps({name: value for name, value in cell.items() if name != "runs"})
        runs = ",\n  ".join(json.dumps(run) for run in cell["runs"])
        parts.append(f'{facts[:-1]}, "runs": [\n  {runs}]}}')
    return '{"cells": [\n' + ",\n".join(parts) + "\n]}\n"


# ---- The picture ----


def draw(results, path):
    """Bars of real tokens a second as shipped, and our speed against length, batch, ranks and size of the model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1.25])
    draw_bars(left.subplots(), named(results, "shipped, medium"))
    growth = {
        "length": "tokens a row",
        "batch": "rows a step",
        "ranks": "CPU ranks",
        "model": "parameters",
    }
    for axes, (name, label) in zip(right.subplots(2, 2).flat, growth.items(), strict=True):
        draw_growth(axes, named(results, f"growth, {name}"), label)
    right.supylabel("real tokens/s", fontsize="medium")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def tidy(axes):
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)


def draw_bars(axes, cell):
    """Median real tokens a second of each contestant, with the range of the repeats."""
    labels = labels_of(cell) if cell else []
    rates = {label: list(values(cell, label, "tokens_per_second").values()) for label in labels}
    rates = {label: found for label, found in rates.items() if found}
    middles = [statistics.median(found) for found in rates.values()]
    ranges = [
        [m - min(f) for m, f in zip(middles, rates.values(), strict=True)],
        [max(f) - m for m, f in zip(middles, rates.values(), strict=True)],
    ]
    colors = ["C0" if label == "ours" else "0.7" for label in rates]
    bars = axes.barh(
        [name_of(cell, label) for label in rates],
        middles,
        color=colors,
        xerr=ranges if middles else None,
        error_kw={"elinewidth": 1, "capsize": 2},
    )
    axes.bar_label(
        bars,
        [f"{middle:,.0f}" for middle in middles],
        label_type="center",
        color="white",
        weight="bold",
    )
    axes.invert_yaxis()
    axes.set_xlabel("real tokens/s, as shipped, one CPU thread")
    tidy(axes)


def draw_growth(axes, cell, label):
    """Median real tokens a second against one quantity, with the range of the repeats."""
    axes.set_xlabel(label)
    tidy(axes)
    labels = labels_of(cell) if cell else []
    points = [(one, list(values(cell, one, "tokens_per_second").values())) for one in labels]
    points = [(one, found) for one, found in points if found]
    if not points:
        return
    middles = [statistics.median(found) for _, found in points]
    low, high = ([pick(found) for _, found in points] for pick in (min, max))
    places = range(len(points))
    axes.fill_between(places, low, high, alpha=0.2)
    axes.plot(places, middles, "o-")
    axes.set_xticks(places, ["36M" if one == "medium" else one for one, _ in points])
    if max(high) > 10 * min(low):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, max(high) * 1.15)


def parse_args():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "json",
        type=Path,
        nargs="?",
        default=Path("results/benchmark.json"),
        help="what was measured",
    )
    parser.add_argument("--picture", type=Path, metavar="PATH.png", help="draw it here")
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    if not args.json.is_file():
        parser.error(f"{args.json} does not exist; scripts/benchmark.py measures it")
    results = json.loads(args.json.read_text())
    print(details(results))
    if args.picture:
        draw(results, args.picture)


if __name__ == "__main__":
    main()
