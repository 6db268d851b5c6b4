# SPDX-License-Identifier: Apache-2.0
"""Find what is wrong with an accelerate config: keys that are ignored, and settings without effect.

    python scripts/check_config.py accelerate_configs/fsdp.yaml --num_processes 8
    python scripts/check_config.py accelerate_configs/fsdp.yaml accelerate_configs/ddp.yaml --json
    python scripts/check_config.py default_config.yaml --recipes

FILE is any accelerate config, which is checked together with the DeepSpeed JSON that it points to,
or such a JSON by itself. The names of keys are asked of the installed packages; the rules are in
recipes/extras/configs/, and a recipe refuses its launcher's file by the same ones when it starts.

error      accelerate or DeepSpeed would stop, or would silently run something other than what is
           written
warning    it works, but it is slow, wasteful or surprising
info       what only the recipes here refuse; with --recipes an error, as when a recipe starts

Exit codes: 0 no error, 64 usage, 65 an error in a file, or with --strict a warning.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from common import Exit, Parser, run_command


def parse_args() -> tuple[Parser, argparse.Namespace]:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="a YAML for accelerate, or a DeepSpeed JSON")
    add("--num_processes", type=int, help="instead of the file's, as for accelerate launch")
    add("--recipes", action="store_true", help="also apply the rules of the recipes here")
    add("--json", action="store_true", help="print a list with one object per file")
    add("--strict", action="store_true", help="treat warnings as errors")
    return parser, parser.parse_args()


def find_faults(path: str, num_processes: int | None, for_recipes: bool) -> list[Any]:
    """Return the faults of a file, errors first."""
    # Only here, since they load accelerate, which takes seconds
    import yaml

    from core.config_names import Fault, find_unknown_keys, read_command
    from extras.configs.deepspeed_json import check_json
    from extras.configs.rules import check

    words = ["--config_file", path, "train.py"]
    if num_processes is not None:
        words = ["--num_processes", str(num_processes), *words]
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        if isinstance(content, dict) and "zero_optimization" in content:
            found = list(check_json(path, for_recipes))
        else:
            launch = read_command(words, ".")
            found = [*find_unknown_keys(path), *check(path, launch, for_recipes)]
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = f"cannot be read: {' '.join(str(error).split())}"
        found = [Fault(path, None, "file", reason, "the file that accelerate launch gets")]
    severities = ("error", "warning", "info")
    return sorted(found, key=lambda fault: severities.index(fault.severity))


def main() -> None:
    parser, args = parse_args()
    reports = []
    severities = set()
    for path in args.files:
        if not Path(path).is_file():
            parser.error(f"{path} is not a file")
        with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed's log is no part of JSON
            faults = find_faults(path, args.num_processes, args.recipes)
        reports.append({"file": path, "findings": list(map(dataclasses.asdict, faults))})
        severities |= {fault.severity for fault in faults}
        if not args.json:
            print(f"{path}: {'nothing found' if not faults else f'{len(faults)} found'}")
            for fault in faults:
                print(f"{fault.severity}: {fault}")
    if args.json:
        print(json.dumps(reports, indent=2))
    refused = {"error", "warning"} if args.strict else {"error"}
    sys.exit(Exit.DATA if severities & refused else 0)


if __name__ == "__main__":
    run_command(main)
