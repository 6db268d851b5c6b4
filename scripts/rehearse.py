# SPDX-License-Identifier: Apache-2.0
"""Rehearse a recipe under a production YAML on CPU ranks, and prove that it shards as promised.

    python scripts/rehearse.py --config_file YAML recipes/llama.py --max_steps 3 ...
    python scripts/rehearse.py --config_file YAML --num_processes 4 recipes/llama.py ...
    python scripts/rehearse.py --config_file YAML --device cuda --num_processes 8 RECIPE.py ...
    python scripts/rehearse.py --config_file YAML --num_machines 2 --machine_rank 0 \\
        --main_process_ip HOST --main_process_port 29500 recipes/llama.py --max_steps 3 ...

The recipe and the YAML are used unmodified, through `accelerate launch`. accelerate ignores FSDP
and DeepSpeed on a machine without an accelerator, so every rank starts through
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

# Options of accelerate launch that say how several machines meet, and what becomes of their output
MEETING = (
    "machine_rank",
    "main_process_ip",
    "deepspeed_multinode_launcher",
    "rdzv_backend",
    "rdzv_conf",
    "max_restarts",
    "log_dir",
    "tee",
)


def parse_args() -> tuple[Parser, argparse.Namespace]:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config_file", required=True, help="a YAML of accelerate_configs/")
    add("--num_processes", type=int, help="ranks to start (CPU: 2, or what the mesh needs)")
    add(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: cuda if there is one",
    )
    precisions = ["no", "bf16", "fp16"]
    add("--mixed_precision", choices=precisions, help="instead of the YAML's (CPU: no)")
    add("--report", type=Path, metavar="PATH.json", help="write the shard report here")
    add("--main_process_port", type=int, default=0, help="default: 0, a free port")
    add("--num_machines", type=int, help="machines on which this command is started, each once")
    meeting = parser.add_argument_group("several machines", "passed on to accelerate launch")
    for name in MEETING:
        meeting.add_argument(f"--{name}")
    add("recipe", metavar="RECIPE.py", help="the script to run")
    add("recipe_args", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")
    return parser, parser.parse_args()


def device_of(device: str) -> str:
    """Return cpu or cuda; for auto, cuda if torch finds it."""
    if device != "auto":
        return device
    import torch  # only here, since it takes seconds to load

    return "cuda" if torch.cuda.is_available() else "cpu"


def show(args: argparse.Namespace, rehearsal: Rehearsal) -> None:
    """Print what is rehearsed, and what differs from production."""
    ranks = f"{rehearsal.ranks} {rehearsal.device} rank(s)"
    print(f"rehearsal of {args.recipe} under {rehearsal.config_file}: {ranks}")
    for change in rehearsal.overrides:
        print(f"  {change.name}: {change.old} -> {change.new} ({change.reason})")
    sys.stdout.flush()


def meeting_of(args: argparse.Namespace) -> list[str]:
    """Return the options about several machines that were given, as words of accelerate launch."""
    words = []
    for name in ("num_machines", *MEETING):
        if getattr(args, name) is not None:
            words += [f"--{name}", str(getattr(args, name))]
    return words


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
    for path in (args.config_file, args.recipe):
        if not Path(path).is_file():
            parser.error(f"{path} does not exist")
    wishes = (args.num_processes, args.mixed_precision, args.num_machines)
    try:
        rehearsal = plan(args.config_file, device_of(args.device), *wishes)
    except ValueError as error:
        parser.error(str(error))
    show(args, rehearsal)
    with tempfile.TemporaryDirectory(prefix="rehearsal_") as name:
        folder = Path(name)
        words = [args.recipe, *args.recipe_args]
        command = rehearsal.command(words, args.main_process_port, meeting_of(args))
        code = launch(command, rehearsal.environment(folder), folder, rehearsal.ranks_here)
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
