# SPDX-License-Identifier: Apache-2.0
"""Benchmark: the host memory that 8 ranks of a host take to load a model, under every YAML.

    python evidence/benchmark_loading.py --json results/loading.json   # needs 16 GiB of memory
    python evidence/benchmark_loading.py --configs fsdp2_full_shard

Each launch is a rehearsal (scripts/rehearse.py) of a shipped recipe under a shipped YAML, up to the
first step. The model has the shape of Llama 3.2 1B (a mixture of experts has other layers), a
vocabulary of 32,000 and random weights: 2 GB in bf16, as on the hub, which the default --dtype
float32 converts. Where the ranks hold so many copies that they do not fit into --memory_gib, it has
fewer layers.

Every 20 ms the private memory of all ranks (RssAnon) is read, and as often as the machine can the
pages of files that they map (Pss_File of /proc/PID/smaps_rollup, where a page that k ranks map
counts 1/k in each). On CPU ranks the device's memory is the host's, so the weights that a rank
holds at the end are subtracted: on a machine with GPUs they are on the GPUs. Under FSDP, which
takes the weights from the host's copy in `prepare`, nothing is subtracted until then, and the
measurement lasts until the model is prepared. Under all other YAMLs from_pretrained loads weights
to where they stay, and the measurement ends with it. Rank 0 and the other ranks are told apart: a
copy that only rank 0 has exists once per host. What every rank has beyond its weights are tensors
in transit, which on a machine with GPUs are on the GPUs as well.

Exit codes: 0 measured, 1 a launch failed, 64 usage.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import rooms  # noqa: F401  before what it makes importable
from bench import loading
from bench.loading_tables import whole_table
from exits import run_command
from proof.results import read_rows, write_rows
from usage import Parser


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [cell.mesh.config for cell in loading.cells()]
    parser.add_argument(
        "--configs", nargs="+", choices=names, default=names, help="YAML files (default: all)"
    )
    parser.add_argument(
        "--memory_gib", type=float, default=11, help="memory for all copies [%(default)s]"
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/benchmark_loading"), help="folder of models"
    )
    parser.add_argument("--json", type=Path, help="file of the results; rows that it has stay")
    args = parser.parse_args()
    if args.memory_gib <= 0:
        parser.error("--memory_gib must be above 0")
    return args


def main() -> int:
    """Measure each launch and print the table; return the exit code."""
    args = parse_args()
    rows = {row["config"]: row for row in read_rows(args.json)}
    with tempfile.TemporaryDirectory(prefix="benchmark_loading_") as name:
        folder = Path(name)
        for cell in loading.cells():
            config = cell.mesh.config
            if config not in args.configs:
                continue
            shape = loading.shape_of(cell, args.memory_gib * loading.GIB)
            tiny = args.output_dir / "_".join(str(number) for number in shape.values())
            parameters = loading.make(shape, tiny)
            try:
                rows[config] = loading.measure(cell, tiny, parameters, folder / config)
            except RuntimeError as error:
                print(f"benchmark_loading.py: {config} failed:\n{error}", file=sys.stderr)
                return 1
            print(rows[config], file=sys.stderr, flush=True)
            if args.json:
                write_rows(args.json, list(rows.values()))
    print(whole_table(list(rows.values())))
    return 0


if __name__ == "__main__":
    run_command(main)
