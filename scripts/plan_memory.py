# SPDX-License-Identifier: Apache-2.0
r"""Will it fit? Plan the peak memory of a training run, by what takes it, before loading anything.

    python scripts/plan_memory.py --config_file accelerate_configs/fsdp.yaml --num_processes 8 \
        --gpu h200 recipes/llama.py --model_name_or_path meta-llama/Llama-3.1-8B \
        --max_length 4096 --gradient_checkpointing
    python scripts/plan_memory.py meta-llama/Llama-3.1-8B \
        --config_file accelerate_configs/ddp.yaml --use_peft
    python scripts/plan_memory.py config.json --gpu 24GB --num_gpus 4  # which YAMLs fit, by speed

To plan a launch, replace `accelerate launch` with `python scripts/plan_memory.py`. Instead of
recipes/llama.py you can name a model: a hub id, a folder or a config.json. All other arguments are
the recipe's own. No weights are loaded.

The plan covers the worst case: one optimizer step in which every row has --max_length tokens, all
supervised, and one batch of evaluation. The real recipe's step runs on fake tensors;
docs/planning.md states the errors.

Exit codes: 0 planned; 1 with --gpu: does not fit; 64 usage; 69 no hub.
"""

import argparse
import contextlib
import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

from common import Parser, at_least_1, run_command


def parse_args() -> tuple[dict[str, Any], Path | None]:
    """Return the fields of the request (planner/plan.py), and where to write the plan.

    What is no option of the planner is read as `accelerate launch` reads it.
    """
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s [options] MODEL|recipes/llama.py [the recipe's own arguments]",
    )
    add = parser.add_argument
    add("--config_file", help="the YAML to plan for [none: with --gpu, try all that may fit]")
    add("--num_processes", "--num_gpus", type=at_least_1, help="ranks, one per GPU [the YAML's]")
    add("--num_machines", type=at_least_1, help="hosts, each with as many GPUs [the YAML's]")
    add("--mixed_precision", choices=["no", "bf16", "fp16"], help="[the YAML's]")
    add(
        "--gpu",
        help="the card (e.g. h200, a100 or 4090), which counts what torch reports of it, or its "
        "memory (e.g. 24GB, of 10^9 bytes, or 80GiB, of 2^30) "
        "[none; the loss is computed in pieces as on 80GiB]",
    )
    add("--json", type=Path, metavar="PATH.json", help="write the plan here")
    options, words = parser.parse_known_args()
    if all(word.startswith("-") for word in words):
        parser.error("name MODEL or recipes/llama.py before the recipe's own arguments")
    if not options.config_file and not options.gpu:
        parser.error(
            "give --config_file to plan one strategy, or --gpu to choose among all strategies"
        )
    from accelerate.commands.launch import launch_command_parser  # Takes seconds

    launcher = launch_command_parser()
    launcher.error = parser.error
    launch = launcher.parse_args(words)
    request = vars(options)
    path = request.pop("json")
    mesh = [name for name in launch.nondefault if name.startswith("parallelism_config_")]
    request["mesh"] = {name: getattr(launch, name) for name in mesh}
    request["model"] = launch.training_script
    request["words"] = launch.training_script_args
    return request, path


def main() -> int:
    """Answer the request of the command line; return the exit code."""
    fields, path = parse_args()
    import transformers  # Takes seconds, as do the planner's own imports

    from core.exits import End
    from planner.answer import answer
    from planner.plan import Request

    # What they say of fake tensors is of no use
    transformers.logging.set_verbosity_error()
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    libraries = io.StringIO()
    try:
        with contextlib.redirect_stdout(libraries), contextlib.redirect_stderr(libraries):
            found, text, fits = answer(Request(**fields))
    except End as end:
        print(f"plan_memory.py: {end.why}", file=sys.stderr)
        return end.code
    if path is not None:
        path.write_text(json.dumps(found, indent=2) + "\n")
    print(text)
    return 0 if fits else 1


if __name__ == "__main__":
    run_command(main)
