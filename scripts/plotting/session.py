# SPDX-License-Identifier: Apache-2.0
"""What plot_loss.py does with its command line."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from exits import Exit, stop
from plotting.panels import OF_ONE_RUN, OF_SEVERAL_RUNS, choose_panels
from plotting.picture import MOST_RUNS, draw, find_axis
from plotting.runs import read_run
from plotting.table import as_json, table


def find_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield everything that is wrong with the command line."""
    if len(args.run_dirs) > MOST_RUNS:
        yield (
            f"{len(args.run_dirs)} runs: no reader can tell more than {MOST_RUNS} curves apart; "
            "draw them in several pictures"
        )
    folders = [Path(folder).resolve() for folder in args.run_dirs]
    for folder in sorted({folder for folder in folders if folders.count(folder) > 1}):
        yield f"{folder} is given twice: name each run once"
    if len(set(args.panels or [])) < len(args.panels or []):
        yield "--panels names a panel twice: name each once"


def run(args: argparse.Namespace) -> None:
    """Draw the runs that the command line names, and print how several of them compare."""
    for problem in find_problems(args):
        stop(Exit.USAGE, problem)
    runs = [read_run(folder) for folder in args.run_dirs]
    names = args.panels
    if names is None:
        names = OF_ONE_RUN if len(runs) == 1 else OF_SEVERAL_RUNS
    try:
        axis = find_axis(runs, args.x)
    except ValueError as problem:
        stop(Exit.DATA, str(problem))
    panels, missing = choose_panels(names, runs)
    if not panels:
        stop(Exit.DATA, "; ".join(missing))
    write_picture(args, draw(runs, panels, axis))
    if args.json is not None:
        write_json(args.json, as_json(runs))
    for line in missing:
        print(line)
    if len(runs) > 1:
        print("\n".join(table(runs)))
        print()
    print(args.output)


def write_picture(args: argparse.Namespace, figure: Figure) -> None:
    """Write the picture; exit with 73 if that is not possible."""
    if args.output is None:
        name = "loss.png" if len(args.run_dirs) == 1 else "comparison.png"
        args.output = str(Path(args.run_dirs[0]) / name)
    try:
        figure.savefig(args.output, dpi=150)
    except (OSError, ValueError) as error:
        stop(Exit.CANNOT_WRITE, f"cannot write {args.output}: {error}")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write the numbers; exit with 73 if that is not possible."""
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        stop(Exit.CANNOT_WRITE, f"cannot write {path}: {error.strerror or error}")
