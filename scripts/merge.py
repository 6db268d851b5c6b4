#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
r"""Make a folder of a whole model: of adapters and their base, or of a checkpoint.

    python scripts/merge.py runs/lora runs/merged
    python scripts/merge.py runs/qlora runs/merged --base 16bit --dtype bfloat16
    python scripts/merge.py runs/lora runs/merged --prompts held_out.jsonl
    python scripts/merge.py runs/large/checkpoint-500 runs/joined

peft merges the adapters. Those of a quantized base (QLoRA) are merged into the values that the
quantized base computes with, or into the base as it is: whichever has logits nearer to what was
trained, unless --base names one. What the model has no place for, such as a part that reads images,
is kept or left out as by the run itself, in a line that says so.

The merged folder is loaded again, and its logits on prompts are compared with those of the trained
model. A difference above its bound is an error.

In memory is one whole model: 16 GB for 8 billion parameters in bfloat16, twice as much in float32.

A checkpoint of a language model that is trained whole becomes the folder with which its run would
have ended there, with 5 GB in memory: for a model that no host has room for, or a run that will not
be continued.

Exit codes: 0 done, 64 usage, 65 data, 69 hub, 73 cannot write, 76 the merged model differs.
"""

import argparse
from pathlib import Path

from common import Parser, add_prompt_options, run_command


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "adapter",
        help="folder of adapters, the --output_dir of a run with --use_peft; or a checkpoint",
    )
    add("output", type=Path, help="new folder for the merged model")
    add(
        "--base",
        default="auto",
        choices=["auto", "16bit", "8bit", "4bit"],
        help="for a run on a quantized base: what to merge into; auto: the one whose logits are "
        "nearer to what was trained [%(default)s]",
    )
    add(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="type of the written weights; auto: as in the files of the base [%(default)s]",
    )
    add_prompt_options(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    from generation.merging import run

    run(args)


if __name__ == "__main__":
    run_command(main)
