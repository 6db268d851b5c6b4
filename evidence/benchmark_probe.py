# SPDX-License-Identifier: Apache-2.0
"""Run a script unmodified, and record when its optimizer steps ended and their peak memory.

    python evidence/benchmark_probe.py OUT.json recipes/llama.py --max_steps 25
    python evidence/benchmark_probe.py OUT.json --steps 25 recipes/llama.py --max_steps 25

The exit code is that of the script. The file holds one JSON object:

    started     seconds from the start of this process to the moment from which `ends` counts
    ends        seconds from there to the end of each optimizer step
    memory      peaks in bytes: of resident memory, and on a GPU, since the end of the warm-up, of
                tensors (allocated), of blocks that cannot be freed yet (active) and of the
                allocator (reserved); and what all processes together took of the GPU when it was
                read (device)
"""

import argparse
import os
import time
from pathlib import Path

import rooms  # noqa: F401  before what it makes importable
from bench.probe import Record, Watched, run_watched, seconds_alive, write_record
from exits import run_command
from usage import Parser


def parse_args() -> tuple[Parser, argparse.Namespace]:
    """Return the parser and the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "out", type=Path, metavar="OUT.json", help="file to write; rank N writes OUT.N.json"
    )
    parser.add_argument("--warmup", type=int, default=0, help="steps before the timed ones")
    parser.add_argument(
        "--steps", type=int, default=0, help="step at which memory is read (default: at the end)"
    )
    parser.add_argument("script", metavar="SCRIPT", help="the script to run")
    parser.add_argument(
        "script_args", nargs=argparse.REMAINDER, metavar="ARGS", help="its own arguments"
    )
    return parser, parser.parse_args()


def main() -> None:
    """Run the script, and write the record however it ends."""
    begun = time.perf_counter()
    record = Record(started=seconds_alive())
    parser, args = parse_args()
    if not Path(args.script).is_file():
        parser.error(f"{args.script} does not exist")
    watched = Watched(begun, args.warmup, args.steps)
    try:
        run_watched(args.script, args.script_args, record, watched)
    finally:
        write_record(record, args.out, rank=int(os.environ.get("RANK", 0)))


if __name__ == "__main__":
    run_command(main)
