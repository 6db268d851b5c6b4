# SPDX-License-Identifier: Apache-2.0
"""What evaluate.py does with its command line: ask each model all tasks, and write what it got."""

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from common import Exit, stop
from evaluation import harness, report
from evaluation.rows import measure_rows
from generation.loading import Source, base_of, be_quiet, find_sources, load_model
from generation.rows import Question, find_pattern_problem, load_questions


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
    be_quiet()
    sources = find_sources(args.models, args.with_base)
    asked: list[Sequence[Question]] = [[] for _ in sources]
    if args.rows is not None:
        for place, source in enumerate(sources):
            chosen = (source.arguments, args.limit, args.answer_pattern)
            asked[place] = load_questions(args.rows, *chosen)
    tasks = None if args.tasks is None else harness.prepare(args)
    measured: list[report.Model] = []
    # Written before an hour of answers too, by which it is known that it can be
    report.write_results(folder, measured, vars(args), len(sources))
    for source, questions in zip(sources, asked, strict=True):
        before = sources[0].name if measured else None
        if args.with_base:
            before = None if source.run else base_of(source).name
        found = measure(args, source, questions, tasks, folder)
        model = {"name": source.name, "before": before, **found}
        report.add_differences(model, measured)
        measured.append(model)
        print(f"{source.name}: evaluated in {model['seconds']:.0f} s", flush=True)
        report.write_results(folder, measured, vars(args), len(sources))
    table = report.make_table(measured)
    (folder / report.TABLE).write_text(table + "\n", encoding="utf-8")
    print(f"\n{table}\n")
    print(f"The numbers are in {folder / report.RESULTS}, answers in {folder / report.SAMPLES}/")


def measure(
    args: argparse.Namespace,
    source: Source,
    questions: Sequence[Question],
    tasks: dict[str, Any] | None,
    folder: Path,
) -> dict[str, Any]:
    """Return the tasks of a model and how long they took, and write what it answered."""
    start = time.monotonic()
    model = load_model(source, args)
    found: dict[str, Any] = {}
    if questions:
        name = args.rows.stem
        found[name], samples = measure_rows(args, source, model, questions)
        report.write_samples(folder, source.name, name, samples)
    if tasks is not None:
        of_harness, answered = harness.measure_tasks(args, source, model, tasks)
        found |= of_harness
        if args.log_samples:
            for task, lines in answered.items():
                report.write_samples(folder, source.name, task, lines)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return {"seconds": time.monotonic() - start, "tasks": found}
