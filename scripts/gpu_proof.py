"""Show every claim of this project that only a GPU can show, the most valuable ones first.

    python scripts/gpu_proof.py --list
    python scripts/gpu_proof.py --minutes 10                 # the ten most valuable minutes
    python scripts/gpu_proof.py --only 'strategies|resume'   # some cells; none is done twice
    python scripts/gpu_proof.py --retry                      # also what failed or timed out before
    python scripts/gpu_proof.py --device cpu --tiny          # as far as a CPU allows

Together the cells are the first hour on a GPU. Each runs in a process of its own, at most five
minutes, and leaves one JSON under --output as soon as it ends: what it proves, its bound and
verdict, its numbers, its commands, and the device, driver, versions and commit. Models are made on
the device from configs, with random weights, and rows are made here: nothing is downloaded. A
package that is missing skips the cells that need it and says so; `make gpu-wheels` puts such
packages into one folder.

A commit of the JSON files to results/gpu/ and `python scripts/readme_tables.py` write the tables of
the README.

Exit code: 0 every cell that ran is within its bound, 1 not, 64 for a wrong call, 73 if --output
cannot be written to.
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

from gpu import machine, runner
from gpu.catalog import CELLS
from gpu.cell import FAILED, NOT_OK, TIMED_OUT, Setup
from usage import Parser


def parse_args():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=Path("runs/gpu_proof"), help="folder of the results"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="[%(default)s]")
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes and few variants, for a CPU"
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="cells whose name has this")
    parser.add_argument("--minutes", type=float, help="start no cell whose limit goes beyond this")
    parser.add_argument(
        "--retry", action="store_true", help="run again what failed, timed out or is not ok"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the cells, their limits and what they prove"
    )
    parser.add_argument(
        "--commit",
        help="to record where this folder is no git repository, as in a copy of the tree",
    )
    # The process of one cell is started with this
    parser.add_argument("--worker", metavar="CELL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        args.chosen = [cell for cell in CELLS if re.search(args.only, cell.name)]
    except re.error as error:
        parser.error(f"--only {args.only}: {error}")
    if not args.chosen:
        parser.error(f"--only {args.only}: no cell has this in its name; --list shows all")
    if args.minutes is not None and not args.minutes > 0:
        parser.error(f"--minutes {args.minutes}: must be above 0")
    if args.device == "cpu" and not args.tiny and not args.list:
        parser.error("--device cpu needs --tiny: the cells' real shapes are for a GPU")
    if args.worker and args.worker not in {cell.name for cell in CELLS}:
        parser.error(f"--worker {args.worker}: no such cell")
    return parser, args


def check_gpu(parser):
    """Stop with 64 if there is no GPU, or if torch cannot use it."""
    if not machine.gpu_facts():
        parser.error("nvidia-smi finds no GPU; --device cpu --tiny tries the program without one")
    question = "import torch; raise SystemExit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", question]).returncode:
        parser.error(
            "there is a GPU, but torch cannot use it: does torch's CUDA version fit the driver?"
        )


def work(args):
    """Be the process of one cell."""
    cell = next(cell for cell in CELLS if cell.name == args.worker)
    folder = args.output / "work" / cell.name
    deadline = time.monotonic() + runner.limit_of(cell, args.device)
    setup = Setup(args.device, args.tiny, args.output, folder, deadline)
    runner.work_as_cell(cell, setup)


def main():
    parser, args = parse_args()
    args.output = args.output.resolve()
    if args.worker:
        return work(args)
    if args.list:
        for cell in args.chosen:
            print(f"{cell.name:34} {cell.limit:4} s  {cell.proves}")
        return None
    if args.device == "cuda":
        check_gpu(parser)
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=args.output):
            pass
    except OSError as error:
        print(
            f"error: --output {args.output}: cannot write there: {error.strerror}", file=sys.stderr
        )
        return 73
    # An exit ends the running cell on the way
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    facts = machine.facts(args.device)
    facts["commit"] = facts["commit"] or args.commit
    try:
        records = runner.run_all(
            args.chosen, args.device, args.tiny, args.output, facts, args.minutes, args.retry
        )
    except KeyboardInterrupt:
        print("Stopped. The same command goes on with the cell that was cut off.", file=sys.stderr)
        return 130
    counts = Counter(record["verdict"] for record in records)
    shown = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    print(f"{len(records)} of {len(args.chosen)} cells: {shown}")
    print(f"The results are in {args.output}. Those of a GPU become tables by this:")
    print(
        f"mkdir -p results/gpu && cp {args.output}/*.json results/gpu && python scripts/readme_tables.py"
    )
    return int(any(verdict in (FAILED, TIMED_OUT, NOT_OK) for verdict in counts))


if __name__ == "__main__":
    sys.exit(main())
