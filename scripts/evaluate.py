#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
r"""Evaluate trained folders on rows or tasks of lm-eval, beside the base that they began with.

    python scripts/evaluate.py runs/mine --with_base --rows held_out.jsonl
    python scripts/evaluate.py runs/mine --with_base --tasks gsm8k,hellaswag --limit 200
    python scripts/evaluate.py runs/a runs/b --rows test.jsonl --answer_pattern "#### (.+)"

A folder is a model, or adapters, which are loaded on their base. --rows is a file of your
own, without the hub: exact match of greedy answers as scripts/generate.py counts it, and the loss
of the recipe's evaluation.
--tasks are lm-eval's own, or YAML files of yours (pip install -r requirements-eval.txt). A table is
printed; the folder of --output_dir gets the numbers as results.json, and the answers in samples/.

Exit codes: 0 done, 64 usage, 65 data, 69 hub.
"""

import argparse
from pathlib import Path

from common import Parser, add_loading_options, at_least_1, run_command


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="folder of a run or of a model, or a hub id")
    add("--with_base", action="store_true", help="evaluate the base of each run before it")
    add("--rows", type=Path, help="your rows: .jsonl, .json, .csv or .parquet")
    add("--answer_pattern", help="regular expression; its group 1 is compared, not the whole text")
    add("--max_new_tokens", type=at_least_1, default=128, help="longest answer [%(default)s]")
    add("--tasks", help="lm-eval's tasks, groups or tags, or YAML files, separated by commas")
    add("--num_fewshot", type=int, help="examples in the prompts of --tasks [as each task says]")
    add(
        "--apply_chat_template",
        nargs="?",
        const="true",
        default="auto",
        choices=["auto", "true", "false"],
        help="ask --tasks as a chat; auto: if the tokenizer has a template. Rows always are [auto]",
    )
    add("--limit", type=at_least_1, help="evaluate only the first rows of each task, this many")
    add("--batch_size", type=at_least_1, default=32, help="rows at a time [%(default)s]")
    add("--output_dir", type=Path, help="folder of the results [evaluations/ and the time]")
    add_loading_options(parser)
    add(
        "--confirm_run_unsafe_code",
        action="store_true",
        help="allow tasks that run code which a model wrote, or metrics that are code on the hub",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    from evaluation.session import run

    run(args)


if __name__ == "__main__":
    run_command(main)
