# SPDX-License-Identifier: Apache-2.0
"""How many rows per second and core the recipe prepares, beside TRL's SFTTrainer.

To prepare is to read a .jsonl file, render the chat template, tokenize, find what is trained on,
and write the cache. Each measurement is the CPU time of a process of its own with one thread and an
empty cache, after a few rows that are not timed. The token ids and labels of all rows must be
equal. The template marks the assistant's text with {% generation %}, which SFTTrainer needs; the
recipe is also measured without the marks.
"""

import dataclasses
import json
import re
import resource
import time
from multiprocessing import get_context
from typing import Any

import pytest

import contestants
from contestants import GSM8K, Job
from test_speed import facts_of

CELLS = {"one question": 1, "four questions": 4}  # questions with their answers in a row
LABELS = ("ours", "ours without marks", "trl")
REPEATS = 5
FEW = 16
MAX_LENGTH = 2048  # no row is truncated
MARK = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
SHAPE = contestants.SMALL | {"max_position_embeddings": MAX_LENGTH, "vocab_size": 4096}
FLAGS = {"per_device_train_batch_size": 8, "max_length": MAX_LENGTH}


@pytest.mark.whole
@pytest.mark.parametrize("cell", CELLS)
def test_rows(cell, record, tmp_path):
    if not (GSM8K / "train.jsonl").is_file():
        pytest.skip(f"GSM8K's rows are not in {GSM8K}")
    job = Job(cell, SHAPE, FLAGS, dict.fromkeys(LABELS, {}), num_rows=FEW)
    contestants.prepare(job, tmp_path)
    pairs = [json.loads(line) for line in (GSM8K / "train.jsonl").read_text().splitlines()]
    runs, prepared, number = measure(pairs, CELLS[cell], tmp_path, REPEATS)
    assert len({tuple(rows) for rows in prepared}) == 1  # otherwise there is no figure
    record(**facts_of(job) | {"rows": number, "max_length": MAX_LENGTH}, runs=runs)


def test_all_prepare_the_same_rows(tmp_path):
    job = Job("small", SHAPE | {"vocab_size": 320}, FLAGS, {}, rows="words", num_rows=64)
    contestants.prepare(job, tmp_path)
    made = [json.loads(line) for line in (tmp_path / "data" / "rows.jsonl").open()]
    pairs = [{"question": row["prompt"], "answer": row["completion"]} for row in made]
    _, prepared, number = measure(pairs, 2, tmp_path, repeats=1)
    assert number == 32 and len({tuple(rows) for rows in prepared}) == 1
    assert all(len(rows) == 32 for rows in prepared)


def measure(pairs, questions, home, repeats):
    """(runs, what each prepared, number of rows) of conversations of so many questions."""
    rows = []
    for start in range(0, len(pairs) - questions + 1, questions):
        messages = []
        for pair in pairs[start : start + questions]:
            messages.append({"role": "user", "content": pair["question"]})
            messages.append({"role": "assistant", "content": pair["answer"]})
        rows.append(json.dumps({"messages": messages}) + "\n")
    (home / "all.jsonl").write_text("".join(rows))
    (home / "few.jsonl").write_text("".join(rows[:FEW]))
    runs, found = [], []
    for repeat in range(repeats):
        for label in LABELS:
            with get_context("fork").Pool(1) as pool:
                seconds, prepared = pool.apply(timed, (label, home, f"{label} {repeat}"))
            found.append(prepared)
            runs.append({"repeat": repeat, "contestant": label, "void": ""})
            runs[-1] |= {"cpu_seconds": seconds, "rows_per_second": len(prepared) / seconds}
    return runs, found, len(rows)


def timed(label, home, cache):
    """(CPU seconds to prepare home/all.jsonl, its rows as text), in a process of its own."""
    import datasets

    datasets.config.HF_DATASETS_CACHE = home / "cache" / cache
    prepare = (of_trl if label == "trl" else of_recipe)(label, home)
    prepare(home / "few.jsonl")
    begun = cpu_seconds()
    rows: Any = prepare(home / "all.jsonl")
    seconds = cpu_seconds() - begun
    plain = rows.select_columns(["input_ids", "labels"]).with_format(None)
    return seconds, [json.dumps([list(row["input_ids"]), list(row["labels"])]) for row in plain]


def cpu_seconds():
    """CPU time of this process and of its children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + used.ru_utime + used.ru_stime


def of_recipe(label, home):
    """The recipe's function from a file to its prepared rows."""
    import llama
    from core.cli import parse
    from core.model import load_tokenizer

    flags = {"model_name_or_path": home / "model", "dataset_name": home / "few.jsonl"}
    flags |= {"max_length": MAX_LENGTH, "eval_strategy": "no"}
    args = parse(llama.Arguments, words=contestants.words_of(flags))
    tokenizer = load_tokenizer(args)
    if label != "ours":
        tokenizer.chat_template = MARK.sub("", tokenizer.chat_template)

    def prepare(file):
        rows, _ = llama.load_data(dataclasses.replace(args, dataset_name=[str(file)]), tokenizer)
        return rows.dataset

    return prepare


def of_trl(label, home):
    """The same of SFTTrainer, whose constructor prepares the rows."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    model = AutoModelForCausalLM.from_pretrained(home / "model")
    settings = {"max_length": MAX_LENGTH, "assistant_only_loss": True, "bf16": False}
    config = SFTConfig(output_dir=str(home / "trainer"), report_to="none", **settings)

    def prepare(file):
        rows = load_dataset("json", data_files=str(file), split="train")
        trainer = SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer)
        return trainer.train_dataset

    return prepare
