# SPDX-License-Identifier: Apache-2.0
"""What chat.py does with its command line: converse in the terminal, or on a page."""

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from datasets import disable_progress_bars
from transformers.utils import logging

from chatting.conversation import History
from chatting.speakers import load_speakers
from chatting.terminal import Terminal
from common import Exit, stop

ROWS = "saved_rows.jsonl"  # in the folder of the first model
PORT = 7860  # gradio's own


def find_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield everything that is wrong with the command line."""
    if args.save_to is not None and args.save_to.suffix != ".jsonl":
        yield f"--save_to {args.save_to}: the name of the file must end in .jsonl"
    if len(set(args.model_name_or_path)) < len(args.model_name_or_path):
        yield "a model is named twice"
    if args.port is not None and not args.web:
        yield "--port needs --web"
    if args.web and importlib.util.find_spec("gradio") is None:
        yield "--web needs gradio: pip install -r requirements-chat.txt"


def run(args: argparse.Namespace) -> None:
    """Carry out a command line of chat.py; exit with a code and one line if that fails."""
    problems = list(find_problems(args))
    if problems:
        stop(Exit.USAGE, "; ".join(problems))
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # a prompt that is too long is an error of its own
    disable_progress_bars()
    speakers = load_speakers(args.model_name_or_path, args.with_base, args)
    folder = Path(args.model_name_or_path[0])
    save_to = args.save_to or (folder / ROWS if folder.is_dir() else Path(ROWS))
    history = History(system=args.system)
    if args.web:
        # Imported here since it takes seconds, and only the page needs it
        from chatting.page import serve

        serve(speakers, history, save_to, args.port or PORT)
        return
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    # A byte that is not text would end the chat with a traceback
    sys.stdin.reconfigure(errors="replace")  # pyrefly: ignore[missing-attribute]  # a TextIO
    Terminal(speakers, history, save_to, is_interactive).run()
