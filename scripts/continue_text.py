#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Continue a text with a model, or adapters, that recipes/mistral_pretrain.py trained.

    python scripts/continue_text.py runs/tiny_text/run --prompt "Lamo is a baker in Frim."

The text is continued as it is. For a chat model use scripts/generate.py, which applies the chat
template.

Exit codes: 0 done, 64 usage or no model.
"""

import argparse

import paths  # noqa: F401  makes recipes/ importable
from exits import run_command
from usage import Parser


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model_name_or_path", help="folder of a model or of adapters, or a hub id")
    add("--prompt", action="append", required=True, help="text to continue; may be repeated")
    add("--max_new_tokens", type=int, default=64, help="longest continuation [%(default)s]")
    add("--temperature", type=float, default=0.0, help="0 always takes the likeliest token")
    add("--device", help="cpu, cuda, cuda:1 [cuda if there is a GPU, or else cpu]")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    # Imported here since it takes seconds: a wrong flag and --help are answered at once
    from generation.continuing import run

    run(args)


if __name__ == "__main__":
    run_command(main)
