# SPDX-License-Identifier: Apache-2.0
"""What evaluate.py does with its command line: ask each model all tasks, and write what it got."""

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars
from transformers.utils import logging

from common import Exit, stop
from evaluation import harness, report
from evaluation.rows import measure_rows
from generation.contestants import Contestant, find_contestants
from generation.rows import Question, columns_of, find_pattern_problem, load_questions


def find_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield everything that is wrong with the command line."""
    if args.num_fewshot is not None and args.num_fewshot < 0:
        yield "--num_fewshot must be at least 0"
    if args.rows is None and args.tasks is None:
        yield "give --rows, --tasks or both"
    for name in ("include_path", "num_fewshot"):
        if getattr(args, name) is not None and args.tasks is None:
            yield f"--{name} needs --tasks"
    if args.answer_pattern is not None:
        if args.rows is None:
            yield "--answer_pattern needs --rows"
        yield from find_pattern_problem(args.answer_pattern)
    if len(set(args.models)) < len(args.models):
        yield "the same model is given twice"


def run(args: argparse.Namespace) -> None:
    """Carry out a command line of evaluate.py; exit with a code and one line if that fails."""
    problems = list(find_problems(args))
    if problems:
        stop(Exit.USAGE, "; ".join(problems))
    folder = args.output_dir or report.new_folder(Path("evaluations"), args.models[0])
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    disable_progress_bars()
    contestants = find_contestants(args.models, args.with_base)
    asked: list[Sequence[Question]] = [[] for _ in contestants]
    if args.rows is not None:
        for place, contestant in enumerate(contestants):
            contestant.template()  # It must have one
            columns = columns_of(contestant.arguments)
            asked[place] = load_questions(args.rows, args.limit, args.answer_pattern, columns)
    loaded = None if args.tasks is None else harness.load_tasks(args)
    measured: list[report.Model] = []
    # Written before an hour of answers too, by which it is known that it can be
    report.write_results(folder, measured, vars(args), len(contestants))
    for contestant, questions in zip(contestants, asked, strict=True):
        try:
            measured.append(measure(args, contestant, questions, loaded, folder))
        except torch.OutOfMemoryError:
            fix = f"pass a smaller --batch_size than {args.batch_size}"
            stop(Exit.USAGE, f"{contestant.name}: the memory does not suffice; {fix}")
        print(f"{contestant.name}: evaluated in {measured[-1]['seconds']:.0f} s", flush=True)
        report.write_results(folder, measured, vars(args), len(contestants))
    table = report.make_table(measured)
    report.write(folder, report.TABLE, table + "\n")
    print(f"\n{table}\n")
    print(f"The numbers are in {folder / report.RESULTS}, answers in {folder / report.SAMPLES}/")


def measure(
    args: argparse.Namespace,
    contestant: Contestant,
    questions: Sequence[Question],
    loaded: dict[str, Any] | None,
    folder: Path,
) -> report.Model:
    """Return what results.json has of a contestant, and write what it answered."""
    start = time.monotonic()
    model = contestant.load(args)
    tasks: dict[str, Any] = {}
    if questions:
        name = args.rows.stem
        tasks[name], samples = measure_rows(args, contestant, model, questions)
        report.write_samples(folder, contestant.name, name, samples)
    if loaded is not None:
        of_harness, answered = harness.measure_tasks(args, contestant, model, loaded)
        tasks |= of_harness
        if args.log_samples:
            for task, lines in answered.items():
                report.write_samples(folder, contestant.name, task, lines)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "name": contestant.name,
        "before": contestant.before,
        "adapters_on": contestant.source.base,
        "seconds": time.monotonic() - start,
        "tasks": tasks,
    }
