#!/usr/bin/env python
"""Continue a text with a trained folder, a model or adapters: what recipes/mistral_pretrain.py has taught.

    python scripts/continue_text.py runs/tiny_text/run --prompt "Lamo is a baker in Frim. Every morning"

The text is not framed as a conversation (scripts/generate.py does that). Exit codes: 0 done, 64 usage or no model.
"""

import argparse

import torch
from exits import stop
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda message: stop(64, message)
    parser.add_argument("model_name_or_path", help="folder of a model or of adapters, or hub id")
    parser.add_argument(
        "--prompt",
        action="append",
        required=True,
        help="begin of a text; may be given several times",
    )
    parser.add_argument("--max_new_tokens", type=int, default=64, help="longest continuation")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 always takes the likeliest token"
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1"
    )
    return parser.parse_args()


def main():
    args = parse_args()
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
        model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path).to(args.device).eval()
    except (OSError, ValueError, RuntimeError) as error:
        stop(
            64, f"{args.model_name_or_path} cannot be loaded: {' '.join(str(error).split())[:300]}"
        )
    sampling = (
        {"do_sample": True, "temperature": args.temperature}
        if args.temperature
        else {"do_sample": False}
    )
    for prompt in args.prompt:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(args.device)
        length = inputs["input_ids"].shape[1]
        output = model.generate(
            **inputs,
            max_new_tokens=args.max_new_tokens,
            pad_token_id=tokenizer.eos_token_id,
            **sampling,
        )
        print(f"{prompt} ->{tokenizer.decode(output[0, length:], skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
