# SPDX-License-Identifier: Apache-2.0
r"""Will it fit? Plan the peak memory of a training run, by what takes it, before loading anything.

    python scripts/plan_memory.py --config_file accelerate_configs/fsdp.yaml --num_processes 8 \
        --gpu h200 recipes/llama.py --model_name_or_path meta-llama/Llama-3.1-8B \
        --max_length 4096 --gradient_checkpointing
    python scripts/plan_memory.py meta-llama/Llama-3.1-8B \
        --config_file accelerate_configs/ddp.yaml --use_peft
    python scripts/plan_memory.py config.json --gpu 24GB --num_gpus 4  # which YAMLs fit, by speed

To plan a launch, replace `accelerate launch` with `python scripts/plan_memory.py`. Instead of the
recipe you can name a model: a hub id, a folder or a config.json. All other arguments are the
recipe's own. No weights are loaded.

The plan covers the worst case: one optimizer step in which every row has --max_length tokens, all
supervised (--longest changes that), and one batch of evaluation. The real
recipe's step runs on fake tensors; docs/planning.md states the errors.

Exit codes: 0 planned; 1 with --gpu: does not fit; 64 usage; 69 no hub; 73 cannot write.
"""

import argparse
import gc
import sys
from typing import Any

from common import Parser, run_command

# Sizes of a mesh, which `accelerate launch` takes as --parallelism_config_KEY
SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")


def parse_args() -> dict[str, Any]:
    """Return the fields of the request (planner/request.py) that the command line makes.

    What is no option of the planner is read as `accelerate launch` reads it.
    """
    parser = make_parser()
    options, words = parser.parse_known_args()
    if all(word.startswith("-") for word in words):
        parser.error("name MODEL or recipes/llama.py before the recipe's own arguments")
    from accelerate.commands.launch import launch_command_parser  # Takes seconds

    launcher = launch_command_parser()
    launcher.error = parser.error
    launch = launcher.parse_args(words)
    sizes = {}
    for key in SIZES:
        size = vars(options).pop(f"parallelism_config_{key}")
        if size is not None:
            sizes[key] = size
    model = launch.training_script
    return {"model": model, "words": launch.training_script_args, "sizes": sizes, **vars(options)}


def make_parser() -> Parser:
    """Return the parser of the planner's own options."""
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s [options] MODEL|recipes/llama.py [the recipe's own arguments]",
    )
    parser.add_argument(
        "--config_file",
        help="the YAML to plan for [none: with --gpu, try all of accelerate_configs/]",
    )
    parser.add_argument(
        "--num_processes", "--num_gpus", type=int, help="ranks, one per GPU [the YAML's]"
    )
    parser.add_argument(
        "--num_machines", type=int, help="hosts, all with the same number of GPUs [the YAML's]"
    )
    for key in SIZES:
        parser.add_argument(f"--parallelism_config_{key}", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--mixed_precision", choices=["no", "bf16", "fp16"], help="[the YAML's]")
    parser.add_argument(
        "--gpu",
        help="the card (e.g. h200, a100 or 4090), which counts what torch reports of it, or its "
        "memory (e.g. 24GB, of 10^9 bytes, or 80GiB, of 2^30) "
        "[none; the loss is computed in pieces as on 80GiB]",
    )
    parser.add_argument(
        "--longest", type=int, help="tokens of the longest row, if fewer than --max_length"
    )
    parser.add_argument(
        "--json", metavar="PATH.json", help="write the plan here; -: to the terminal"
    )
    return parser


def main() -> int:
    """Answer the request of the command line; return the exit code.

    The imports take seconds. A fifth of that time would go to garbage collection, which finds
    nothing to collect.
    """
    request = parse_args()
    gc.disable()
    from planner.answer import answer
    from planner.request import Request, UnplannableError

    gc.freeze()
    gc.enable()
    try:
        return answer(Request(**request))
    except UnplannableError as error:
        print(f"plan_memory.py: {error}", file=sys.stderr)
        return error.code


if __name__ == "__main__":
    run_command(main)
