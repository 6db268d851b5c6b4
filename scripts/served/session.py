# SPDX-License-Identifier: Apache-2.0
"""What check_server.py does with its command line: ask a server, and compare what it answers."""

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import Any

from datasets import disable_progress_bars
from transformers.utils import logging

from components import __version__
from components.conversations import Conversation
from exits import Exit, stop
from exporting.origin import Origin, read_origin
from generation import loading
from generation.session import check_output
from merging import comparing, prompts
from merging.checking import load_tokenizer
from merging.contestants import Asking, Contestant
from merging.writing import write_json
from served.client import Reply, Server, normalize_url
from served.comparing import Verdict, judge

PLAIN_ROLES = ("system", "user", "assistant")
GREETING = [{"role": "user", "content": "Hello"}]


def find_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield everything that is wrong with the command line."""
    yield from prompts.find_problems(args)
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
    if not load_tokenizer(source.tokenizer, source.revision).chat_template:
        stop(Exit.DATA, f"{source.name}: has no chat template, by which a server could be asked")
    server = find_server(args)
    ours = read_origin(source, args, PlainReader)
    reference = ours.answer()
    replies = ask_all(server, ours.asking)
    dtype = reference.dtype if args.dtype == "auto" else args.dtype
    verdict = judge(
        reference, replies, ours.tokenizer, relative_bound(args, dtype), args.max_new_tokens
    )
    report(ours, reference, verdict)
    if args.json is not None:
        write_json(args.json, to_json(args, server, ours, reference, replies, verdict))
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


def ask_all(server: Server, asking: Asking) -> list[Reply]:
    """Return the replies of a server to all prompts, one after another."""
    replies = []
    for prompt in asking.prompts:
        assert prompt.conversation is not None, "the trained model has a chat template"
        messages = prompt.conversation.messages
        replies.append(server.ask(messages, asking.max_new_tokens, asking.settings))
    return replies


# ---- Prompts ----
class PlainReader(prompts.Reader):
    """Leaves out conversations with tools or reasoning, which each server parses in its own way."""

    @property
    def taken(self) -> str:
        """Which rows are read, for the message that a file has none of them."""
        return f"{super().taken} and without tools, reasoning or parts of text"

    def is_short(self, prompt: prompts.Prompt) -> bool:
        """Return whether a prompt is plain, has at least one token, and is not too long."""
        if prompt.conversation is None or not is_plain(prompt.conversation):
            return False
        return super().is_short(prompt)


def is_plain(conversation: Conversation) -> bool:
    """Return whether a conversation has only texts, by roles that every server knows."""
    if conversation.tools:
        return False
    for message in conversation.messages:
        if message["role"] not in PLAIN_ROLES or set(message) != {"role", "content"}:
            return False
    return True


def relative_bound(args: argparse.Namespace, dtype: str) -> float:
    """Return the bound of a difference of logits, as a part of the largest logit."""
    if args.bound is not None:
        return args.bound
    return comparing.ROUNDING[dtype]


# ---- The report ----
def report(ours: Origin, reference: Contestant, verdict: Verdict) -> None:
    """Print the table of a verdict, and where the prompts come from."""
    for source, number in ours.sources.items():
        print(f"{number} prompts: {source}")
    for line in verdict.table(reference):
        print(line)


def to_json(
    args: argparse.Namespace,
    server: Server,
    ours: Origin,
    reference: Contestant,
    replies: Sequence[Reply],
    verdict: Verdict,
) -> dict[str, Any]:
    """Return what --json writes: the verdict, and every prompt with both answers."""
    answers = []
    for place, reply in enumerate(replies):
        text = ours.tokenizer.decode(reference.tokens[place], skip_special_tokens=True)
        answers.append(
            {
                "prompt": reference.rendered[place],
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
