#!/usr/bin/env python
"""Continue a text with a model, or adapters, that recipes/mistral_pretrain.py trained.

    python scripts/continue_text.py runs/tiny_text/run --prompt "Lamo is a baker in Frim."

The text is continued as it is. For a chat model use scripts/generate.py, which applies the chat
template.

Exit codes: 0 done, 64 usage or no model.
"""

import argparse
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from exits import Exit, stop
from generation import loading
from usage import Parser

LONGEST_REASON = 300  # characters


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model_name_or_path", help="folder of a model or of adapters, or a hub id")
    add("--prompt", action="append", required=True, help="text to continue; may be repeated")
    add("--max_new_tokens", type=int, default=64, help="longest continuation [%(default)s]")
    add("--temperature", type=float, default=0.0, help="0 always takes the likeliest token")
    add("--device", default=loading.default_device(), help="cpu, cuda, cuda:1 [%(default)s]")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    logging.disable_progress_bar()
    name = args.model_name_or_path
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name).to(args.device).eval()
    except loading.LOAD_ERRORS as error:
        reason = " ".join(str(error).split())[:LONGEST_REASON]
        stop(Exit.USAGE, f"{name} cannot be loaded: {reason}")

    decoding = {"do_sample": False}
    if args.temperature > 0:
        decoding = {"do_sample": True, "temperature": args.temperature}
    for prompt in args.prompt:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        length = inputs["input_ids"].shape[1]
        output = model.generate(
            **inputs.to(args.device),
            max_new_tokens=args.max_new_tokens,
            pad_token_id=tokenizer.eos_token_id,
            **decoding,
        )
        text = tokenizer.decode(output[0, length:], skip_special_tokens=True)
        print(f"{prompt} ->{text}")


if __name__ == "__main__":
    main()
