# SPDX-License-Identifier: Apache-2.0
"""Prove every claim of this project that only a GPU can prove, the most valuable ones first.

    python evidence/gpu_proof.py --list
    python evidence/gpu_proof.py --minutes 10                 # the ten most valuable minutes
    python evidence/gpu_proof.py --only 'strategies|resume'   # some cells; none is run twice
    python evidence/gpu_proof.py --retry                      # also what failed or timed out before
    python evidence/gpu_proof.py --device cpu --tiny          # as far as a CPU allows

All cells together take about an hour on a GPU. Each runs in a process of its own for at most five
minutes, and writes one JSON file under --output as soon as it ends: what it proves, its bound and
verdict, its numbers, its commands, and the device, driver, versions and commit. Models are made on
the device from configs, with random weights, and rows are generated: nothing is downloaded. Cells
that need a missing package are skipped, and say so; `make gpu-wheels` collects such packages in one
folder.

To publish the results, commit the JSON files to results/gpu/ and run
`python evidence/readme_tables.py`, which writes the tables of the documents.

Exit codes: 0 every cell that ran is within its bound, 1 one is not, 64 usage, 73 --output cannot be
written.
"""

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import rooms  # noqa: F401  before what it makes importable
from bench import machine
from exits import Exit, run_command
from gpu import runner
from gpu.catalog import CELLS
from gpu.cell import FAILED, NOT_OK, TIMED_OUT, Setup
from usage import Parser

STOPPED = 130
LEAST_SECONDS = 20  # for a cell, which stops starting anything a few seconds before its end


def parse_args() -> tuple[Parser, argparse.Namespace]:
    """Return the parser and the command line, with the cells in `chosen`."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=Path("runs/gpu_proof"), help="folder of the results"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="[%(default)s]")
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes and few variants, for a CPU"
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="cells whose names match")
    parser.add_argument(
        "--minutes", type=float, help="start no cell whose time limit ends later than this"
    )
    parser.add_argument(
        "--most_seconds",
        type=int,
        metavar="SECONDS",
        help="stop each cell after this time at the latest; it keeps the rows that it has by then",
    )
    parser.add_argument(
        "--shares_gpu",
        action="store_true",
        help="other programs use the GPU, such as this one with other cells and another --output: "
        "do not wait for free memory after a cell. Speeds measured this way mean nothing.",
    )
    parser.add_argument(
        "--retry", action="store_true", help="run again what failed, timed out or is not ok"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the cells, their limits and what they prove"
    )
    parser.add_argument(
        "--commit",
        help="commit to record in place of git's, for a copy of the files without history",
    )
    # The process of a cell is started with this flag.
    parser.add_argument("--worker", metavar="CELL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        args.chosen = [cell for cell in CELLS if re.search(args.only, cell.name)]
    except re.error as error:
        parser.error(f"--only {args.only}: {error}")
    check(parser, args)
    args.output = args.output.resolve()
    return parser, args


def check(parser: Parser, args: argparse.Namespace) -> None:
    """Exit with 64 if the arguments do not fit together."""
    if not args.chosen:
        parser.error(f"--only {args.only}: no cell's name matches; --list shows all")
    if args.minutes is not None and not args.minutes > 0:
        parser.error(f"--minutes {args.minutes}: must be above 0")
    if args.most_seconds is not None and args.most_seconds < LEAST_SECONDS:
        parser.error(f"--most_seconds {args.most_seconds}: must be at least {LEAST_SECONDS}")
    if args.device == "cpu" and not args.tiny and not args.list:
        parser.error("--device cpu needs --tiny: the cells' real shapes are for a GPU")
    if args.worker and args.worker not in {cell.name for cell in CELLS}:
        parser.error(f"--worker {args.worker}: no such cell")


def check_gpu(parser: Parser) -> None:
    """Exit with 64 if there is no GPU, or if torch cannot use it."""
    if not machine.gpu_facts():
        parser.error("nvidia-smi finds no GPU; try the command without one: --device cpu --tiny")
    question = "import torch; raise SystemExit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", question]).returncode:
        parser.error(
            "there is a GPU, but torch cannot use it: does torch's CUDA version fit the driver?"
        )


def make_output(folder: Path) -> None:
    """Make the folder of the results. Raises OSError if it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def work(name: str, proof: runner.Proof) -> None:
    """Run one cell in this process."""
    cell = next(cell for cell in CELLS if cell.name == name)
    deadline = time.monotonic() + proof.limit_of(cell)
    folder = proof.work_folder(cell)
    setup = Setup(proof.device, proof.tiny, proof.output, folder, deadline, proof.shares_gpu)
    runner.work_as_cell(cell, setup)


def facts_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the machine and the commit, as each record names them."""
    facts = machine.facts(args.device)
    if args.commit is not None:
        facts["commit"] = args.commit
    return facts


def proof_of(args: argparse.Namespace, facts: dict[str, Any]) -> runner.Proof:
    """Return what the cells of this command line share."""
    return runner.Proof(
        args.device, args.tiny, args.output, facts, args.most_seconds, args.shares_gpu
    )


def end_cell_and_exit(number: int, frame: FrameType | None) -> None:
    """Exit on a signal, which also kills the running cell."""
    sys.exit(128 + number)


def print_summary(records: list[runner.Record], args: argparse.Namespace) -> None:
    """Print how many cells have each verdict, and what to do with their results."""
    counts = Counter(record["verdict"] for record in records)
    shown = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    print(f"{len(records)} of {len(args.chosen)} cells: {shown}")
    print(f"The results are in {args.output}. To make tables of the results of a GPU, run")
    print(
        f"mkdir -p results/gpu && cp {args.output}/*.json results/gpu "
        "&& python evidence/readme_tables.py"
    )


def main() -> int:
    """Run the chosen cells; return the exit code."""
    parser, args = parse_args()
    if args.worker:
        work(args.worker, proof_of(args, facts={}))
        return 0
    if args.list:
        for cell in args.chosen:
            print(f"{cell.name:34} {cell.limit:4} s  {cell.proves}")
        return 0
    if args.device == "cuda":
        check_gpu(parser)
    try:
        make_output(args.output)
    except OSError as error:
        problem = f"cannot write there: {error.strerror}"
        print(f"error: --output {args.output}: {problem}", file=sys.stderr)
        return Exit.CANNOT_WRITE
    signal.signal(signal.SIGTERM, end_cell_and_exit)
    proof = proof_of(args, facts_of(args))
    try:
        records = runner.run_all(args.chosen, proof, args.minutes, args.retry)
    except KeyboardInterrupt:
        message = "Stopped. The same command continues with the interrupted cell."
        print(message, file=sys.stderr)
        return STOPPED
    print_summary(records, args)
    failed = any(record["verdict"] in (FAILED, TIMED_OUT, NOT_OK) for record in records)
    return 1 if failed else 0


if __name__ == "__main__":
    run_command(main)
