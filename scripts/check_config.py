"""Say in plain words what an accelerate config will really do, and find what is wrong with it.

    python scripts/check_config.py accelerate_configs/fsdp.yaml --num_processes 8
    python scripts/check_config.py accelerate_configs/fsdp.yaml accelerate_configs/ddp.yaml --json
    python scripts/check_config.py default_config.yaml --recipes --fix --output fixed.yaml

Takes any accelerate config, with the DeepSpeed JSON it points to, or such a JSON by itself. It only
reads: torch and accelerate are not loaded. The rules are in recipes/components/config_rules.py; a
recipe holds the file that its launcher read against the same ones when it starts.

error: accelerate or DeepSpeed would stop, or would silently run something else than what is
written. warning: it works, but costs or surprises. info: advice, and what only the recipes here
would refuse or have not been tested with. With --recipes the former is an error and the latter a
warning, as when a recipe starts.

Exit code: 0 no error, 64 a wrong call, 65 an error in a file, and with --strict for a warning too.
--fix writes the corrected file to NAME.fixed.yaml or --output, never over FILE, and ends with the
code of the corrected file. A DeepSpeed JSON that a YAML points to is fixed as a FILE of its own.
"""

import argparse
import io
import json
import os.path
import sys
from pathlib import Path

from configs.reports import report_on, report_on_fixed, show
from usage import Parser

BAD_FILE = 65


def parse_args() -> tuple[Parser, argparse.Namespace]:
    """Return the parser and the arguments of the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="a YAML for accelerate, or a DeepSpeed JSON"
    )
    parser.add_argument(
        "--num_processes", type=int, help="as for accelerate launch, instead of the file's"
    )
    parser.add_argument(
        "--recipes", action="store_true", help="for the recipes here: their rules count too"
    )
    parser.add_argument("--json", action="store_true", help="print a list with one object per file")
    parser.add_argument("--strict", action="store_true", help="warnings count as errors")
    parser.add_argument(
        "--fix", action="store_true", help="write the corrected file beside the old one"
    )
    parser.add_argument("--output", metavar="PATH", help="with --fix and one FILE: write it here")
    return parser, parser.parse_args()


def check_call(parser: Parser, args: argparse.Namespace) -> None:
    """End with 64 if the arguments do not go together, or name no files."""
    if args.output and (not args.fix or len(args.files) > 1):
        parser.error("--output goes with --fix and one FILE")
    if args.num_processes is not None and args.num_processes < 1:
        parser.error("--num_processes must be at least 1")
    for path in args.files:
        if not os.path.isfile(path):
            parser.error(f"{path} is not a file")
        if args.output and Path(args.output).exists() and Path(args.output).samefile(path):
            parser.error(f"--output is {path} itself")


def is_bad(report: dict, refused: tuple[str, ...]) -> bool:
    """Return whether a file has a finding of one of the severities that are refused."""
    return any(item["severity"] in refused for item in report["findings"])


def main() -> None:
    """Check the files, and end with 65 if one of them has an error."""
    parser, args = parse_args()
    check_call(parser, args)
    if args.fix:
        reports = [
            report_on_fixed(path, args.output, args.num_processes, args.recipes)
            for path in args.files
        ]
    else:
        reports = [report_on(path, args.num_processes, args.recipes) for path in args.files]
    if isinstance(sys.stdout, io.TextIOWrapper):  # YAML may hold what no terminal can show.
        sys.stdout.reconfigure(errors="backslashreplace")
    if args.json:
        print(json.dumps(reports, indent=2))
    else:
        for each in reports:
            show(each)
    refused = ("error", "warning") if args.strict else ("error",)
    sys.exit(BAD_FILE if any(is_bad(each, refused) for each in reports) else 0)


if __name__ == "__main__":
    main()
