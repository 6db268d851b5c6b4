# SPDX-License-Identifier: Apache-2.0
r"""Rehearse a recipe under a production YAML on CPU ranks, and prove that it shards as promised.

    python scripts/rehearse.py --config_file YAML recipes/llama.py --max_steps 3 ...
    python scripts/rehearse.py --config_file YAML --num_processes 4 recipes/llama.py ...
    python scripts/rehearse.py --config_file YAML --device cuda --num_processes 8 RECIPE.py ...
    python scripts/rehearse.py --config_file YAML --num_machines 2 --machine_rank 0 \
        --main_process_ip HOST --main_process_port 29500 recipes/llama.py --max_steps 3 ...

To rehearse a launch, replace `accelerate launch` with `python scripts/rehearse.py`: all options but
those below are the launcher's own. The recipe and the YAML are used unmodified. accelerate ignores
FSDP and DeepSpeed on a machine without an accelerator, so every rank starts through
`scripts/rehearsal/cpu_ranks.py`, which works around that. What has to differ from production is
printed first. Afterwards the shard report compares the bytes of parameters, gradients and optimizer
state that each rank really held with what the YAML promises
(`scripts/rehearsal/shard_report.py`).

Exit codes: that of the recipe if all ranks agree on it (0 done, 70 not finite, 73 cannot write, 75
stopped and saved) or one of them refuses (64 usage, 65 data, 69 no hub); 78 if the recipe succeeded
but the report says NOT AS PROMISED; otherwise 1. A wrong call of this tool ends with 64.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from common import Parser, run_command
from rehearsal.planning import Rehearsal, plan
from rehearsal.ranks import NOT_AS_PROMISED, launch
from rehearsal.shard_report import judge, table


def parse_args() -> tuple[Parser, argparse.Namespace]:
    """Return the parser, and device, report, config_file, options (of the launcher) and words."""
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s --config_file YAML [options] RECIPE.py [the recipe's own arguments]",
    )
    add = parser.add_argument
    add("--config_file", required=True, help="a YAML of accelerate_configs/")
    devices = ["auto", "cpu", "cuda"]
    add("--device", choices=devices, default="auto", help="auto: cuda if there is one")
    add("--report", type=Path, metavar="PATH.json", help="write the shard report here")
    words = sys.argv[1:]
    place = next((place for place, word in enumerate(words) if word.endswith(".py")), len(words))
    args, args.options = parser.parse_known_args(words[:place])
    args.words = words[place:]
    if not args.words:
        parser.error("name RECIPE.py")
    return parser, args


def report(folder: Path, rehearsal: Rehearsal) -> tuple[list[dict], str]:
    """Print what the ranks measured beside the YAML's promise; return the rows and a verdict."""
    paths = [folder / f"shards.{rank}" for rank in range(rehearsal.ranks)]
    why_not = ""
    if rehearsal.machines > 1 or "PET_NNODES" in os.environ:
        why_not = "it needs all ranks on one machine"
    elif not all(path.exists() for path in paths):
        why_not = (
            "the recipe took no optimizer step, or trained a model that accelerate does not wrap"
        )
    if why_not:
        print(f"shard report: not measured, since {why_not}")
        return [], "not measured"
    measurements = [json.loads(path.read_text()) for path in paths]
    rows = judge(measurements, rehearsal.facts, rehearsal.ranks_per_node)
    is_ok = all(row["verdict"].startswith("ok") for row in rows)  # or "ok, less"
    verdict = "ok" if is_ok else "NOT AS PROMISED"
    is_one = rehearsal.facts.engine == "single"
    print(f"shard report: {verdict}{' (one process: nothing to shard)' if is_one else ''}")
    print(table(rows))
    return rows, verdict


def main() -> int:
    parser, args = parse_args()
    for path in (args.config_file, args.words[0]):
        if not Path(path).is_file():
            parser.error(f"{path} does not exist")
    import torch  # Takes seconds, as does the launcher
    from accelerate.commands.launch import launch_command_parser

    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    launcher = launch_command_parser()
    launcher.error = parser.error
    options = launcher.parse_args([*args.options, *args.words])
    try:
        rehearsal = plan(args.config_file, device, options)
    except ValueError as error:
        parser.error(str(error))
    ranks = f"{rehearsal.ranks} {rehearsal.device} rank(s)"
    print(f"rehearsal of {args.words[0]} under {rehearsal.config_file}: {ranks}")
    for change in rehearsal.overrides:
        print(f"  {change.name}: {change.old} -> {change.new} ({change.reason})")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="rehearsal_") as name:
        folder = Path(name)
        command = rehearsal.command(args.options, args.words)
        code = launch(
            command, rehearsal.environment(folder), folder, rehearsal.ranks // rehearsal.machines
        )
        rows, verdict = report(folder, rehearsal)
    if args.report is not None:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        found = {"exit_code": code, "verdict": verdict, "rows": rows}
        args.report.write_text(json.dumps(found, indent=2) + "\n")
    if code:
        print(f"the recipe ended with exit code {code}")
    return NOT_AS_PROMISED if code == 0 and verdict == "NOT AS PROMISED" else code


if __name__ == "__main__":
    run_command(main)
