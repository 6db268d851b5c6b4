#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
r"""Hold a running server against a trained folder: it is asked over HTTP, and has to say the same.

    python scripts/check_server.py runs/tiny/run --url http://127.0.0.1:8000/v1
    python scripts/check_server.py runs/lora --url http://127.0.0.1:8000/v1 --model my-lora
    python scripts/check_server.py runs/lora --model runs/merged --prompts held_out.jsonl

The server may be any that knows OpenAI's chat completions: vLLM, `transformers serve`,
llama-server, Ollama. It may serve the folder itself, its adapters, or what was merged or exported
from it. The answers are greedy, and compared as texts with those of the trained model, which is
loaded here; where two tokens are closer than rounding, either may come first. The numbers of tokens
of the prompts are compared too, and the log probabilities of tokens if the server returns them. Set
OPENAI_API_KEY if the server asks for a key.

Exit codes: 0 the same, 64 usage, 65 data, 69 no answer, 73 cannot write, 76 the server differs.
"""

import argparse
from pathlib import Path

import paths  # noqa: F401  makes recipes/ importable
from exits import run_command
from usage import Parser, add_prompt_options


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model_name_or_path", help="trained folder of a model or of adapters")
    add("--url", default="http://127.0.0.1:8000/v1", help="address of the API [%(default)s]")
    add("--model", help="name of the model on the server [the only one that it lists]")
    add_prompt_options(parser)
    add("--timeout", type=float, default=120, help="seconds to wait for an answer [%(default)s]")
    add(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="type in which the server computes, on which the bound depends; auto: that of the "
        "trained folder [%(default)s]",
    )
    add(
        "--bound",
        type=float,
        help="largest difference of a logit that is not an error, as a part of the largest logit "
        "[1e-4 for float32, 0.01 for float16, 0.05 for bfloat16]",
    )
    add("--json", type=Path, help="write the verdict and all answers here, as JSON")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    # Imported here since it takes seconds: a wrong flag and --help are answered at once
    from served.session import run

    run(args)


if __name__ == "__main__":
    run_command(main)
