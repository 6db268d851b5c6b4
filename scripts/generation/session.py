# SPDX-License-Identifier: Apache-2.0
"""What generate.py does with its command line: score a file, or answer prompts."""

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars
from jinja2 import TemplateError
from transformers.utils import logging

from common import Exit, first_line, stop
from core.chat import ChatTemplate, Conversation
from core.data import tokenize_text
from generation import loading, rows, serving
from generation.answering import (
    Answerer,
    RunningAnswer,
    decoding_options,
    print_parts,
    printable,
)
from generation.rows import Answered, Question, answer_all


def find_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield everything that is wrong with the command line."""
    if args.prompt and args.file:
        yield "give --prompt or --file, not both"
    if not args.prompt and args.file is None:
        chat = shlex.join(["python", "scripts/chat.py", args.model_name_or_path])
        yield f"give --prompt or --file, or to converse with the model: {chat}"
    for name in ("limit", "output", "json", "answer_pattern", "server"):
        if getattr(args, name) is not None and args.file is None:
            yield f"--{name} needs --file"
    if args.raw and args.file is not None:
        yield "--raw is for --prompt: rows have no text that is continued as it is"
    if (args.server is None) != (args.server_model is None):
        yield "--server and --server_model belong together"
    if args.server is not None and args.temperature > 0:
        yield "--server compares the likeliest answers: leave out --temperature"
    if args.answer_pattern is not None:
        yield from rows.find_pattern_problem(args.answer_pattern)


def run(args: argparse.Namespace) -> None:
    """Carry out a command line of generate.py; exit with a code and one line if that fails."""
    problems = list(find_problems(args))
    if problems:
        stop(Exit.USAGE, "; ".join(problems))
    logging.disable_progress_bar()
    disable_progress_bars()
    for path in (args.output, args.json):
        check_writable(path)
    name = args.model_name_or_path
    questions = []
    if args.file is not None:
        columns = rows.columns_of(loading.arguments_of_run(name))
        questions = rows.load_questions(args.file, args.limit, args.answer_pattern, columns)
    source = loading.find_source(name)
    tokenizer = loading.load_tokenizer(source, needs_template=not args.raw)
    device = args.device or loading.default_device()
    model = loading.load_model(source, args.dtype, device, args.load_in_4bit)
    try:
        if args.raw:
            continue_texts(model, tokenizer, args)
            return
        template = ChatTemplate(tokenizer, loading.template_settings_of(name))
        answerer = Answerer(model, template, args.temperature, args.max_new_tokens)
        if args.server is not None:
            compare_with_server(answerer, questions, args)
        elif questions:
            score_file(answerer, questions, args)
        else:
            answer_prompts(answerer, args.prompt)
    except KeyboardInterrupt:
        print()
    except (ValueError, TemplateError) as error:
        stop(Exit.DATA, first_line(error))


def check_writable(path: Path | None) -> None:
    """Exit with 73 if a file cannot be written: now, and not after an hour of answers."""
    if path is None:
        return
    try:
        path.open("a").close()
    except OSError as error:
        stop(Exit.CANNOT_WRITE, f"cannot write {path}: {error.strerror}")


# ---- --prompt ----
def answer_prompts(answerer: Answerer, prompts: Sequence[str]) -> None:
    """Answer each prompt on its own, and print that while it is generated."""
    for prompt in prompts:
        print(f"> {prompt}")
        if prompt.strip():
            conversation = Conversation([{"role": "user", "content": prompt}])
            running = RunningAnswer(answerer, conversation)
            print_parts(running)
            print()
            running.result()


@torch.inference_mode()
def continue_texts(model: Any, tokenizer: Any, args: argparse.Namespace) -> None:
    """Continue texts as they are, without a chat template."""
    options = decoding_options(model, args.temperature)
    options |= {"max_new_tokens": args.max_new_tokens, "pad_token_id": tokenizer.pad_token_id}
    for prompt in args.prompt:
        tokens = torch.tensor([tokenize_text(prompt, tokenizer)], device=model.device)
        mask = torch.ones_like(tokens)
        output = model.generate(input_ids=tokens, attention_mask=mask, **options)
        text = tokenizer.decode(output[0, tokens.shape[1] :], skip_special_tokens=True)
        print(printable(f"{prompt} ->{text}"))


# ---- --file ----
def score_file(answerer: Answerer, questions: Sequence[Question], args: argparse.Namespace) -> None:
    """Answer all questions, print some of them and the exact match, write --output and --json."""
    answers = answer_all(answerer, questions, args.per_device_eval_batch_size)
    answered = judge(questions, answers, args.answer_pattern)
    rows.print_answers(answered)
    write(answered, args)
    rows.print_score(answered)


def judge(
    questions: Sequence[Question], answers: Sequence[str], pattern: str | None
) -> list[Answered]:
    """Return answers with whether they are right."""
    answered = []
    for question, answer in zip(questions, answers, strict=True):
        correct = rows.is_match(answer, question.reference, pattern)
        answered.append(Answered(question, answer, correct))
    return answered


def write(answered: Sequence[Answered], args: argparse.Namespace) -> None:
    """Write the answers to --output, one JSON object for each, and the score to --json."""
    if args.output is not None:
        lines = [json.dumps(one.as_row()) + "\n" for one in answered]
        args.output.write_text("".join(lines), encoding="utf-8")
    if args.json is not None:
        score = json.dumps(rows.score(answered), indent=2)
        args.json.write_text(score + "\n", encoding="utf-8")


# ---- --server ----
def compare_with_server(
    answerer: Answerer, questions: Sequence[Question], args: argparse.Namespace
) -> None:
    """Score a server's answers to all questions, and hold each against the model's here.

    Raises SystemExit with 69 if the server does not answer, with 76 if it says something else.
    """
    asked = [question for question in questions if rows.is_plain(question.conversation)]
    if not asked:
        stop(Exit.DATA, f"{args.file}: no row without tools, which is what a server is asked")
    served = serving.ask_server(args.server, args.server_model, asked, answerer)
    ours = answer_all(answerer, asked, args.per_device_eval_batch_size)
    answered = judge(asked, [one.text.strip() for one in served], args.answer_pattern)
    differences = []
    for question, here, there in zip(asked, ours, served, strict=True):
        problem = serving.find_difference(answerer, question, here, there)
        if problem is not None:
            differences.append(problem)
    rows.print_answers(answered)
    write(answered, args)
    rows.print_score(answered)
    same = sum(here == there.answer for here, there in zip(ours, answered, strict=True))
    print(f"the same answer as here: {same} of {len(asked)}")
    if differences:
        count = f"{len(differences)} of {len(asked)} answers differ"
        stop(Exit.DIFFERS, printable(f"{args.server}: {count}; the first: {differences[0]}"))
