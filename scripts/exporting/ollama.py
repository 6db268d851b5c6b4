# SPDX-License-Identifier: Apache-2.0
"""Ollama's Modelfile: where the GGUF is, how a conversation is written, and what ends an answer.

https://docs.ollama.com/modelfile. Ollama itself is not run here: what it makes of a conversation is
computed by `turns.Turns.render` from the template in the file that was written.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from exits import Exit, stop
from exporting import turns
from exporting.turns import Renderer, Turns

NAME = "Modelfile"
QUOTES = '"""'


def find_turns(name: str, render: Renderer) -> Turns:
    """Return a chat template as turns. Raises SystemExit with 65 if Ollama cannot write it."""
    try:
        found = turns.find_turns(render)
        problem = turns.find_difference(found, render)
    except ValueError as error:
        refuse_template(name, str(error))
    if problem is not None:
        refuse_template(name, problem)
    return found


def refuse_template(name: str, problem: str) -> NoReturn:
    """End with 65, since Ollama cannot write a chat template."""
    stop(
        Exit.DATA,
        f"{name}: Ollama's templates cannot write its chat template: {problem[:300]}; export it "
        "--to gguf, and serve that with llama-server, which runs the chat template itself",
    )


def write_modelfile(
    folder: Path, gguf_name: str, found: Turns, stops: Sequence[str], num_ctx: int
) -> None:
    """Write a Modelfile.

    Args:
        stops: texts that end an answer.
        num_ctx: the most tokens of a prompt and its answer. Ollama's default is smaller than most
            models', and it cuts longer prompts without an error.
    """
    lines = [f"FROM ./{gguf_name}", f"TEMPLATE {QUOTES}{found.to_go()}{QUOTES}"]
    for text in stops:
        lines.append(f"PARAMETER stop {json.dumps(text, ensure_ascii=False)}")
    lines.append(f"PARAMETER num_ctx {num_ctx}")
    (folder / NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_template(path: Path) -> Turns:
    """Return the turns of a Modelfile. Raises SystemExit with 65 if it has no such template."""
    try:
        text = path.read_text(encoding="utf-8")
        template = re.search(rf"^TEMPLATE {QUOTES}(.*?){QUOTES}$", text, flags=re.DOTALL | re.M)
        if template is None:
            raise ValueError("no TEMPLATE")
        return turns.read_go(template[1])
    except (OSError, ValueError) as error:
        stop(Exit.DATA, f"{path}: {error}")


def read_stops(path: Path) -> list[str]:
    """Return the texts that end an answer by a Modelfile."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("PARAMETER stop "):
            found.append(json.loads(line.removeprefix("PARAMETER stop ")))
    return found
