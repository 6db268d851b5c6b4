# SPDX-License-Identifier: Apache-2.0
"""What evaluate.py does with its command line: ask each model all tasks, and write what it got.

A model is an object of results.json: {"name", "tasks"}, and tasks has {task: {"metrics": {metric:
{"value", "stderr"}}, how it was asked}}.
"""

import argparse
import gc
import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from common import Exit, stop
from evaluation import harness
from evaluation.rows import measure_rows
from generation.loading import Source, be_quiet, find_sources, load_model
from generation.rows import Question, find_pattern_problem, load_questions

RESULTS = "results.json"
SAMPLES = "samples"


def find_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield everything that is wrong with the command line."""
    if args.rows is None and args.tasks is None:
        yield "give --rows, --tasks or both"
    if args.num_fewshot is not None and args.tasks is None:
        yield "--num_fewshot needs --tasks"
    if args.answer_pattern is not None and args.rows is None:
        yield "--answer_pattern needs --rows"
    yield from find_pattern_problem(args.answer_pattern)


def run(args: argparse.Namespace) -> None:
    """Carry out a command line of evaluate.py; exit with a code and one line if that fails."""
    problems = list(find_problems(args))
    if problems:
        stop(Exit.USAGE, "; ".join(problems))
    folder = args.output_dir or Path("evaluations", time.strftime("%Y-%m-%d-%H%M%S"))
    folder.mkdir(parents=True, exist_ok=True)  # Fails now, and not after an hour of answers
    be_quiet()
    sources = find_sources(args.models, args.with_base)
    asked: list[Sequence[Question]] = [[] for _ in sources]
    if args.rows is not None:
        for place, source in enumerate(sources):
            chosen = (source.arguments, args.limit, args.answer_pattern)
            asked[place] = load_questions(args.rows, *chosen)
    tasks = None if args.tasks is None else harness.prepare(args)
    models: list[dict[str, Any]] = []
    for source, questions in zip(sources, asked, strict=True):
        found = measure(args, source, questions, tasks, folder)
        models.append({"name": source.name, "tasks": found})
        print(f"{source.name}: evaluated", flush=True)
        content = {"settings": vars(args), "models": models}
        text = json.dumps(content, indent=2, ensure_ascii=False, default=str)
        (folder / RESULTS).write_text(text + "\n", encoding="utf-8")
    print(f"\n{make_table(models)}\n")
    print(f"The numbers are in {folder / RESULTS}, answers in {folder / SAMPLES}/")


def measure(
    args: argparse.Namespace,
    source: Source,
    questions: Sequence[Question],
    tasks: dict[str, Any] | None,
    folder: Path,
) -> dict[str, Any]:
    """Return the tasks of a model, and write what it answered."""
    model = load_model(source, args)
    found: dict[str, Any] = {}
    answered = {}
    if questions:
        name = args.rows.stem
        found[name], answered[name] = measure_rows(args, source, model, questions)
    if tasks is not None:
        of_harness, samples = harness.measure_tasks(args, source, model, tasks)
        found |= of_harness
        answered |= samples
    for task, samples in answered.items():
        path = folder / SAMPLES / file_name(source.name) / file_name(f"{task}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(line, ensure_ascii=False, default=str) for line in samples]
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return found


def file_name(name: str) -> str:
    """Return a name of a model or a task as one that any file system takes."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "-"


def make_table(models: Sequence[dict[str, Any]]) -> str:
    """Return the table in Markdown: one row for each metric, one column for each model."""
    rows = [["task", "metric", "rows", *(model["name"] for model in models)]]
    for task, found in models[0]["tasks"].items():
        for metric in found["metrics"]:
            cells = [task, metric, str(found["rows"] or "")]
            for model in models:
                figure = model["tasks"][task]["metrics"][metric]
                error = figure["stderr"]
                text = f"{figure['value']:.4f}"
                cells.append(text if error is None else f"{text} ± {error:.4f}")
            rows.append(cells)
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    padded = [" | ".join(map(str.ljust, cells, widths)) for cells in rows]
    return "\n".join(f"| {inner} |" for inner in padded)
