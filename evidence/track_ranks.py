# SPDX-License-Identifier: Apache-2.0
"""Compare the planner's peaks under each YAML with those of live tensors on real CPU ranks.

    python evidence/track_ranks.py --json results/planner_ranks.json
    python evidence/track_ranks.py --configs ddp fsdp1_full_shard --jobs plain LoRA
    python evidence/track_ranks.py --configs fsdp2_cp tp --jobs plain
    python evidence/track_ranks.py --plan --json results/planner_ranks.json  # only plan again

Each launch rehearses three optimizer steps of the recipe (scripts/rehearse.py) on two ranks, or on
four where the YAML needs a mesh of 2 x 2. A YAML under which ranks share rows is launched with
several sizes of its mesh, on up to eight ranks, and one under which they share experts trains a
mixture in groups of several sizes. Pipelines run under every schedule, and the error is that of the
stages whose plan is furthest off. In every rank torch's MemTracker follows all tensors from the
second optimizer step to the third. A rank's planned peak counts its device and its host together,
since on CPU ranks they are one. TP, CP and EP are traced too (plan_memory.py --simulate). One job
under all YAMLs takes about six minutes on two cores.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rooms  # noqa: F401  before what it makes importable
from exits import run_command
from measured.rehearsals import all_names, config_names
from measured.tracked_jobs import JOBS, is_left_out
from usage import Parser

Row = dict[str, Any]

MIB = 2**20


def parse_args() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = all_names()
    parser.add_argument(
        "--configs", nargs="+", choices=names, default=names, help="YAML files (default: all)"
    )
    parser.add_argument(
        "--jobs",
        nargs="+",
        choices=list(JOBS),
        default=list(JOBS),
        help="what is trained (default: all)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="PATH.json",
        help="write the table here; other rows there stay",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="launch nothing: plan the rows of --json again",
    )
    args = parser.parse_args()
    if args.plan and not (args.json and args.json.is_file()):
        parser.error("--plan needs --json, the file of the measurements")
    return args


def measured_rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yield measured rows, each as soon as it is available."""
    if not args.plan:
        yield from launched_rows(args)
        return
    for row in json.loads(args.json.read_text())["rows"]:
        if row["config"] in args.configs and row["job"] in args.jobs:
            yield row


def launched_rows(args: argparse.Namespace) -> Iterator[Row]:
    """Launch and yield each job under each YAML."""
    from measured import live_peaks  # takes seconds to import

    with tempfile.TemporaryDirectory(prefix="tracked_") as folder:
        tiny = Path(folder) / "tiny"
        live_peaks.make_model_and_rows(tiny)
        for job in args.jobs:
            for config in args.configs:
                run = Path(folder) / f"{job}_{config}".replace(" ", "_")
                if config not in config_names():
                    yield from rows_of_mesh(config, job, tiny, run)
                elif not is_left_out(config, job):
                    yield live_peaks.measure(config, job, tiny, run)


def rows_of_mesh(config: str, job: str, tiny: Path, folder: Path) -> Iterator[Row]:
    """Launch and yield a job under each mesh of a YAML for ranks that share rows or a model."""
    from measured import live_peaks  # takes seconds to import

    places = [mesh for tracked, mesh in live_peaks.tracked_places() if tracked == job]
    of_config = [mesh for mesh in places if mesh.config == config]
    for number, mesh in enumerate(of_config):
        yield live_peaks.measure_mesh(mesh, job, tiny, folder.with_name(f"{folder.name}_{number}"))


def line_of(row: Row) -> str:
    """Return a line for the terminal."""
    words = [row["config"], *row.get("sizes", [])]
    if "ep" in row:
        words += [str(row["ranks"]), f"ep_size={row['ep']}"]
    planned = row["planned"]
    if "pp" in row:
        words += [str(row["ranks"]), f"pp_size={row['pp']}", row["schedule"]]
        planned = max(planned)
    name = " ".join(words)
    line = (
        f"{name:24} {row['job']:13} {max(row['measured']) / MIB:9.1f} MiB measured, "
        f"{planned / MIB:9.1f} planned, {row['error']:+.2%}"
    )
    if row["beside_bucket"] != row["error"]:
        line += f", {row['beside_bucket']:+.2%} beside the bucket"
    if "even" in row:
        line += f", {row['even']:+.2%} for equal numbers of tokens"
    if "traced" in row:
        line += f", {row['traced']:+.2%} traced"
    return line


def main() -> None:
    """Measure, plan, compare."""
    args = parse_args()
    from measured import live_peaks  # takes seconds to import

    for measured in measured_rows(args):
        row = live_peaks.with_trace(live_peaks.compare(measured))
        print(line_of(row), flush=True)
        if args.json:
            live_peaks.write(args.json, [row])


if __name__ == "__main__":
    run_command(main)
