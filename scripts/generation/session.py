# SPDX-License-Identifier: Apache-2.0
"""What generate.py does with its command line: score a file, or answer prompts."""

import argparse
import math
import shlex
from collections.abc import Iterator
from pathlib import Path

from datasets import disable_progress_bars
from jinja2 import TemplateError
from transformers.utils import logging

from core.chat import ChatTemplate, Conversation
from exits import Exit, first_line, stop
from generation import loading, scoring
from generation.answering import Answerer, make_decoding
from generation.printing import PrintableStreamer
from generation.questions import Question, columns_of_run, load_questions
from generation.recorded import arguments_of_run


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
    yield from find_task_problem(args)
    for name in ("limit", "output", "json", "answer_pattern"):
        if getattr(args, name) is not None and args.file is None:
            yield f"--{name} needs --file"
    if args.answer_pattern is not None:
        yield from scoring.find_pattern_problem(args.answer_pattern)
    if args.device is not None:
        yield from loading.find_device_problem(args.device)


def find_task_problem(args: argparse.Namespace) -> Iterator[str]:
    """Yield what is wrong if there is not exactly one thing to do."""
    if args.prompt and args.file:
        yield "give --prompt or --file, not both"
    if not args.prompt and args.file is None:
        chat = shlex.join(["python", "scripts/chat.py", args.model_name_or_path])
        yield f"give --prompt or --file, or to converse with the model: {chat}"


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
    streamer = PrintableStreamer(answerer.template.tokenizer)
    for prompt in prompts:
        print(f"> {prompt}")
        if prompt.strip():
            answerer.answer([Conversation([{"role": "user", "content": prompt}])], streamer)


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
    source = loading.find_model(args.model_name_or_path)
    tokenizer = loading.load_chat_tokenizer(source)
    device = args.device or loading.default_device()
    model = loading.load_model(source, args.dtype, device, args.load_in_4bit)
    decoding = make_decoding(model, tokenizer, args.temperature)
    settings = arguments_of_run(Path(args.model_name_or_path)).get("chat_template_kwargs") or {}
    template = ChatTemplate(tokenizer, settings)
    return Answerer(model, template, decoding, args.max_new_tokens)


def run(args: argparse.Namespace) -> None:
    """Carry out a command line of generate.py; exit with a code and one line if that fails."""
    problems = list(find_problems(args))
    if problems:
        stop(Exit.USAGE, "; ".join(problems))
    check_output(args.output)
    check_output(args.json)
    logging.disable_progress_bar()
    disable_progress_bars()
    questions = []
    if args.file is not None:
        columns = columns_of_run(Path(args.model_name_or_path))
        questions = load_questions(args.file, args.limit, args.answer_pattern, columns)
    answerer = load_answerer(args)
    try:
        if questions:
            score_file(answerer, questions, args)
        else:
            answer_prompts(answerer, args.prompt)
    except KeyboardInterrupt:
        print()
    except (ValueError, TemplateError) as error:
        stop(Exit.DATA, first_line(error))
