# SPDX-License-Identifier: Apache-2.0
"""Files of rows: bad lines, bad files, and good ones that look odd.

tests/golden/rows.json has what comes of each of them.
"""

import io
import json

import pyarrow as pa
from pyarrow import parquet

GOOD = '{"prompt": "Spell the word lamp.", "completion": "l-a-m-p"}'
USER = {"role": "user", "content": "a"}
ASSISTANT = {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "c"}


def row(prompt: object = "a", completion: object = "b", **columns: object) -> str:
    """Return a row as a line of a .jsonl file."""
    return json.dumps({"prompt": prompt, "completion": completion, **columns})


def unescaped(**columns: object) -> str:
    """Return a row as a line of a .jsonl file with characters that are not in ASCII."""
    return json.dumps(columns, ensure_ascii=False)


def conversation(*messages: object) -> str:
    """Return a row of messages as a line of a .jsonl file."""
    return json.dumps({"messages": messages})


def parquet_of(**columns: object) -> bytes:
    """Return the content of a .parquet file."""
    file = io.BytesIO()
    parquet.write_table(pa.table(columns), file)
    return file.getvalue()


FIRST = (1, "a", "b")
SECOND = (2, "c", "d")
FIRST_LINE = row("a", "b")
SECOND_LINE = row("c", "d")
TORN = GOOD[:40]

# ---- Bad lines ----
BAD_LINES = {
    "torn": TORN,
    "text": "hello",
    "Latin-1": unescaped(prompt="caf\xe9", completion="b").encode("latin-1"),
    "list": "[1, 2]",
    "other columns": '{"prompt": "a", "reply": "b"}',
    "completion that is null": row("a", None),
    "completion that is a number": row("a", 5),
    "empty completion": row("a", ""),
    "completion of spaces": row("a", " \n\t "),
    "empty prompt": row(""),
    "messages that are text": '{"messages": "hello"}',
    "message without content": conversation(USER, {"role": "assistant"}),
    "content that is null": conversation(USER, {"role": "assistant", "content": None}),
    "content with an image": conversation(
        {"role": "user", "content": [{"type": "image_url"}]}, ASSISTANT
    ),
    "answer first": conversation(ASSISTANT, USER, ASSISTANT),
    "question last": conversation(SYSTEM, ASSISTANT, USER),
    "no assistant": conversation(SYSTEM, USER),
    "lone surrogate in a text": row("\ud800"),
    "longer than --max_length": row("a" * 500),
}

PARQUET = parquet_of(prompt=["a", "c"], completion=["b", "d"])

# ---- Bad files ----
BAD_FILES = {
    "another type": {"rows.txt": GOOD},
    "csv: no header": {"rows.csv": "a,b\nc,d\n"},
    "csv: semicolons": {"rows.csv": "prompt;completion\na;b\n"},
    "csv: too many cells": {"rows.csv": "prompt,completion\na,b\nc,d,e\n"},
    "csv: empty cells": {"rows.csv": 'prompt,completion\n,b\na,""\na,b\n'},
    "csv: Latin-1": {"rows.csv": b"prompt,completion\na,\xe9\n"},
    "json: torn": {"rows.json": f"[{GOOD},{TORN}"},
    "json: one object": {"rows.json": f'{{"data": [{GOOD}]}}'},
    "parquet: truncated": {"rows.parquet": PARQUET[:-20]},
    "parquet: numbers": {"rows.parquet": parquet_of(prompt=["a"], completion=[5])},
    "parquet: null": {"rows.parquet": parquet_of(prompt=["a", "a"], completion=[None, "b"])},
    "folder: two types": {"train.csv": "prompt,completion\na,b\n", "train.jsonl": GOOD},
    "folder: a bad line in the second file": {
        "train-0.jsonl": f"{GOOD}\n\n",
        "train-1.jsonl": f"{GOOD}\n{{\n",
    },
    "folder named as a file": {"rows.jsonl/train.txt": GOOD},
}

# ---- Good files: their contents, and (number, prompt, answer) of each of their rows ----
SEPARATORS = "x\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029y"
CSV = "prompt,completion\na,b\nc,d\n"
TWO = f"{FIRST_LINE}\n{SECOND_LINE}\n"
GOOD_FILES = {
    "messages in other forms": (
        {
            "rows.jsonl": row([USER])
            + "\n"
            + json.dumps(
                {"conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]}
            )
            + "\n"
            + conversation({"role": "user", "content": [{"type": "text", "text": "a"}]}, ASSISTANT)
        },
        [FIRST, SECOND, (3, "a", "b")],
    ),
    "CRLF": ({"rows.jsonl": TWO.replace("\n", "\r\n")}, [FIRST, SECOND]),
    "no line break at the end": ({"rows.jsonl": TWO[:-1]}, [FIRST, SECOND]),
    "BOM": ({"rows.jsonl": "\ufeff" + TWO}, [FIRST, SECOND]),
    "blank lines": (
        {"rows.jsonl": f"\n{FIRST_LINE}\n \t\n\r\n{SECOND_LINE}\n\n"},
        [(2, "a", "b"), (5, "c", "d")],
    ),
    "other columns": (
        {"rows.jsonl": row(score=float("nan")) + '\n{"question": "c", "answer": "d", "prompt": 5}'},
        [FIRST, SECOND],
    ),
    "columns named as ours": (
        {"rows.jsonl": TWO.replace("{", '{"row": "x", "labels": 5, "problem": "x", ')},
        [FIRST, SECOND],
    ),
    "characters that some split lines at": (
        {"rows.jsonl": f"{unescaped(prompt=SEPARATORS, completion='b')}\n{SECOND_LINE}"},
        [(1, SEPARATORS, "b"), SECOND],
    ),
    "csv": ({"rows.csv": CSV}, [FIRST, SECOND]),
    "csv: BOM": ({"rows.csv": "\ufeff" + CSV}, [FIRST, SECOND]),
    "csv: words with a meaning are text": (
        {"rows.csv": "question,answer\n1 + 1?,2\nNA,None\ntrue?,True\n007,1.0\n"},
        [(1, "1 + 1?", "2"), (2, "NA", "None"), (3, "true?", "True"), (4, "007", "1.0")],
    ),
    "json: list": ({"rows.json": f"[{FIRST_LINE}, {SECOND_LINE}]"}, [FIRST, SECOND]),
    "parquet": ({"rows.parquet": PARQUET}, [FIRST, SECOND]),
    "folder": (
        {"train-0.jsonl": f"{FIRST_LINE}\r\n", "train-1.jsonl": "\ufeff" + SECOND_LINE},
        [FIRST, SECOND],
    ),
}
