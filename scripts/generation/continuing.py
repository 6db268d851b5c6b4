# SPDX-License-Identifier: Apache-2.0
"""What continue_text.py does with its command line: continue texts as they are."""

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from core.data import tokenize_text
from core.generation import greedy_options
from exits import Exit, stop
from generation import loading
from generation.printing import printable

LONGEST_REASON = 300  # characters


def run(args: argparse.Namespace) -> None:
    """Carry out a command line of continue_text.py; exit with 64 if there is no such model."""
    logging.disable_progress_bar()
    name = args.model_name_or_path
    loading.refuse_missing(name)
    device = args.device or loading.default_device()
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False)
        model = model.to(device).eval()
    except loading.LOAD_ERRORS as error:
        reason = " ".join(str(error).split())[:LONGEST_REASON]
        stop(Exit.USAGE, f"{name} cannot be loaded: {reason}")

    decoding = greedy_options(model)
    if args.temperature > 0:
        decoding = {"do_sample": True, "temperature": args.temperature}
    decoding |= {"max_new_tokens": args.max_new_tokens, "pad_token_id": tokenizer.eos_token_id}
    for prompt in args.prompt:
        tokens = torch.tensor([tokenize_text(prompt, tokenizer)], device=device)
        length = tokens.shape[1]
        output = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            **decoding,
        )
        text = tokenizer.decode(output[0, length:], skip_special_tokens=True)
        print(printable(f"{prompt} ->{text}"))
