# SPDX-License-Identifier: Apache-2.0
"""Benchmark: the recipe against a bare PyTorch loop, transformers' Trainer and TRL's SFTTrainer.

    python evidence/benchmark.py                                # all cells of this device: hours
    python evidence/benchmark.py --cells matched --repeats 5    # some of them; --list names all
    python evidence/benchmark.py --device cuda --cells 8B       # what needs a GPU
    python evidence/benchmark.py --smoke                        # every cell, tiny: does it run?

A cell is one comparison: a model, rows and a few contestants. Each contestant is a process of its
own, started in turn (A B C D A B C D ...) and watched by evidence/benchmark_probe.py; ours is the
unmodified recipe. The first steps are not timed. There are four kinds of cells, and in the first
three a contestant that fails its gate has no figure:

    matched     the same batches in the same order, loss normalization, optimizer, dtype and
                attention; all tools log each step (the loops record the loss), and the loss must be
                within 1e-5 of the bare loop's (in bf16: 1e-2)
    shipped     each tool with its own defaults (padding, order, logs, and the checkpointing that
                SFTTrainer turns on), but in fp32 and, where the label says so, with --packing;
                about equal tokens per step, one pass over the same rows; afterwards the loss on
                held-out rows must be within 2 % of the bare loop's
    start       the time from the start of the process to the end of the first step, including the
                tokenization of the rows
    growth      our recipe only, as one quantity grows

On a CPU each process computes with one thread. A run during which the machine was busy with
something else (CPU: by its load average; GPU: another process computes there) is repeated, and left
out if that does not help. On a GPU all contestants compute in bf16 (autocast), as in the YAML
files. The results of a cell are written to --json as soon as it is done, and replace older results
of that cell. Rows are those of GSM8K (https://github.com/openai/grade-school-math, MIT):
train.jsonl and test.jsonl in --data. On a GPU, rows are generated if that folder is missing.

Exit codes: 0 every contestant passed its gate, 1 one did not, 64 usage.
"""

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import rooms  # noqa: F401  before what it makes importable
from bench.cells import Cell, Result, Run, Settings
from bench.cpu_cells import cpu_cells
from bench.gpu_cells import gpu_cells
from bench.measure import run_cell
from bench.prepare import NoModelError, make_models
from bench.smoke import in_small
from bench.tables import as_text, whole_table
from exits import run_command
from usage import Parser

LEAST = {"repeats": 1, "steps": 2, "warmup": 1}


def parse_args() -> tuple[Parser, argparse.Namespace]:
    """Return the parser and the command line, with the cells in `chosen`."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cells", default="", metavar="REGEX", help="cells whose names match (default: all)"
    )
    parser.add_argument(
        "--device", default="cpu", choices=["cpu", "cuda"], help="run the cells of this device"
    )
    parser.add_argument("--repeats", type=int, default=5, help="runs of each contestant")
    parser.add_argument(
        "--steps",
        type=int,
        help="timed steps (default: of the cell, 20 for most; a cell of one pass stays one pass)",
    )
    parser.add_argument("--warmup", type=int, default=5, help="steps before the timed ones")
    parser.add_argument(
        "--list", action="store_true", help="print the cells and their contestants, and stop"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="run a tiny version of every cell on the CPU"
    )
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data/gsm8k"), help="folder of the GSM8K rows"
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/benchmark"), help="folder of all runs"
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="file of the results (default: results/benchmark.json; with --smoke: none)",
    )
    args = parser.parse_args()
    for name, least in LEAST.items():
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name} {value}: must be at least {least}")
    try:
        args.chosen = chosen_cells(args)
    except re.error as error:
        parser.error(f"--cells {args.cells}: {error}")
    if not args.chosen:
        parser.error(f"--cells {args.cells}: no {args.device} cell matches; --list shows all")
    if args.json is None and not args.smoke:
        args.json = Path("results/benchmark.json")
    return parser, args


def chosen_cells(args: argparse.Namespace) -> list[Cell]:
    """Return the cells that --cells, --device, --smoke and --steps ask for."""
    if args.smoke:
        cells = [in_small(cell) for cell in (*cpu_cells(), *gpu_cells())]
    elif args.device == "cuda":
        cells = gpu_cells()
    else:
        cells = cpu_cells()
    chosen = [cell for cell in cells if re.search(args.cells, cell.name)]
    if not args.steps:
        return chosen
    # Cells that make one pass over the rows, or time the first step only, keep their length.
    return [replace(cell, steps=args.steps) if cell.steps > 1 else cell for cell in chosen]


def settings_of(args: argparse.Namespace) -> Settings:
    """Return the settings that all runs share."""
    folder = args.output_dir / "smoke" if args.smoke else args.output_dir
    return Settings(folder, args.data, args.smoke, args.warmup)


def write_results(path: Path, result: Result) -> None:
    """Write the result of a cell to a file of results, replacing an older one of that cell."""
    known = json.loads(path.read_text())["cells"] if path.exists() else []
    kept = [old for old in known if old["cell"] != result["cell"]]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_text([*kept, result]))


def passed_gate(run: Run) -> bool:
    """Return whether a run passed its gate; one that was only disturbed has not failed it."""
    return run["void"] in ("", "loaded")


def main() -> int:
    """Measure the chosen cells; return the exit code."""
    parser, args = parse_args()
    if args.list:
        for cell in args.chosen:
            print(f"{cell.name}: {', '.join(cell.contestants)}")
        return 0
    has_rows = (args.data / "train.jsonl").is_file()
    if args.device == "cpu" and not args.smoke and not has_rows:
        parser.error(
            f"--data {args.data}: has no train.jsonl; "
            "download GSM8K from https://github.com/openai/grade-school-math"
        )
    settings = settings_of(args)
    models = {name for cell in args.chosen for name in cell.models()}
    try:
        make_models(sorted(models), settings)
    except NoModelError as error:
        sys.exit(f"benchmark.py: {error}")
    runs = []
    for cell in args.chosen:
        result = run_cell(cell, settings, args.repeats)
        print(f"\n## {cell.name}\n\n{whole_table(result)}\n", flush=True)
        if args.json:
            write_results(args.json, result)
        runs += result["runs"]
    return 0 if all(passed_gate(run) for run in runs) else 1


if __name__ == "__main__":
    run_command(main)
