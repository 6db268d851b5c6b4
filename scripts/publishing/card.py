# SPDX-License-Identifier: Apache-2.0
"""The card of a run's result, README.md, from what the run has recorded in its folder.

A card is for other people: it has no path of this machine, no token and no row of the data. The
license is left to the user, who knows it.
"""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from generation.loading import RUN, run_of
from publishing.private_text import Cleaner, is_hub_id, words_of

CARD = "README.md"
METRICS = "metrics.jsonl"
STUB = ("# Model Card for Model ID", "[More Information Needed]")  # peft writes both
# The line by which a run of earlier versions marked a card that it had written
MARKER = "<!-- Written by accelerate-recipes: remove this line to keep changes of your own. -->"
PRIVATE_LINES = ("sample", "warning")  # Lines of the summary that a card leaves out


def is_users_own(path: Path) -> bool:
    """Return whether a card is there that the user has written or changed."""
    if not path.is_file():
        return False
    text = path.read_text(errors="replace")
    return MARKER not in text and not all(words in text for words in STUB)


def card_of(source: Path, base: str | None) -> str | None:
    """Return the card of a folder, or None if it was not a run that wrote it.

    Args:
        base: the hub id that takes the place of a base on this machine, if any.
    """
    if not (source / RUN).is_file():
        return None
    from huggingface_hub import ModelCardData  # Takes time

    run = run_of(str(source))
    arguments = run["arguments"]
    clean = Cleaner(arguments)
    base = base or arguments["model_name_or_path"]
    names = [name for name in words_of(arguments["dataset_name"]) if is_hub_id(name)]
    data = ModelCardData(library_name="transformers", datasets=names, tags=["accelerate"])
    if arguments.get("use_peft"):
        data.library_name = "peft"
        data.tags = ["accelerate", "lora"]
    if is_hub_id(base):
        data.base_model = base
    summary = []
    for name, text in run["summary"].items():
        if name not in PRIVATE_LINES:
            summary.append((name, clean(text)))
    command = shlex.join(clean(word) for word in run.get("command", []))
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {clean(source.resolve().name)}",
        f"Trained from `{clean(base)}` by",
        f"```bash\n{command}\n```",
        table("Training", summary),
        table("Rows", rows_of(run, clean)),
        *results(source / METRICS),
        table("Versions", run["versions"].items()),
    ]
    return "\n\n".join(parts) + "\n"


def rows_of(run: Mapping[str, Any], clean: Cleaner) -> list[tuple[str, str]]:
    """Return the data sets or files of a run, and the hash of its rows."""
    found = []
    for name in ("dataset_name", "eval_dataset_name"):
        for word in words_of(run["arguments"].get(name)):
            found.append((f"--{name}", clean(word)))
    return [*found, ("hash of the training rows", run["data"])]


def results(path: Path) -> Iterator[str]:
    """Yield the last evaluation and the last logged step of metrics.jsonl."""
    last: dict[str, Mapping[str, Any]] = {}
    if path.is_file():
        for text in path.read_text().splitlines():
            line = json.loads(text)
            is_evaluation = any(name.startswith("eval_") for name in line)
            kind = "Evaluation" if is_evaluation else "Last training step"
            last[kind] = line
    for kind, line in sorted(last.items()):
        yield table(f"{kind}, after step {line['step']}", line.items())


def table(title: str, rows: Iterable[tuple[str, Any]]) -> str:
    """Return a section with a table of names and values."""
    lines = [f"## {title}", "", "| name | value |", "| --- | --- |"]
    for name, value in rows:
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        text = text.replace("|", "\\|").replace("\n", "<br>")
        lines.append(f"| {name} | {text} |")
    return "\n".join(lines)
