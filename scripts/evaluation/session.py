# SPDX-License-Identifier: Apache-2.0
"""What evaluate.py does with its command line: ask each model all tasks, and write what it got."""

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval
import torch
from datasets import disable_progress_bars
from transformers import set_seed
from transformers.utils import logging

from evaluation import asking, own_rows, plot, report
from evaluation.contestants import Contestant, find_contestants, hash_file
from evaluation.documents import Document, Reader
from evaluation.figures import read_figures
from evaluation.report import Measured
from evaluation.tasks import Loaded, load_tasks
from exits import Exit, stop
from generation import loading, rows

# Resamplings for errors of metrics that are no means. lm-eval's command makes 100,000, which takes
# minutes; a thousand tell an error within a few percent.
BOOTSTRAPS = 1000
INTERRUPTED = 130  # as a shell has it for a command that Ctrl-C ended


def find_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield everything that is wrong with the command line."""
    if args.num_fewshot is not None and args.num_fewshot < 0:
        yield "--num_fewshot must be at least 0"
    if args.rows is None and args.tasks is None:
        yield "give --rows, --tasks or both"
    yield from find_task_problems(args)
    if args.answer_pattern is not None:
        if args.rows is None:
            yield "--answer_pattern needs --rows"
        yield from rows.find_pattern_problem(args.answer_pattern)
    if len(set(args.models)) < len(args.models):
        yield "the same model is given twice"


def find_task_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield what is wrong with the options of --tasks, without a look at the tasks."""
    for name in ("include_path", "num_fewshot"):
        if getattr(args, name) is not None and args.tasks is None:
            yield f"--{name} needs --tasks"
    if args.include_path is not None and not args.include_path.is_dir():
        yield f"--include_path {args.include_path}: no such folder"


@dataclass(frozen=True)
class Job:
    """What is asked: rows and tasks, of each contestant.

    Attributes:
        documents: the rows, for each contestant as it is asked them; empty without --rows.
        loaded: lm-eval's tasks; None without --tasks.
    """

    args: argparse.Namespace
    contestants: Sequence[Contestant]
    documents: Sequence[Sequence[Document]]
    loaded: Loaded | None

    @property
    def name_of_rows(self) -> str:
        """Return the name of the task of the rows: that of their file."""
        return self.args.rows.stem

    def is_chat(self, contestant: Contestant) -> bool:
        """Return whether lm-eval's tasks are asked as a chat."""
        wanted = self.args.apply_chat_template
        if wanted == "auto":
            return bool(contestant.tokenizer.chat_template)
        return wanted == "true"


def run(args: argparse.Namespace) -> None:
    """Carry out a command line of evaluate.py; exit with a code and one line if that fails."""
    problems = list(find_problems(args))
    if problems:
        stop(Exit.USAGE, "; ".join(problems))
    folder = args.output_dir or report.new_folder(Path("evaluations"), args.models[0])
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    disable_progress_bars()
    report.check_folder(folder)
    job = read_job(args)
    measured: list[Measured] = []
    try:
        measure_all(job, folder, measured)
    except KeyboardInterrupt:
        number = f"{len(measured)} of {len(job.contestants)} models are in"
        print(f"\ninterrupted: {number} {folder / report.RESULTS}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    table = report.make_table(measured)
    report.write(folder, report.TABLE, table + "\n")
    plot.write_plot(folder / report.PLOT, measured)
    print(f"\n{table}\n")
    print(f"The numbers are in {folder / report.RESULTS}, a plot in {folder / report.PLOT}")
    if args.rows is not None or args.log_samples:
        print(f"The answers are in {folder / report.SAMPLES}/")


def measure_all(job: Job, folder: Path, measured: list[Measured]) -> None:
    """Ask all models, and write what is known after each; exit with 64 if memory does not suffice.

    Args:
        measured: is filled with the figures of each model.
    """
    settings = settings_of(job.args)
    names = report.distinct_names([contestant.name for contestant in job.contestants])
    for place, contestant in enumerate(job.contestants):
        try:
            one, samples = measure(job, place)
        except torch.OutOfMemoryError:
            fix = f"pass a smaller --batch_size than {job.args.batch_size}"
            stop(Exit.USAGE, f"{contestant.name}: the memory does not suffice; {fix}")
        measured.append(one)
        print(f"{contestant.name}: evaluated in {one.seconds:.0f} s", flush=True)
        report.write_samples(folder, names[place], samples)
        report.write_results(folder, measured, settings, len(job.contestants))


def read_job(args: argparse.Namespace) -> Job:
    """Return what is asked of whom, without the models; exit if any of it cannot be."""
    contestants = find_contestants(args.models, args.with_base)
    documents = []
    for contestant in contestants:
        is_needed = args.rows is not None or args.apply_chat_template == "true"
        if is_needed:
            loading.load_tokenizer(contestant.source)
        if args.rows is not None:
            reader = Reader(contestant, args.answer_pattern, args.max_new_tokens)
            documents.append(reader.read(args.rows, args.limit))
    loaded = None
    if args.tasks is not None:
        loaded = load_tasks(
            args.tasks, args.include_path, args.confirm_run_unsafe_code, args.num_fewshot
        )
        if args.rows is not None and args.rows.stem in loaded.tasks:
            stop(Exit.USAGE, f"--rows {args.rows}: a task has that name too; rename the file")
    return Job(args, contestants, documents, loaded)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the command line as results.json has it, with the hash of the rows."""
    settings = dict(vars(args))
    settings["device"] = args.device or loading.default_device()
    settings |= {"bootstrap_iters": BOOTSTRAPS, "softmax_dtype": "float32"}
    if args.rows is not None:
        settings["sha256_of_rows"] = hash_file(args.rows)
    return settings


def measure(job: Job, place: int) -> tuple[Measured, dict[str, list[dict[str, Any]]]]:
    """Return the figures of a contestant, and what it answered to each task."""
    args = job.args
    contestant = job.contestants[place]
    start = time.monotonic()
    device = args.device or loading.default_device()
    model = loading.load_model(contestant.source, args.dtype, device, args.load_in_4bit)
    figures = []
    facts: dict[str, dict[str, Any]] = {}
    samples: dict[str, list[dict[str, Any]]] = {}
    # First what is asked as text: to be asked as a chat changes where a model ends an answer
    if job.loaded is not None and not job.is_chat(contestant):
        results = evaluate(asking.as_text(model, contestant, args.batch_size), job.loaded, args)
        figures += read_figures(results)
        facts |= facts_of(results, args, is_chat=False)
        samples |= results["samples"] if args.log_samples else {}
    if job.loaded is not None and job.is_chat(contestant):
        asked = asking.as_chat(model, contestant, args.batch_size, longest=None)
        results = evaluate(asked, job.loaded, args, is_chat=True)
        figures += read_figures(results)
        facts |= facts_of(results, args, is_chat=True)
        samples |= results["samples"] if args.log_samples else {}
    if job.documents:
        documents = job.documents[place]
        asked = asking.as_chat(model, contestant, args.batch_size, contestant.longest)
        task = own_rows.make_task(
            job.name_of_rows, documents, args.max_new_tokens, args.answer_pattern
        )
        results = evaluate(asked, Loaded({job.name_of_rows: task}), args)
        figures = read_figures(results) + figures
        facts |= facts_of(results, args, is_chat=True)
        facts[job.name_of_rows]["truncated"] = sum(one.truncated for one in documents)
        sampled = results["samples"][job.name_of_rows]
        samples[job.name_of_rows] = [sample_to_json(row) for row in sampled]
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Measured(contestant, figures, facts, time.monotonic() - start), samples


def evaluate(
    asked: asking.AskedModel, loaded: Loaded, args: argparse.Namespace, is_chat: bool = False
) -> Any:
    """Return what lm-eval's evaluate returns for a model, which starts from the same seed."""
    set_seed(args.seed)
    for task in loaded.tasks.values():
        task.set_fewshot_seed(seed=args.seed)
    return lm_eval.evaluate(
        asked,
        vars(loaded),
        limit=args.limit,
        bootstrap_iters=BOOTSTRAPS,
        apply_chat_template=is_chat,
        fewshot_as_multiturn=is_chat,
        confirm_run_unsafe_code=args.confirm_run_unsafe_code,
    )


def facts_of(
    results: Mapping[str, Any], args: argparse.Namespace, is_chat: bool
) -> dict[str, dict[str, Any]]:
    """Return of each task how it was asked."""
    facts = {}
    for name in results["results"]:
        facts[name] = {
            "version": results["versions"].get(name),
            "num_fewshot": results["n-shot"].get(name),
            "chat_template": is_chat,
            "seed": args.seed,
        }
    return facts


def sample_to_json(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return one of our rows with what was answered, without its tokens."""
    kept = {key: value for key, value in sample["doc"].items() if key != "scored"}
    scores = list(sample["filtered_resps"])
    if kept["choices"]:
        kept["log_likelihoods"] = [score for score, _ in scores]
        return kept | {name: sample[name] for name in sample["metrics"]}
    del kept["choices"]
    total, number = sample["loss"]
    kept |= {"answer": scores[0].strip(), "exact_match": sample["exact_match"]}
    return kept | {"loss": total / number, "num_tokens": number}
