# SPDX-License-Identifier: Apache-2.0
"""Measure in real processes how much host memory each rank takes to load a model and to resume.

    python evidence/host_memory.py --json results/host_memory.json
    python evidence/host_memory.py --configs ddp fsdp2_full_shard --ranks 2

Each launch is a rehearsal (scripts/rehearse.py) of recipes/llama.py on a model whose files are in
bf16, as on the hub, loaded with the default --dtype float32, so that the weights cannot stay a
mapping of the file. Numbers are in copies of the fp32 model (its parameters x 4 bytes): 1.0 means
that the rank took as much host memory as the whole model.

    loading    from the Accelerator to the call of `prepare`: the peak of the rank's private memory
               (RssAnon, sampled)
    resident   the same, including pages of files, which ranks share (VmHWM, exact)
    resuming   from `prepare` to the first forward pass, with a checkpoint of one step: the peak of
               private memory again. A step holds the optimizer's state and gradients, 3 copies over
               the number of shards; more than that is a second copy

On CPU ranks the device is the host: single, DDP and ZeRO-0 to 2 must hold a copy per rank here,
whereas on a GPU the weights go straight to the device (tests/unit/components/test_weights.py).
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import rooms  # noqa: F401  before what it makes importable
from exits import run_command
from measured import host_memory
from measured.rehearsals import config_names, ranks_of
from usage import Parser


def parse_args() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = config_names()
    parser.add_argument(
        "--configs", nargs="+", choices=names, default=names, help="YAML files (default: all)"
    )
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[2, 4], help="numbers of ranks (default: 2 4)"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="PATH.json",
        help="write the table here; other rows there stay",
    )
    return parser.parse_args()


def launches(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Yield (config, ranks) of each launch."""
    for config in args.configs:
        for ranks in sorted({ranks_of(config, wanted) for wanted in args.ranks}):
            yield config, ranks


def main() -> None:
    """Measure each launch, and print and write its row."""
    args = parse_args()
    with tempfile.TemporaryDirectory(prefix="host_memory_") as name:
        folder = Path(name)
        tiny = folder / "tiny"
        parameters = host_memory.make_model_and_rows(tiny)
        for config, ranks in launches(args):
            resumes = ranks == ranks_of(config, 2)
            row = host_memory.measure(
                config, ranks, tiny, parameters, folder=folder, resumes=resumes
            )
            print(json.dumps(row), flush=True)
            if args.json:
                host_memory.write_table(args.json, parameters, row)


if __name__ == "__main__":
    run_command(main)
