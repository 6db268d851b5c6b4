"""Rows of any file, folder or hub data set, tokenised, with each bad one named by file and line, its cause and the fix.

Every recipe uses this file when it lies beside it; a recipe that was copied alone reads rows plainly, and the first bad
one ends it with datasets' own traceback.
"""

import json
from pathlib import Path

import numpy as np
from datasets import load_dataset
from fault_tolerance import fail

TEXT = dict.fromkeys("prompt completion chosen rejected instruction input output question answer".split(), str)  # a number in a CSV file is text
FILE_TYPES = {".jsonl": {"path": "text", "encoding": "latin-1"}, ".json": {"path": "json"}, ".parquet": {"path": "parquet"},
              ".csv": {"path": "csv", "keep_default_na": False, "converters": TEXT}}
OFFLINE = "Offline: python scripts/make_tiny_model.py (for recipes/bert.py make_tiny_bert.py) runs/tiny, then --model_name_or_path runs/tiny/model --dataset_name runs/tiny/data/train.jsonl"
NOTHING = {"input_ids": [], "labels": [], "truncated": False, "length": 0, "largest": 0, "hash": 0}  # what `tokenize` has of a row that cannot be used


def parse_line(text):
    """Return the object in a line of a .jsonl file, given as latin-1; raise a ValueError that says why there is none."""
    line = text.encode("latin-1").decode("utf-8-sig")
    row = json.loads(line, object_pairs_hook=lambda pairs: dict(pairs) if len(dict(pairs)) == len(pairs) else pairs)
    if not isinstance(row, dict):
        raise ValueError("is not a JSON object with each key once")
    return row


def checked(messages, row, formats):
    """Return the messages of a row, or raise a ValueError that says why they cannot be used. formats: {question's column: answer's}."""
    if not isinstance(messages, list):
        wanted = " | ".join(map(", ".join, formats.items()))
        raise ValueError(f"has the columns {', '.join(row)[:80] or 'none'}; needs messages | {wanted}; messages is a list")
    if odd := [m for m in messages if not (isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str))]:
        raise ValueError(f"has a message without role or text: {str(odd[0])[:80]}")
    said = [message["role"] for message in messages if message["content"].strip()]
    if "user" not in said or "assistant" not in said[said.index("user"):] or messages[0]["role"] == "assistant":
        raise ValueError(f"has no answer to learn from, after a user's text; its texts are by {', '.join(said)[:80] or 'nobody'}")
    return messages


def checked_pair(row):
    """Return prompt, chosen and rejected of a row, or raise a ValueError that says why they cannot be used: both answers are texts or lists of
    messages; the prompt is of the same kind, or they begin with it."""
    prompt, chosen, rejected = (row.get(name) for name in ("prompt", "chosen", "rejected"))
    kind = type(chosen)
    if kind not in (str, list) or type(rejected) is not kind or (kind, type(prompt)) == (str, list):
        raise ValueError(f"has the columns {', '.join(row)[:80] or 'none'}; needs chosen and rejected, both texts or both lists of messages, and prompt, of the same kind, unless they begin with it")
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if kind is list:
            checked((prompt if type(prompt) is list else []) + answer, row, {})
        if not (answer if kind is str else answer and answer[-1]["content"]).strip():
            raise ValueError(f"has no text in {name}")
    return prompt, chosen, rejected


def files_of(name, split):
    """Return the files of a data set: itself, or those of a folder whose names begin with the split; [] of a hub id."""
    return [Path(name)] if Path(name).suffix in FILE_TYPES else sorted(f for f in Path(name).glob(f"{split}*") if f.suffix in FILE_TYPES)


def source_of(name, split):
    """Return what a row is named by, its number behind it: the file, or the data set, and its unit."""
    files = files_of(name, split)
    return f"{files[0] if len(files) == 1 else name}, {'line' if files and files[0].suffix == '.jsonl' else 'row'}"


def read_split(name, config, split, tokenize, args, required, nothing=NOTHING):
    """Return the rows of a split as `tokenize` makes them, with their numbers (row, from 1) and in numpy's format, and their
    counts as text. Without such a split (None, "none"), unless it is required. Stops with 65 at bad rows, with 69 without the hub.
    nothing: what `tokenize` would have of a row that cannot be used."""
    rows = open_split(name, config, split, required)
    return tokenize_split(rows, name, split, tokenize, args, nothing) if rows else (None, "none")


def open_split(name, config, split, required, texts=()):
    """Return the rows of a split as they are, those of a .jsonl file as lines. texts: further columns of CSV files that are text."""
    files = files_of(name, split)
    reader = FILE_TYPES[files[0].suffix] if files else {}
    if "converters" in reader:
        reader = reader | {"converters": TEXT | dict.fromkeys(texts, str)}
    try:
        if odd := [file.name for file in files if file.suffix != files[0].suffix or not file.stat().st_size]:
            fail(65, f"{name}: {', '.join(odd)[:200]}: empty, or of a second file type")
        rows = load_dataset(**reader, data_files=[*map(str, files)], split="train") if files else load_dataset(name, config).get(split)
    except ConnectionError as error:
        fail(69, f"{name}: {error}", OFFLINE)
    except Exception as error:  # the readers of files raise what they like
        fail(65, f"{name}: {' '.join(str(error.__cause__ or error).split())[:300]}")
    return fail(65, f"{name}: no rows in split {split}") if required and not rows else rows


def tokenize_split(rows, name, split, tokenize, args, nothing):
    """The second half of read_split."""
    source = source_of(name, split)
    unit = source.split()[-1]

    # The cache knows a function by its code, defaults and names: nothing of args among them, but the code of what it calls here
    def attempt(row, _=(checked.__code__, checked_pair.__code__, parse_line.__code__)):
        try:
            return {**tokenize(parse_line(row["text"]) if unit == "line" else row), "problem": ""}
        except json.JSONDecodeError as error:
            problem = f"is not JSON: {error.msg} at column {error.colno}" if error.doc.strip() else "is blank"
        except Exception as error:  # a template raises what it likes
            problem = str(error) if type(error) is ValueError else f"cannot be used: {type(error).__name__}: {error}"
        return {**nothing, "problem": " ".join(problem.encode(errors="backslashreplace").decode().split())[:200]}

    try:
        done = rows.map(attempt, remove_columns=rows.column_names, num_proc=args.dataset_num_proc, desc=f"Tokenising {name}")
    except Exception as error:  # so does what writes them down
        fail(65, f"{name}: {' '.join(str(error.__cause__ or error).split())[:300]}")
    problems, kept = done["problem"][:], done.add_column("row", np.arange(1, len(done) + 1))
    if any(problems):  # a selection makes every later access slower
        kept = kept.select([i for i, problem in enumerate(problems) if not problem])
    bad = [f"{source} {i}: {problem}" for i, problem in enumerate(problems, 1) if problem and (problem != "is blank" or not kept)]
    if not kept or (bad and not args.skip_bad_rows):
        fail(65, *bad[:3], f"{name}: {len(bad)} of {len(rows)} {unit}s cannot be used: mend them, or leave them out with --skip_bad_rows")
    return kept.remove_columns(["truncated", "problem"]).with_format("numpy"), f"{len(kept)}, {sum(done['truncated'][:])} truncated to --max_length, {len(bad)} left out"
