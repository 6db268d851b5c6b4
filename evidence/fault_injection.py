# SPDX-License-Identifier: Apache-2.0
"""Fault injection: no run can be lost, whatever is stopped, killed, cut short or damaged.

    python evidence/fault_injection.py                        # all groups: more than three hours
    python evidence/fault_injection.py --groups resume signals --limit 2  # some; --list names all
    python evidence/fault_injection.py --groups --report docs/fault_injection.md  # what --json has

Each trial is the shipped recipe on the job of evidence/parity.py (20 steps over two epochs, 12 rows
per step, 18 steps per epoch) with faults of evidence/proof/faults.py, on CPU ranks under the
shipped YAML files. It is compared with the same job without a fault. "Equal" means bit for bit:
every line of metrics.jsonl, except for speed and memory, and every final weight. The results of a
group are written to --json when it is done. They replace older results of that group, or with
--only, of the same trials.

Exit codes: 0 all trials are as promised, 1 one is not, 64 usage.
"""

import argparse
import re
from pathlib import Path

import rooms  # noqa: F401  before what it makes importable
from exits import run_command
from proof.trials.trial import KILLS
from usage import Parser


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--groups",
        nargs="*",
        metavar="GROUP",
        help="groups of trials to run (default: all); --list names them",
    )
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="trials whose lines in --list match"
    )
    parser.add_argument(
        "--limit", type=int, default=0, help="run at most this many trials of each kind (0: all)"
    )
    parser.add_argument(
        "--kills",
        type=int,
        default=KILLS,
        help="kill -9 at so many random moments, and at a fifth of that with --async_save "
        "[%(default)s]",
    )
    parser.add_argument("--list", action="store_true", help="print the trials and stop")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="trials at a time; with more than one the measured seconds are unreliable",
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/fault_injection"), help="folder of all runs"
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("results/fault_injection.json"),
        help="file of the results [%(default)s]",
    )
    parser.add_argument(
        "--report", type=Path, metavar="PATH.md", help="write the table of all results here"
    )
    args = parser.parse_args()
    if args.jobs < 1 or args.limit < 0 or args.kills < 0:
        parser.error("--jobs must be at least 1, --limit and --kills 0 or more")
    try:
        re.compile(args.only)
    except re.error as error:
        parser.error(f"--only {args.only}: {error}")
    args.groups = chosen_groups(parser, args.groups)
    return args


def chosen_groups(parser: Parser, names: list[str] | None) -> list[str]:
    """Return the groups of the command line, by default all. A name of none is a usage error."""
    # Imported here since it takes a second: a wrong flag and --help are answered at once
    from proof.trials.groups import GROUPS

    if names is None:
        return list(GROUPS)
    for name in names:
        if name not in GROUPS:
            parser.error(f"--groups {name}: choose from {', '.join(GROUPS)}")
    return names


def main() -> int:
    """Run the chosen trials; print and write the results of all. Return the exit code."""
    args = parse_args()
    from proof.trials.session import run  # takes a second, as above

    return run(args)


if __name__ == "__main__":
    run_command(main)
