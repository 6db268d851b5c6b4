# SPDX-License-Identifier: Apache-2.0
"""Write the tables of README.md, docs/ and results/README.md from the results in results/*.json.

    python evidence/readme_tables.py            # after parity.py and others
    python evidence/readme_tables.py --check    # exit with 1 if they differ; the tests call this

Each table of a document is between `<!-- NAME -->` and `<!-- end of NAME -->`.
"""

import argparse
import sys

import rooms  # noqa: F401  before what it makes importable
from exits import run_command
from paths import ROOT
from publish.pages import fill_documents, read_results, whole
from usage import Parser


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; print what differs")
    return parser.parse_args()


def main() -> int:
    """Write the pages that differ, or with --check only name them; return the exit code."""
    args = parse_args()
    if not (ROOT / "results" / "parity.json").is_file():
        sys.exit("readme_tables.py: results/parity.json is missing; make proof writes it")
    try:
        results = read_results()
        wanted = fill_documents(results)
    except ValueError as error:
        sys.exit(f"readme_tables.py: {error}")
    wanted[ROOT / "results" / "README.md"] = whole(results)
    differ = False
    for path, text in wanted.items():
        if path.is_file() and path.read_text() == text:
            continue
        differ = True
        if args.check:
            print(f"{path.relative_to(ROOT)} differs from what results/ says")
        else:
            print(f"{path.relative_to(ROOT)} written")
            path.write_text(text)
    return 1 if args.check and differ else 0


if __name__ == "__main__":
    run_command(main)
