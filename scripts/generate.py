#!/usr/bin/env python
r"""Answer prompts with a trained folder: a model, or adapters, which are loaded on their base.

    python scripts/generate.py runs/tiny/run --prompt "Spell the word lamp."
    python scripts/generate.py runs/tiny/run               # chat until Ctrl-D; an empty line resets
    python scripts/generate.py runs/tiny/run --file runs/tiny/data/test.jsonl --output answers.jsonl
    python scripts/generate.py runs/gsm8k/run --file test.jsonl --answer_pattern "#### (.+)" \
        --max_new_tokens 256

--file answers every row and scores exact match, per "skill" if the rows have one. The last line
printed looks like `exact match: 0.9421 (242/257)`. Prompts are built as in training.

Exit codes: 0 done, 64 usage, 65 data, 69 hub, 73 cannot write.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

from datasets import disable_progress_bars
from jinja2 import TemplateError
from transformers import TextStreamer
from transformers.utils import logging

from exits import Exit, first_line, stop
from generation import loading, scoring
from generation.answering import Answerer, make_decoding
from generation.questions import Question, load_questions
from usage import Parser


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model_name_or_path", help="folder of a model or of adapters, or a hub id")
    add("--prompt", action="append", help="answer this prompt and exit; may be repeated")
    add("--file", type=Path, help="answer and score its rows: .jsonl, .json, .csv or .parquet")
    add("--limit", type=int, help="answer only the first rows of --file, this many")
    add("--output", type=Path, help="write prompts, answers and references here, as JSON lines")
    add("--json", type=Path, help="write the score here, as JSON")
    add("--answer_pattern", help="regular expression; its group 1 is compared, not the whole text")
    add("--max_new_tokens", type=int, default=128, help="longest answer [%(default)s]")
    add(
        "--per_device_eval_batch_size",
        type=int,
        default=32,
        help="rows of --file at a time [%(default)s]",
    )
    add("--temperature", type=float, default=0.0, help="0 always takes the likeliest token")
    add(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="type of the weights; auto: as they were saved [%(default)s]",
    )
    add("--device", default=loading.default_device(), help="cpu, cuda, cuda:1 [%(default)s]")
    add("--load_in_4bit", action="store_true", help="nf4 weights (bitsandbytes)")
    return parser.parse_args()


def find_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield everything that is wrong with the command line."""
    if args.max_new_tokens < 1:
        yield "--max_new_tokens must be at least 1"
    if args.per_device_eval_batch_size < 1:
        yield "--per_device_eval_batch_size must be at least 1"
    if args.limit is not None and args.limit < 1:
        yield "--limit must be at least 1"
    if not 0 <= args.temperature < math.inf:
        yield "--temperature must be 0 (greedy) or more"
    if args.prompt and args.file:
        yield "give --prompt or --file, not both"
    for name in ("limit", "output", "json", "answer_pattern"):
        if getattr(args, name) is not None and args.file is None:
            yield f"--{name} needs --file"
    if args.answer_pattern is not None:
        yield from scoring.find_pattern_problem(args.answer_pattern)
    yield from loading.find_device_problem(args.device)


def check_output(path: Path | None) -> None:
    """Exit with 73 if a file cannot be written: now, and not after an hour of answers."""
    if path is None:
        return
    try:
        path.open("a").close()
    except OSError as error:
        stop(Exit.CANNOT_WRITE, f"cannot write {path}: {error.strerror}")


def answer_prompts(answerer: Answerer, prompts: list[str]) -> None:
    """Stream an answer to each prompt, on its own."""
    streamer = TextStreamer(answerer.tokenizer, skip_prompt=True, skip_special_tokens=True)
    for prompt in prompts:
        print(f"> {prompt}")
        if prompt.strip():
            answerer.answer([[{"role": "user", "content": prompt}]], streamer)


def chat(answerer: Answerer) -> None:
    """Hold a conversation with stdin until it ends; an empty line starts a new one."""
    streamer = TextStreamer(answerer.tokenizer, skip_prompt=True, skip_special_tokens=True)
    messages = []
    while True:
        prompt = input("> ")
        if not prompt.strip():
            messages = []
            continue
        messages.append({"role": "user", "content": prompt})
        (text,) = answerer.answer([messages], streamer)
        messages.append({"role": "assistant", "content": text})


def score_file(answerer: Answerer, questions: list[Question], args: argparse.Namespace) -> None:
    """Answer all questions, print some of them and the exact match, write --output and --json."""
    batch_size = args.per_device_eval_batch_size
    answered = scoring.answer_all(answerer, questions, batch_size, args.answer_pattern)
    scoring.print_answers(answered)
    if args.output is not None:
        scoring.write_answers(args.output, answered)
    if args.json is not None:
        scoring.write_score(args.json, answered)
    scoring.print_score(answered)


def load_answerer(args: argparse.Namespace) -> Answerer:
    """Return the model that the command line names, ready to answer."""
    source = loading.find_source(args.model_name_or_path)
    tokenizer = loading.load_chat_tokenizer(source)
    model = loading.load_model(source, args.dtype, args.device, args.load_in_4bit)
    decoding = make_decoding(model, tokenizer, args.temperature)
    return Answerer(model, tokenizer, decoding, args.max_new_tokens)


def main() -> None:
    args = parse_args()
    problems = list(find_problems(args))
    if problems:
        stop(Exit.USAGE, "; ".join(problems))
    check_output(args.output)
    check_output(args.json)
    logging.disable_progress_bar()
    disable_progress_bars()
    questions = []
    if args.file is not None:
        questions = load_questions(args.file, args.limit, args.answer_pattern)
    answerer = load_answerer(args)
    try:
        if questions:
            score_file(answerer, questions, args)
        elif args.prompt:
            answer_prompts(answerer, args.prompt)
        else:
            chat(answerer)
    except (EOFError, KeyboardInterrupt):
        print()
    except (ValueError, TemplateError) as error:
        stop(Exit.DATA, first_line(error))


if __name__ == "__main__":
    main()
