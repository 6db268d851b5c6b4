# SPDX-License-Identifier: Apache-2.0
"""One contestant of evidence/benchmark_rows.py: prepares a file of rows, and measures its CPU time.

It runs as `python -m bench.timed_rows ours|trl ...` from scripts/, and writes one JSON object:

    cpu_seconds    of this process and its children, from before the file is opened until the
                   prepared rows are in the cache
    digests        a hash of each row's input_ids and labels
    tokens         number of tokens of all rows
    trained_on     number of them that are trained on

Imports, the tokenizer and the model are not timed. Nor is what only the first call does, since a
file of a few rows is prepared before.
"""

import argparse
import gc
import json
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import xxhash

from . import recipe
from .commands import as_words

# A function from a .jsonl file to a dataset with the columns input_ids and labels
Prepare = Callable[[Path], Any]


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contestant", choices=CONTESTANTS)
    parser.add_argument("--model", type=Path, required=True, help="folder with a tokenizer too")
    parser.add_argument("--chat_template", type=Path, help="in place of the tokenizer's own")
    parser.add_argument("--few", type=Path, required=True, help="rows to begin with, not timed")
    parser.add_argument("--rows", type=Path, required=True, help="rows to time")
    parser.add_argument("--max_length", type=int, required=True)
    parser.add_argument("--output_dir", type=Path, required=True, help="record.json goes here")
    return parser.parse_args()


def our_preparation(args: argparse.Namespace) -> Prepare:
    """Return the recipe's preparation of rows."""
    flags = {
        "model_name_or_path": args.model,
        "dataset_name": args.few,
        "max_length": args.max_length,
        "eval_strategy": "no",
    }
    if args.chat_template is not None:
        flags["chat_template"] = args.chat_template
    return recipe.preparation([str(word) for word in as_words(flags)])


def preparation_of_trl(args: argparse.Namespace) -> Prepare:
    """Return SFTTrainer's preparation of rows, which is a part of its constructor."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(args.model, trust_remote_code=False)
    config = SFTConfig(
        output_dir=str(args.output_dir / "trainer"),
        max_length=args.max_length,
        assistant_only_loss=True,
        bf16=False,
        report_to="none",
    )

    def prepare(file: Path) -> Any:
        rows: Any = load_dataset("json", data_files=str(file), split="train")
        trainer = SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer)
        return trainer.train_dataset

    return prepare


CONTESTANTS = {"ours": our_preparation, "trl": preparation_of_trl}


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    seconds = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        seconds += used.ru_utime + used.ru_stime
    return seconds


def digest(input_ids: Sequence[int], labels: Sequence[int]) -> str:
    """Return a hash of the tokens of a row and their labels."""
    return xxhash.xxh3_64_hexdigest(json.dumps([list(input_ids), list(labels)]).encode())


def describe(rows: Any) -> dict[str, Any]:
    """Return what the record says about prepared rows."""
    digests = []
    num_tokens = 0
    num_trained_on = 0
    plain = rows.select_columns(["input_ids", "labels"]).with_format(None)
    for row in plain:
        digests.append(digest(row["input_ids"], row["labels"]))
        num_tokens += len(row["labels"])
        num_trained_on += sum(label != -100 for label in row["labels"])
    return {"digests": digests, "tokens": num_tokens, "trained_on": num_trained_on}


def main() -> None:
    """Prepare a few rows, then all of them, and write the record."""
    args = parse_args()
    prepare = CONTESTANTS[args.contestant](args)
    prepare(args.few)
    gc.collect()  # what the imports left behind is not counted
    begun = cpu_seconds()
    rows = prepare(args.rows)
    seconds = cpu_seconds() - begun
    record = {"cpu_seconds": round(seconds, 3), **describe(rows)}
    (args.output_dir / "record.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
