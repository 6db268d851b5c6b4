#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
r"""Chat with trained folders, models or adapters, in the terminal or on a page in a browser.

    python scripts/chat.py runs/tiny/run
    python scripts/chat.py runs/lora --with_base --system "Answer briefly." --temperature 0.7
    python scripts/chat.py runs/a runs/b --load_in_4bit
    python scripts/chat.py runs/lora --with_base --web

Several models answer side by side. Each is asked the same: the conversation continues with the
answers of one of them, which /model changes. Adapters of one base share it in memory, and so does
the base itself. /help lists the other commands. /save appends the conversation to a file as a row,
on which recipes/llama.py trains. Prompts may also come through a pipe, one per line.

--web serves the page to this machine only. It needs pip install -r requirements-chat.txt.

Exit codes: 0 done, 64 usage, 65 data, 69 hub.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from common import Exit, Parser, add_loading_options, at_least_1, run_command, stop
from core.cli import read_json_object

ROWS = "saved_rows.jsonl"  # in the folder of the first model


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model_name_or_path", nargs="+", help="folders of models or of adapters, or hub ids")
    add("--with_base", action="store_true", help="also ask the model before training")
    add("--system", default="", help="system prompt")
    add("--temperature", type=float, default=0.0, help="0 always takes the likeliest token")
    add("--max_new_tokens", type=at_least_1, default=512, help="longest answer [%(default)s]")
    add(
        "--chat_template_kwargs",
        type=read_json_object,
        default={},
        help="variables of the chat template, as in '{\"enable_thinking\": false}' [those of the "
        "run]",
    )
    add_loading_options(parser)
    add("--save_to", type=Path, help="file of saved rows [saved_rows.jsonl in the first folder]")
    add("--web", action="store_true", help="show a page in the browser, for this machine only")
    add("--port", type=int, default=7860, help="where the page is served [%(default)s]")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.web and importlib.util.find_spec("gradio") is None:
        stop(Exit.USAGE, "--web needs gradio: pip install -r requirements-chat.txt")
    from chatting.conversation import History
    from chatting.speakers import load_speakers
    from chatting.terminal import Terminal
    from generation.loading import be_quiet

    be_quiet()
    speakers = load_speakers(args)
    folder = Path(args.model_name_or_path[0])
    save_to = args.save_to or (folder / ROWS if folder.is_dir() else Path(ROWS))
    history = History(system=args.system)
    if args.web:
        from chatting.page import serve

        serve(speakers, history, save_to, args.port)
        return
    # A byte that is not text would end the chat with a traceback
    sys.stdin.reconfigure(errors="replace")  # pyrefly: ignore[missing-attribute]  # a TextIO
    Terminal(speakers, history, save_to).run()


if __name__ == "__main__":
    run_command(main)
