# SPDX-License-Identifier: Apache-2.0
"""Measure how fast rows are prepared: every contestant in turn, in processes of their own."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paths import SCRIPTS

from . import idle, machine
from .cells import Flags, Result, Run, slug
from .commands import ON_A_CPU, as_words, reading_variables
from .measure import ATTEMPTS, device_name, installed_libraries
from .prepare import make_model
from .recipe import load_tokenizer
from .runs import IN_A_SMOKE_TEST, error_of

# {cell: questions with their answers in each row}
CELLS = {"one question": 1, "four questions": 4}
# Contestants, the last of which is the reference of the gate
CONTESTANTS = ("ours", "ours without marks", "trl")
FEW = 16  # rows that are prepared first, without being timed
MAX_LENGTH = 2048  # no row of GSM8K is truncated, nor are four of them in one
LIBRARIES = ("trl", "transformers", "tokenizers", "datasets", "torch")
MARK = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
# The model is only there because SFTTrainer takes one.
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 64,
    "max_position_embeddings": MAX_LENGTH,
}


@dataclass(frozen=True)
class Settings:
    """The settings that all runs share.

    Attributes:
        output_dir: folder of the tokenizer, the rows and the runs.
        data: folder of GSM8K's rows.
        smoke: whether a few rows are made instead, and the machine's load does not count.
        any_load: whether runs count that were disturbed by other work.
    """

    output_dir: Path
    data: Path
    smoke: bool = False
    any_load: bool = False

    @property
    def model(self) -> Path:
        """The folder of the tokenizer, and of a tiny model that is never trained."""
        return self.output_dir / "tiny" / "model"

    @property
    def source(self) -> Path:
        """The file of questions and answers."""
        folder = self.output_dir / "tiny" / "data" if self.smoke else self.data
        return folder / "train.jsonl"

    @property
    def unmarked_template(self) -> Path:
        """The file of the same chat template without {% generation %}."""
        return self.output_dir / "unmarked.jinja"

    def file_of(self, cell: str, few: bool = False) -> Path:
        """Return the file of a cell's rows, or of the few that are prepared first."""
        name = slug(cell) + ("_few" if few else "")
        return self.output_dir / "rows" / f"{name}.jsonl"


# ---- What contestants read ----
def make_inputs(settings: Settings) -> None:
    """Write the tokenizer, the chat template without marks, and the rows of all cells.

    Raises NoModelError if the tokenizer cannot be made.
    """
    if not (settings.model / "config.json").exists():
        make_model(settings.model.parent, maker_flags(settings))
    template = load_tokenizer(settings.model).chat_template
    settings.unmarked_template.write_text(MARK.sub("", template))
    pairs = [json.loads(line) for line in settings.source.read_text().splitlines()]
    for cell, number in CELLS.items():
        rows = list(conversations(pairs, number))
        write_lines(settings.file_of(cell), rows)
        write_lines(settings.file_of(cell, few=True), rows[:FEW])


def maker_flags(settings: Settings) -> Flags:
    """Return the flags of scripts/make_tiny.py: its tokenizer is trained on the rows."""
    if settings.smoke:
        return SMALL | {"num_train_rows": 64, "num_test_rows": 7}
    return SMALL | {"text": settings.source, "vocab_size": 4096}


def conversations(rows: Sequence[dict[str, str]], number: int) -> Iterator[dict[str, Any]]:
    """Yield rows of messages, each with `number` questions and their answers.

    Fewer that remain at the end are left out.
    """
    for start in range(0, len(rows) - number + 1, number):
        messages = []
        for row in rows[start : start + number]:
            question = row.get("question") or row["prompt"]
            answer = row.get("answer") or row["completion"]
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        yield {"messages": messages}


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as lines of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- Runs ----
def run_cell(cell: str, settings: Settings, repeats: int) -> Result:
    """Run every contestant `repeats` times in turn; return one object of the results."""
    runs = []
    for repeat in range(repeats):
        for label in CONTESTANTS:
            run = {"repeat": repeat, **run_undisturbed(cell, label, settings)}
            runs.append(run)
            print(line_of(cell, run), flush=True)
    return describe(cell, settings) | {"runs": judge(runs, settings.any_load)}


def run_undisturbed(cell: str, label: str, settings: Settings) -> Run:
    """Run a contestant until a run was not disturbed, at most ATTEMPTS times."""
    run = run_once(cell, label, settings)
    if settings.any_load:
        return run
    for _ in range(1, ATTEMPTS):
        if not run["loaded"]:
            break
        run = run_once(cell, label, settings)
    return run


def run_once(cell: str, label: str, settings: Settings) -> Run:
    """Launch one contestant; return the load, and what it recorded or {"failed": why}."""
    folder = settings.output_dir / "runs" / slug(cell) / slug(label)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = command_of(cell, label, folder, settings)
    before = use_before(settings)
    with open(folder / "output.txt", "w") as output:
        code = subprocess.run(
            command,
            cwd=SCRIPTS,
            env=os.environ | ON_A_CPU | reading_variables(folder / "cache"),
            stdout=output,
            stderr=subprocess.STDOUT,
        ).returncode
    after = IN_A_SMOKE_TEST if settings.smoke else idle.use_after("cpu", ranks=1)
    run = {
        "contestant": label,
        "load": [round(before.load, 2), round(after.load, 2)],
        "loaded": before.disturbs or after.disturbs,
    }
    if code:
        lines = (folder / "output.txt").read_text().splitlines()
        return run | {"failed": f"exit code {code}: {error_of(lines)[:300]}"}
    record = json.loads((folder / "record.json").read_text())
    return run | record | {"rows_per_second": len(record["digests"]) / record["cpu_seconds"]}


def use_before(settings: Settings) -> idle.Use:
    """Return the machine's use before a run, which waits for it to be idle if the load counts."""
    if settings.smoke:
        return IN_A_SMOKE_TEST
    if settings.any_load:
        return idle.use_after("cpu", ranks=1)  # The previous run still raises the load.
    return idle.use_before("cpu")


def command_of(cell: str, label: str, folder: Path, settings: Settings) -> list[str]:
    """Return the command line of one run, from scripts/."""
    flags: Flags = {
        "model": settings.model.resolve(),
        "few": settings.file_of(cell, few=True).resolve(),
        "rows": settings.file_of(cell).resolve(),
        "max_length": MAX_LENGTH,
        "output_dir": folder.resolve(),
    }
    if label == "ours without marks":
        flags["chat_template"] = settings.unmarked_template.resolve()
    tool = label.split()[0]
    command = [sys.executable, "-m", "bench.timed_rows", tool, *as_words(flags)]
    return [str(word) for word in command]


# ---- The gate ----
def judge(runs: Sequence[Run], any_load: bool) -> list[Run]:
    """Return the runs, each with `void`: why it is not valid, or "".

    All runs of a cell are void if one failed, or prepared other tokens or labels than the reference
    did in its first run: rows per second of other rows would say nothing. The digests of the rows,
    which decide that, are left out.
    """
    references = [run for run in runs if run["contestant"] == CONTESTANTS[-1]]
    problem = ""
    for run in runs:
        problem = problem or difference(run, references[0])
    judged = []
    for run in runs:
        why = problem
        if not why and run["loaded"] and not any_load:
            why = "loaded"
        kept = {name: value for name, value in run.items() if name != "digests"}
        judged.append(kept | {"void": why})
    return judged


def difference(run: Run, reference: Run) -> str:
    """Return why the rows of a run are not those of the reference, "" if they are."""
    for one in (run, reference):
        if "failed" in one:
            return f"{one['contestant']} failed"
    ours = run["digests"]
    theirs = reference["digests"]
    if len(ours) != len(theirs):
        return f"{run['contestant']} has {len(ours)} rows, {CONTESTANTS[-1]} {len(theirs)}"
    differing = [number for number, row in enumerate(ours, 1) if row != theirs[number - 1]]
    if not differing:
        return ""
    return (
        f"{run['contestant']} has other tokens or labels in {len(differing)} of {len(ours)} rows, "
        f"first in row {differing[0]}"
    )


# ---- What is reported ----
def describe(cell: str, settings: Settings) -> Result:
    """Return what is needed to measure a cell again."""
    return {
        "cell": cell,
        "rows": len(settings.file_of(cell).read_text().splitlines()),
        "device": device_name("cpu"),
        "date": time.strftime("%Y-%m-%d"),
        "commit": machine.commit() or "",
        "versions": installed_libraries(LIBRARIES),
        "max_length": MAX_LENGTH,
    }


def line_of(cell: str, run: Run) -> str:
    """Return one line about a run that has just ended."""
    contestant = f"{cell}: {run['contestant']}"
    if "failed" in run:
        return f"FAILED  {contestant}: {run['failed']}"
    seconds = f"{run['cpu_seconds']:.2f} CPU seconds"
    return f"{run['repeat']:>6}  {contestant}: {seconds}, load {run['load'][1]:.2f}"


def passed(result: Result) -> bool:
    """Return whether the rows of a cell were equal; runs that were only disturbed do not matter."""
    return all(run["void"] in ("", "loaded") for run in result["runs"])
