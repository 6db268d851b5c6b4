# SPDX-License-Identifier: Apache-2.0
"""What export.py does with its command line: export to one of the programs, with a receipt."""

import argparse
from collections.abc import Iterator

from datasets import disable_progress_bars
from transformers.utils import logging

from exits import Exit, stop
from exporting import gguf_folder, vllm
from exporting.origin import read_config, read_origin
from generation.loading import Source, find_model
from merging import prompts, writing
from merging.checking import load_tokenizer


def find_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield everything that is wrong with the command line."""
    yield from prompts.find_problems(args)
    if args.to == "vllm" and args.outtype != "auto":
        yield "--outtype is for gguf and ollama; vLLM loads the weights as they are"


def run(args: argparse.Namespace) -> None:
    """Carry out a command line of export.py; exit with a code and one line if that fails."""
    problems = list(find_problems(args))
    if problems:
        stop(Exit.USAGE, "; ".join(problems))
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    disable_progress_bars()
    writing.check_output(args.output)
    source = find_model(args.model_name_or_path)
    if args.to == "vllm":
        vllm.check(source, read_config(source), load_tokenizer(source.tokenizer, source.revision))
        vllm.export(read_origin(source, args), args.output, args.bound)
    else:
        refuse_adapters(source, args)
        gguf_folder.check_tools(args.outtype)
        origin = read_origin(source, args)
        wishes = gguf_folder.Wishes(args.outtype, args.to == "ollama", args.bound)
        gguf_folder.export(origin, args.output, wishes)


def refuse_adapters(source: Source, args: argparse.Namespace) -> None:
    """End with 64 for adapters, which llama.cpp would apply to another base's GGUF."""
    if source.base is not None:
        stop(
            Exit.USAGE,
            f"{source.name}: adapters; merge them first: python scripts/merge.py {source.name} "
            f"{args.output}-merged",
        )
