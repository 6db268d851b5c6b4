# SPDX-License-Identifier: Apache-2.0
"""What generate.py does with its command line: score a file, or answer prompts."""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common import Exit, first_line, stop
from core.chat import Conversation
from core.data import tokenize_text
from generation import rows, serving
from generation.answering import (
    STOPPED,
    UNANSWERED,
    Answerer,
    decoding_options,
    print_answer,
    printable,
)
from generation.loading import be_quiet, find_source, load_model, load_tokenizer
from tasks.illustrated import IMAGE, IllustratedTemplate
from tasks.images import load_picture

SHOWN = 8  # answers that are printed


def find_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield everything that is wrong with the command line."""
    for name in ("limit", "output", "json", "answer_pattern", "server"):
        if getattr(args, name) is not None and args.file is None:
            yield f"--{name} needs --file"
    if args.image and (args.raw or args.file is not None):
        yield "--image is for --prompt: a row of --file names its images"
    if args.raw and args.file is not None:
        yield "--raw is for --prompt: rows have no text that is continued as it is"
    if (args.server is None) != (args.server_model is None):
        yield "--server and --server_model belong together"
    if args.server is not None and args.temperature > 0:
        yield "--server compares the likeliest answers: leave out --temperature"
    yield from rows.find_pattern_problem(args.answer_pattern)


def run(args: argparse.Namespace) -> None:
    """Carry out a command line of generate.py; exit with a code and one line if that fails."""
    problems = list(find_problems(args))
    if problems:
        stop(Exit.USAGE, "; ".join(problems))
    be_quiet()
    for path in (args.output, args.json):
        if path is not None:
            path.touch()  # Fails now, and not after an hour of answers
    source = find_source(args.model_name_or_path)
    questions = []
    if args.file is not None:
        asked = (args.file, source.arguments, args.limit, args.answer_pattern)
        questions = rows.load_questions(*asked)
    if args.raw:
        tokenizer = load_tokenizer(source, needs_template=False)
        continue_texts(load_model(source, args), tokenizer, args)
        return
    template = source.template()
    if args.image and not isinstance(template, IllustratedTemplate):
        stop(Exit.USAGE, "--image: this model reads no images")
    images = [partial(load_picture, path, Path(), False) for path in args.image]
    model = load_model(source, args)
    answerer = Answerer(model, template, args.temperature, args.max_new_tokens)
    try:
        if args.server is not None:
            compare_with_server(answerer, questions, args)
        elif questions:
            conversations = [question.conversation for question in questions]
            answers = answerer.answer(conversations, args.per_device_eval_batch_size)
            report(rows.judge(questions, answers, args.answer_pattern), args)
        else:
            answer_prompts(answerer, args.prompt, images)
    except UNANSWERED as error:
        stop(Exit.DATA, first_line(error))


# ---- --prompt ----
def answer_prompts(
    answerer: Answerer, prompts: Sequence[str], images: Sequence[Callable[[], Any]]
) -> None:
    """Answer each prompt on its own, behind all images, and print that while it is generated."""
    for prompt in prompts:
        print(f"> {prompt}")
        asked = {"role": "user", "content": IMAGE * len(images) + prompt}
        reply = print_answer(answerer, Conversation([asked], images=images))
        if reply.mark == STOPPED:
            return


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
def report(lines: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> None:
    """Print some answers and the exact match, and write --output and --json."""
    for line in lines[:: max(1, len(lines) // SHOWN)][:SHOWN]:  # from all over the file
        mark = "right" if line["correct"] else f"wrong, should be: {line['reference']}"
        print(printable(f"{line['messages'][-1]['content']} -> {line['answer']} ({mark})"))
    found = rows.score(lines)
    if args.output is not None:
        args.output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    for skill, share in found["skills"].items():
        print(f"{skill}: {share:.4f}")
    print("exact match: {exact_match:.4f} ({correct}/{rows})".format(**found))


def compare_with_server(
    answerer: Answerer, questions: Sequence[rows.Question], args: argparse.Namespace
) -> None:
    """Score a server's answers to all questions, and hold each against the model's here.

    Raises SystemExit with 69 if the server does not answer, with 76 if it says something else.
    """
    asked = [question for question in questions if rows.is_plain(question.conversation)]
    if not asked:
        stop(Exit.DATA, f"{args.file}: no row of texts alone, which is what a server is asked")
    replies = []
    differences = []
    for question in asked:
        reply = serving.ask(args.server, args.server_model, question.conversation, answerer)
        replies.append(serving.text_of(reply))
        differences += serving.find_difference(answerer, question.conversation, reply)
    report(rows.judge(asked, replies, args.answer_pattern), args)
    same = len(asked) - len(differences)
    print(f"answers that the model here would give too: {same} of {len(asked)}")
    if differences:
        stop(Exit.DIFFERS, printable(f"{args.server}: {differences[0]}"))
