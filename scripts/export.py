#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Export a trained folder for another program: llama.cpp (GGUF) or Ollama.

    python scripts/export.py runs/merged exports/gguf --to gguf
    python scripts/export.py runs/merged exports/gguf --to gguf --outtype q8_0
    python scripts/export.py runs/merged exports/ollama --to ollama

It takes a whole model: what a run without adapters saved, or what scripts/merge.py made of one with
adapters. llama.cpp's own converter writes the GGUF (pip install -r requirements-export.txt). Its
vocabulary, end tokens and chat template are read back and compared with the folder. With
llama-cpp-python (pip install -r requirements-llama-cpp.txt, which compiles it) its tokens of
prompts and its logits are compared with the trained model's too.

ollama adds a Modelfile whose template writes conversations as in training; a chat template that
Ollama's language cannot write is refused. Types of fewer bits are made of the GGUF, by
llama-quantize or `ollama create --quantize q4_K_M`.

Exit codes: 0 done, 64 usage, 65 data, 69 hub, 73 cannot write, 76 the exported model differs.
"""

import argparse
from pathlib import Path

from common import Parser, add_prompt_options, run_command


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model_name_or_path", help="trained folder of a whole model")
    add("output", type=Path, help="new folder for the export")
    add("--to", required=True, choices=["gguf", "ollama"], help="what to export to")
    add(
        "--outtype",
        default="auto",
        choices=["auto", "f32", "f16", "bf16", "q8_0"],
        help="type of the weights in a GGUF; auto: as in the folder [%(default)s]",
    )
    add(
        "--pre_tokenizer",
        help="llama.cpp's name of the rules by which the tokenizer cuts words, such as gpt-2, for "
        "a vocabulary of your own, which llama.cpp's converter does not know",
    )
    add_prompt_options(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    from generation.exporting import run

    run(args)


if __name__ == "__main__":
    run_command(main)
