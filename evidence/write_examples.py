# SPDX-License-Identifier: Apache-2.0
"""Write the planned memory into the head of each file of examples/, and the table of their page.

    python evidence/write_examples.py            # after a change to an example or to the planner
    python evidence/write_examples.py --check    # exit with 1 if they differ; the tests call this

The card that an example is planned for is named in the line that is written.
"""

import argparse
import sys

import rooms  # noqa: F401  before what it makes importable
from exits import run_command
from paths import ROOT
from planner.errors import PlannerError
from usage import Parser


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; print what differs")
    return parser.parse_args()


def main() -> int:
    """Write the files that differ, or with --check only name them; return the exit code."""
    args = parse_args()
    # Imported here, since it takes seconds and a wrong call should be refused at once
    from publish.examples import pages

    try:
        wanted = pages()
    except (PlannerError, ValueError) as error:
        sys.exit(f"write_examples.py: {error}")
    differ = False
    for path, text in wanted.items():
        if path.read_text() == text:
            continue
        differ = True
        if args.check:
            print(f"{path.relative_to(ROOT)} differs from what the planner says")
        else:
            print(f"{path.relative_to(ROOT)} written")
            path.write_text(text)
    return 1 if args.check and differ else 0


if __name__ == "__main__":
    run_command(main)
