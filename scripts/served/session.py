# SPDX-License-Identifier: Apache-2.0
"""What check_server.py does with its command line: ask a server, and compare what it answers."""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from datasets import disable_progress_bars
from transformers.utils import logging

from core import __version__
from exits import Exit, stop
from generation import loading, trained
from generation.session import check_output
from generation.trained import Answers, Prompt, Trained, read_trained
from served.client import Reply, Server, normalize_url
from served.comparing import Verdict, judge

PLAIN_ROLES = ("system", "user", "assistant")
GREETING = [{"role": "user", "content": "Hello"}]


def find_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield everything that is wrong with the command line."""
    yield from trained.find_problems(args)
    if not 0 < args.timeout < math.inf:
        yield "--timeout must be above 0"
    try:
        normalize_url(args.url)
    except ValueError as error:
        yield f"--url {error}"


def run(args: argparse.Namespace) -> None:
    """Carry out a command line of check_server.py; exit with a code and one line if that fails."""
    problems = list(find_problems(args))
    if problems:
        stop(Exit.USAGE, "; ".join(problems))
    check_output(args.json)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    disable_progress_bars()
    source = loading.find_model(args.model_name_or_path)
    loading.load_chat_tokenizer(source)
    server = find_server(args)
    ours = read_trained(source, args, is_plain)
    reference = ours.ask(ours.load())
    replies = ask_all(server, ours)
    dtype = reference.dtype if args.dtype == "auto" else args.dtype
    verdict = judge(
        reference, replies, ours.tokenizer, relative_bound(args, dtype), args.max_new_tokens
    )
    report(ours, reference, verdict)
    if args.json is not None:
        content = to_json(args, server, ours, reference, replies, verdict)
        text = json.dumps(content, indent=2, ensure_ascii=False)
        args.json.write_text(f"{text}\n", encoding="utf-8")
    if verdict.problems:
        more = ""
        if len(verdict.problems) > 1:
            more = f" (and {len(verdict.problems) - 1} more problems)"
        stop(Exit.DIFFERS, f"{server.url}: {verdict.problems[0]}{more}")
    print(f"{server.model} at {server.url} says what {args.model_name_or_path} says")


# ---- The server ----
def find_server(args: argparse.Namespace) -> Server:
    """Return the server that the command line names, after it answered a first question.

    Raises SystemExit with 64 or 69 if it does not.
    """
    server = Server(normalize_url(args.url), args.model or "", args.timeout)
    if args.model is None:
        names = server.list_models()
        if len(names) != 1:
            listed = ", ".join(names) or "none"
            stop(Exit.USAGE, f"{server.url} has several models, or none: {listed}; name --model")
        server = Server(server.url, names[0], args.timeout)
    server.ask(GREETING, 1, {})
    return server


def ask_all(server: Server, ours: Trained) -> list[Reply]:
    """Return the replies of a server to all prompts, one after another."""
    replies = []
    for prompt in ours.prompts:
        assert prompt.conversation is not None, "the trained model has a chat template"
        messages = prompt.conversation.messages
        replies.append(server.ask(messages, ours.max_new_tokens, ours.settings))
    return replies


# ---- Prompts ----
def is_plain(prompt: Prompt) -> bool:
    """Return whether a prompt has only texts, by roles that every server knows.

    Each server parses tools and reasoning in its own way.
    """
    if prompt.conversation is None or prompt.conversation.tools:
        return False
    for message in prompt.conversation.messages:
        if message["role"] not in PLAIN_ROLES or set(message) != {"role", "content"}:
            return False
    return True


def relative_bound(args: argparse.Namespace, dtype: str) -> float:
    """Return the bound of a difference of logits, as a part of the largest logit."""
    if args.bound is not None:
        return args.bound
    return trained.ROUNDING[dtype]


# ---- The report ----
def report(ours: Trained, reference: Answers, verdict: Verdict) -> None:
    """Print the table of a verdict, and where the prompts come from."""
    for source, number in ours.sources.items():
        print(f"{number} prompts: {source}")
    for line in verdict.table(reference):
        print(line)


def to_json(
    args: argparse.Namespace,
    server: Server,
    ours: Trained,
    reference: Answers,
    replies: Sequence[Reply],
    verdict: Verdict,
) -> dict[str, Any]:
    """Return what --json writes: the verdict, and every prompt with both answers."""
    answers = []
    for place, reply in enumerate(replies):
        text = ours.tokenizer.decode(reference.tokens[place], skip_special_tokens=True)
        answers.append(
            {
                "prompt": ours.prompts[place].text,
                "trained": text,
                "server": reply.text,
                "ended_by": reply.end,
            }
        )
    return {
        "made_by": f"scripts/check_server.py {__version__}",
        "trained": args.model_name_or_path,
        "server": server.url,
        "model": server.model,
        "prompts_from": ours.sources,
        **verdict.to_json(),
        "answers": answers,
    }
