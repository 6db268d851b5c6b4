#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
r"""Answer prompts with a trained folder: a model, or adapters, which are loaded on their base.

    python scripts/generate.py runs/tiny/run --prompt "Spell the word lamp."
    python scripts/generate.py runs/tiny/run --file runs/tiny/data/test.jsonl --output answers.jsonl
    python scripts/generate.py runs/gsm8k/run --file test.jsonl --answer_pattern "#### (.+)" \
        --max_new_tokens 256
    python scripts/generate.py runs/tiny_vlm/run --image photo.jpg --prompt "What is it?"
    python scripts/generate.py runs/tiny_text/run --raw --prompt "Lamo is a baker in Frim."
    python scripts/generate.py runs/lora --file test.jsonl --server http://127.0.0.1:8000/v1 \
        --server_model my-lora

--file answers every row and scores exact match, per "skill" if the rows have one. The last line
printed looks like `exact match: 0.9421 (242/257)`. Prompts are built as in training,
from the columns that the run's --columns named. To converse with a model, use scripts/chat.py.

--raw continues a prompt as it is, as a model of recipes/mistral_pretrain.py does, without a chat
template. --server asks the rows of a running server too (vLLM, `transformers serve`, llama-server,
Ollama: whatever knows OpenAI's chat completions), and says which answers the folder would not give.
Set OPENAI_API_KEY if it asks for a key, and --dtype to the type in which it computes.

Exit codes: 0 done, 64 usage, 65 data, 69 hub or server, 76 the server differs.
"""

import argparse
from pathlib import Path

from common import Parser, add_loading_options, at_least_1, run_command


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model_name_or_path", help="folder of a model or of adapters, or a hub id")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt", action="append", help="answer this prompt; may be repeated")
    rows = ".jsonl, .json, .csv or .parquet"
    asked.add_argument("--file", type=Path, help=f"answer and score its rows: {rows}")
    add("--image", type=Path, action="append", default=[], help="images before each --prompt")
    add("--limit", type=at_least_1, help="answer only the first rows of --file, this many")
    add("--output", type=Path, help="write prompts, answers and references here, as JSON lines")
    add("--json", type=Path, help="write the score here, as JSON")
    add("--answer_pattern", help="regular expression; its group 1 is compared, not the whole text")
    add("--max_new_tokens", type=at_least_1, default=128, help="longest answer [%(default)s]")
    size = "--per_device_eval_batch_size"
    add(size, type=at_least_1, default=32, help="rows of --file at a time [%(default)s]")
    add("--temperature", type=float, default=0.0, help="0 always takes the likeliest token")
    add("--raw", action="store_true", help="continue each --prompt as it is")
    add("--server", help="address of an API to be compared, such as http://127.0.0.1:8000/v1")
    add("--server_model", help="name of the model on the server")
    add_loading_options(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    from generation.session import run

    run(args)


if __name__ == "__main__":
    run_command(main)
