# SPDX-License-Identifier: Apache-2.0
"""List the workarounds for other libraries, and check which are no longer needed.

    python evidence/workarounds.py
    python evidence/workarounds.py --check --json runs/workarounds.json

The workarounds are in recipes/components/upstream.py. Each has tests that run twice: without it
they must find the harm in the installed library, and with it they must not. --check runs them, in
about a minute, and prints a verdict for each workaround:

needed        the harm is there, and the workaround prevents it
partly fixed  one of its tests no longer finds the harm
fixed         no test finds the harm any longer: remove the workaround, its calls and its tests
not cured     the workaround does not prevent the harm, or one of its tests cannot run
not tested    this machine cannot show the harm

Exit codes: 0 all are needed or cannot be tested here, 1 some are not, 64 usage, 73 cannot write.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import rooms  # noqa: F401  before what it makes importable
from exits import Exit, first_line, run_command, stop
from proof.workarounds import (
    NEEDED,
    NOT_TESTED,
    Row,
    check,
    list_table,
    list_workarounds,
    verdict_table,
)
from usage import Parser


def parse_args() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="run the tests of each, and print a verdict"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the list here")
    return parser.parse_args()


def write(path: Path, rows: list[Row]) -> None:
    """Write the list as JSON, and make its folder if it is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    except OSError as error:
        stop(Exit.CANNOT_WRITE, f"cannot write {path}: {first_line(error)}")


def main() -> None:
    """Print the list, or with --check the verdicts."""
    args = parse_args()
    rows = list_workarounds()
    if args.check:
        try:
            check(rows)
        except RuntimeError as error:
            sys.exit(f"workarounds.py: {error}")
        print(verdict_table(rows))
    else:
        print(list_table(rows))
    if args.json:
        write(args.json, rows)
    if any(row.verdict not in (None, NEEDED, NOT_TESTED) for row in rows):
        sys.exit(int(Exit.FAILED))


if __name__ == "__main__":
    run_command(main)
