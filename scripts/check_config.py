# SPDX-License-Identifier: Apache-2.0
"""Describe in plain words what an accelerate config really does, and find what is wrong with it.

    python scripts/check_config.py accelerate_configs/fsdp.yaml --num_processes 8
    python scripts/check_config.py accelerate_configs/fsdp.yaml accelerate_configs/ddp.yaml --json
    python scripts/check_config.py default_config.yaml --recipes

FILE is any accelerate config, which is checked together with the DeepSpeed JSON that it points to,
or such a JSON by itself. Files are only read: torch and accelerate are not loaded. The rules are in
recipes/components/config_rules.py, and a recipe checks its launcher's file by the same rules when
it starts.

error      accelerate or DeepSpeed would stop, or would silently run something other than what is
           written
warning    it works, but it is slow, wasteful or surprising
info       advice, and what only the recipes here refuse or have not been tested with; with
           --recipes the former is an error and the latter a warning, as when a recipe starts

Exit codes: 0 no error, 64 usage, 65 an error in a file, or with --strict a warning.
"""

import argparse
import json
import sys
from pathlib import Path

from configs.reports import report_on, show
from exits import Exit, run_command
from usage import Parser


def parse_args() -> tuple[Parser, argparse.Namespace]:
    """Return the parser and the arguments of the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="a YAML for accelerate, or a DeepSpeed JSON"
    )
    parser.add_argument(
        "--num_processes", type=int, help="instead of the file's, as for accelerate launch"
    )
    parser.add_argument(
        "--recipes", action="store_true", help="also apply the rules of the recipes here"
    )
    parser.add_argument("--json", action="store_true", help="print a list with one object per file")
    parser.add_argument("--strict", action="store_true", help="treat warnings as errors")
    return parser, parser.parse_args()


def check_call(parser: Parser, args: argparse.Namespace) -> None:
    """Exit with 64 if the arguments do not fit together, or do not name files."""
    if args.num_processes is not None and args.num_processes < 1:
        parser.error("--num_processes must be at least 1")
    for path in args.files:
        if not Path(path).is_file():
            parser.error(f"{path} is not a file")


def is_bad(report: dict, refused: tuple[str, ...]) -> bool:
    """Return whether a report has a finding of one of the refused severities."""
    return any(item["severity"] in refused for item in report["findings"])


def main() -> None:
    """Check the files, and exit with 65 if one of them has an error."""
    parser, args = parse_args()
    check_call(parser, args)
    reports = [report_on(path, args.num_processes, args.recipes) for path in args.files]
    if args.json:
        print(json.dumps(reports, indent=2))
    else:
        for report in reports:
            show(report)
    refused = ("error", "warning") if args.strict else ("error",)
    sys.exit(Exit.DATA if any(is_bad(report, refused) for report in reports) else 0)


if __name__ == "__main__":
    run_command(main)
