"""Write the tables of README.md and results/README.md from the measurements in results/*.json.

    python scripts/readme_tables.py            # after scripts/parity.py --json results/parity.json or benchmark.py
    python scripts/readme_tables.py --check    # exit code 1 if they differ; the tests call this

What scripts/gpu_proof.py measured on a GPU is read from results/gpu/*.json; without such files the tables say so.
A table of README.md stands between `<!-- NAME -->` and `<!-- end of NAME -->`, for each NAME of `BLOCKS`.
"""

import argparse
import json
import sys
from pathlib import Path

import benchmark_tables
from gpu import tables as gpu_tables
from parity import BF16_BOUNDS, BOUNDS, MAKERS, NAMES, WEIGHTS, reasons, table, tables
from planner.accuracy import METHODS, errors_of
from usage import Parser

ROOT = Path(__file__).resolve().parents[1]
GROUPS = {  # what a line of the summary sums up
    "strategies": "every YAML, 2 and 4 ranks",
    "cuts": "every cut of one global batch, 1, 2 and 4 ranks",
    "checkpointing": "gradient checkpointing",
    "attention": "eager attention",
    "bf16": "bf16 under each engine, against one process in fp32",
    "levers": "padding-free batches, loss in pieces",
    "packing": "packed lines, against one process's",
    **{recipe: "the other recipes, every YAML, 2 ranks" for recipe in MAKERS if recipe != "llama"},
    "quantized": "the other recipes, under ZeRO-2 and FSDP2",
}
CLASSES = ("parameters", "gradients", "optimizer")
ORDER = ("single", "ddp", "fsdp2", "fsdp1", "deepspeed")


def largest(rows, key):
    """The largest difference of some rows in one number, as text."""
    found = [row["differences"][key] for row in rows if row["differences"][key] is not None]
    return f"{max(found):.0e}" if found else ""


def parity_block(results):
    """One line a kind of run, of weights and bound: how many runs, and the largest difference from one process."""
    measured = [
        row for row in results["parity"]["rows"] if row["verdict"] == "ok" and not is_reference(row)
    ]
    lines = []
    for text in dict.fromkeys(GROUPS.values()):
        for weights in WEIGHTS:
            rows = [
                row
                for row in measured
                if GROUPS[row["group"]] == text and row["weights"] == weights
            ]
            fp32 = [row for row in rows if row["precision"] == "no"]
            wider = [
                row for row in fp32 if row["bounds"]["grad_norm"] not in (BOUNDS["grad_norm"], None)
            ]
            for part, note in (
                ([row for row in rows if row not in wider], ""),
                (wider, ", sharded"),
            ):
                if part:
                    lines.append(
                        [
                            text + note,
                            weights,
                            str(len(part)),
                            *(largest(part, key) for key in NAMES),
                        ]
                    )
    lines.append(["bound", "", "", *(f"{BOUNDS[key]:.0e}" for key in NAMES)])
    lines.append(["bound in bf16", "", "", *(f"{BF16_BOUNDS[key]:.0e}" for key in NAMES)])
    header = ["what differs from one process", "weights", "runs", *NAMES.values()]
    return "\n\n".join([table(header, lines), "\n".join(reasons(measured))])


def is_reference(row):
    return row["group"] in ("strategies", "quantized", *MAKERS) and row["config"] == "single"


def bytes_block(results, weights="full"):
    """One line a YAML: bytes of each class on the fullest rank of 2 and of 4, and the share that this is."""
    rows = [
        row
        for row in results["parity"]["rows"]
        if row["group"] == "strategies" and row["weights"] == weights
    ]
    rows = {(row["config"], row["ranks"]): row["held"] for row in rows if "held" in row}
    lines = []
    for config in sorted({config for config, _ in rows}, key=rank_of):
        first = 1 if config == "single" else 2
        held = [rows.get((config, ranks), {}).get(name) for ranks in (first, 4) for name in CLASSES]
        name = f"`{config}.yaml`" + (", one process" if first == 1 else "")
        lines.append([name, *(cell(entry) if entry else "" for entry in held)])
    return table(["YAML", *(f"{name}, {n} ranks" for n in (2, 4) for name in CLASSES)], lines)


def rank_of(config):
    """Where a YAML stands in a table."""
    return next(i for i, start in enumerate(ORDER) if config.startswith(start)), config


def cell(held):
    """Bytes of one class on the fullest rank, and the share that the YAML promises, if it is not the whole."""
    share = "" if held["shards"] == 1 else f" (1/{held['shards']})"
    return f"{max(size for size, _ in held['ranks']):,}{share}"


def host_memory_block(results):
    """One line per YAML: host memory that each rank took to load a model and to resume, in copies of it in fp32."""
    if "host_memory" not in results:
        return "Not measured yet: `python scripts/host_memory.py --json results/host_memory.json`."
    lines = []
    for row in sorted(
        results["host_memory"]["rows"], key=lambda row: (row["ranks"], *rank_of(row["config"]))
    ):
        resuming = " ".join(f"{copies:.2f}" for copies in row.get("resuming", []))
        loading = " ".join(f"{copies:.2f}" for copies in row["loading"])
        lines.append([f"`{row['config']}.yaml`", str(row["ranks"]), loading, resuming])
    return table(
        ["YAML", "ranks", "loading: copies of the model, by rank", "resuming: the same"], lines
    )


def speed_block(results):
    return benchmark_tables.block(results.get("benchmark"))


COMPARED = {  # kinds of cells of scripts/validate_planner.py and track_ranks.py: against what, and how
    "one thing": ("real CPU tensors, one thing changed at a time", METHODS),
    "drawn": ("real CPU tensors, all drawn at random", METHODS),
    "ranks": ("real tensors of CPU ranks, every YAML", METHODS[:1]),
    "shapes": ("the trace, 1B to 70B parameters, up to 1,024 ranks", METHODS[:1]),
}


def planner_block(results):
    """One line for what the planner was held against, and way of planning: mean and worst errors of the peak."""
    ranks = [
        {"kind": "ranks", METHODS[0]: row["beside_bucket"]}
        for row in results["planner_ranks"]["rows"]
    ]
    cells, lines = results["planner"]["cells"] + ranks, []
    for kind, (text, methods) in COMPARED.items():
        for method in methods:
            number, mean, above, below = errors_of(
                [cell for cell in cells if cell["kind"] == kind], method
            )
            errors = [f"{abs(error):.2%}" for error in (mean, max(above, 0), min(below, 0))]
            lines.append([method, text, str(number), *errors])
    header = ["planned by", "held against", "cells", "mean error", "at most above", "at most below"]
    return table(header, lines)


def quickstarts_block(results):
    """One line a recipe: what its quick example shows of held-out rows before and after, and its seconds."""
    rows = results["quickstarts"]["rows"]
    lines = [
        [
            f"`make quickstart RECIPE={row['recipe']}`",
            row["shown"],
            f"{row['before']:.3g}",
            f"{row['after']:.3g}",
            f"{row['seconds']:.0f}",
        ]
        for row in rows
    ]
    seconds = f"seconds, {results['quickstarts']['cores']} CPU cores"
    return table(["quick example", "of held-out rows", "before", "after", seconds], lines)


def gpu_block(results):
    """What one GPU showed of each claim, or that none was at hand yet."""
    return gpu_tables.block(results["gpu"])


BLOCKS = {
    "quickstarts": quickstarts_block,
    "parity": parity_block,
    "bytes": bytes_block,
    "speed": speed_block,
    "planner": planner_block,
    "host_memory": host_memory_block,
    "gpu": gpu_block,
}


def fill(text, results):
    """README.md's text with each block made anew; ValueError if a mark is missing."""
    for name, make in BLOCKS.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        if text.count(start) != 1 or text.count(end) != 1:
            raise ValueError(f"README.md needs one {start.strip()} and one {end}")
        before, rest = text.split(start)
        text = before + start + make(results) + "\n" + end + rest.split(end)[1]
    return text


def whole(results):
    """The text of results/README.md: every run."""
    measured = results["parity"]
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    parts = [
        "# Results",
        "Made by `scripts/readme_tables.py` from the JSON files beside it.",
        "# Parity",
        f"`scripts/parity.py` on {measured['device']} ranks, in fp32, with {versions}. The numbers are the "
        "largest relative differences from the same job in one process over 20 steps; bytes ok: each rank held "
        "what the YAML promises.",
        tables(measured["rows"]),
        "# Bytes",
        "Live tensors of the fullest rank after a step, and the share of the whole that the YAML promises.",
    ]
    for weights in WEIGHTS:
        parts += [f"## {weights}", bytes_block(results, weights)]
    if "benchmark" in results:
        parts += [
            "# Speed",
            "`scripts/benchmark.py` says how each kind of cell is measured. Numbers are medians and, "
            "in brackets, the range of the repeats.",
            benchmark_tables.details(results["benchmark"]),
        ]
    parts += [
        "# Memory planner",
        "`scripts/track_ranks.py`: the planned peak against that of live tensors on CPU "
        "ranks; under ZeRO-1 to 3 beside the bucket of 2 GB that each rank has.",
        tracked_table(results["planner_ranks"]["rows"]),
        "`scripts/validate_planner.py`: the closed form against the trace, rows of 4,096 tokens.",
        shapes_table(results["planner"]["cells"]),
        "# On a GPU",
        "`scripts/gpu_proof.py`: every cell with its numbers and commands.",
        gpu_tables.details(results["gpu"]),
    ]
    return "\n\n".join(parts) + "\n"


def signed(error):
    """A relative error in percent, with its sign but for nothing."""
    return f"{round(error, 4) + 0:+.2%}"


def tracked_table(rows):
    """One line a YAML, one column a job: the relative error of the peak."""
    jobs = list(dict.fromkeys(row["job"] for row in rows))
    errors = {(row["config"], row["job"]): signed(row["beside_bucket"]) for row in rows}
    configs = sorted({row["config"] for row in rows}, key=rank_of)
    return table(
        ["YAML", *jobs],
        [[config, *(errors.get((config, job), "") for job in jobs)] for config in configs],
    )


def shapes_table(cells):
    """One line a shape and strategy: GiB traced, and the closed form's relative error."""
    lines = []
    for cell in (cell for cell in cells if cell["kind"] == "shapes"):
        how = f"{cell.get('engine', 'one process')}, {cell.get('ranks', 1)} ranks, {cell.get('mixed_precision', 'no')}"
        size = f"{cell['traced bytes'] / 2**30:.2f}"
        lines.append(
            [cell["model"], how, " ".join(cell["flags"]), size, signed(cell["closed form"])]
        )
    return table(["parameters", "strategy", "flags", "GiB traced", "closed form"], lines)


def read_results():
    """What was measured, by name of the file under results/; "gpu" is the list of records under results/gpu/."""
    results = {
        path.stem: json.loads(path.read_text()) for path in (ROOT / "results").glob("*.json")
    }
    return results | {"gpu": gpu_tables.read_records(ROOT / "results" / "gpu")}


def parse_args():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; say what differs")
    return parser.parse_args()


def main():
    args = parse_args()
    if not (ROOT / "results" / "parity.json").is_file():
        sys.exit("readme_tables.py: results/parity.json is missing; make proof measures it")
    try:
        results = read_results()
    except ValueError as error:
        sys.exit(f"readme_tables.py: {error}")
    wanted = {
        ROOT / "README.md": fill((ROOT / "README.md").read_text(), results),
        ROOT / "results" / "README.md": whole(results),
    }
    stale = [
        path for path, text in wanted.items() if not path.is_file() or path.read_text() != text
    ]
    for path in stale:
        print(
            f"{path.relative_to(ROOT)} {'is not what results/ says' if args.check else 'written'}"
        )
        if not args.check:
            path.write_text(wanted[path])
    sys.exit(1 if args.check and stale else 0)


if __name__ == "__main__":
    main()
