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
    "two rows": GOOD + GOOD,
    "text": "hello",
    "Latin-1": unescaped(prompt="caf\xe9", completion="b").encode("latin-1"),
    "surrogates in UTF-8": GOOD.encode().replace(b"lamp", b"\xed\xa0\x80"),
    "UTF-16": GOOD.encode("utf-16-le").replace(b"\n", b""),
    "backslash before a byte that is not UTF-8": GOOD.encode().replace(b"la", b"\\\xe9"),
    "NUL byte in a text": GOOD.encode().replace(b"lamp", b"la\0p"),
    "tabulator in a text": GOOD.replace("lamp", "la\tp"),
    "list": "[1, 2]",
    "string": json.dumps(GOOD),
    "integer without end": '{"prompt": ' + "9" * 5000 + ', "completion": "b"}',
    "other columns": '{"prompt": "a", "reply": "b"}',
    "completion that is null": row("a", None),
    "completion that is a number": row("a", 5),
    "completion that is NaN": row("a", float("nan")),
    "completion that is a list": row("a", ["b"]),
    "prompt that is a list": row(["a"]),
    "empty completion": row("a", ""),
    "completion of spaces": row("a", " \n\t "),
    "empty prompt": row(""),
    "instruction that is null": '{"instruction": null, "input": "a", "output": "b"}',
    "messages that are null": '{"messages": null}',
    "messages that are text": '{"messages": "hello"}',
    "no messages": conversation(),
    "messages of texts": '{"messages": ["a", "b"]}',
    "message without content": conversation(USER, {"role": "assistant"}),
    "message without role": conversation({"content": "a"}, ASSISTANT),
    "content that is null": conversation(USER, {"role": "assistant", "content": None}),
    "content with an image": conversation(
        {"role": "user", "content": [{"type": "image_url"}]}, ASSISTANT
    ),
    "answer first": conversation(ASSISTANT, USER, ASSISTANT),
    "question last": conversation(SYSTEM, ASSISTANT, USER),
    "unknown role": conversation(USER, {**ASSISTANT, "role": "bot"}),
    "no assistant": conversation(SYSTEM, USER),
    "lone surrogate in a text": row("\ud800"),
    "lone surrogate in a column": '{"\\udc00": 5}',
    "line breaks in a role": conversation({"role": "a\nerror: b\r\n", "content": "a"}),
    "longer than --max_length": row("a" * 500),
}

NOT_TEXT = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))
PARQUET = parquet_of(prompt=["a", "c"], completion=["b", "d"])

# ---- Bad files ----
BAD_FILES = {
    "empty": {"rows.jsonl": ""},
    "four bad lines": {"rows.jsonl": f"{{\n{{\n{{\n{GOOD}\n{{\n"},
    "another type": {"rows.txt": GOOD},
    "csv: empty": {"rows.csv": ""},
    "csv: no header": {"rows.csv": "a,b\nc,d\n"},
    "csv: semicolons": {"rows.csv": "prompt;completion\na;b\n"},
    "csv: too many cells": {"rows.csv": "prompt,completion\na,b\nc,d,e\n"},
    "csv: too few cells": {"rows.csv": "prompt,completion\na,b\nc\n"},
    "csv: empty cells": {"rows.csv": 'prompt,completion\n,b\na,""\na,b\n'},
    "csv: open quote": {"rows.csv": 'prompt,completion\na,"b\nc,d\n'},
    "csv: Latin-1": {"rows.csv": b"prompt,completion\na,\xe9\n"},
    "json: empty": {"rows.json": ""},
    "json: torn": {"rows.json": f"[{GOOD},{TORN}"},
    "json: no rows": {"rows.json": "[]"},
    "json: one object": {"rows.json": f'{{"data": [{GOOD}]}}'},
    "json: mixed types": {"rows.json": f"[{GOOD}, {row('a', 5)}, {row('a', None)}, {GOOD}]"},
    "parquet: empty": {"rows.parquet": ""},
    "parquet: truncated": {"rows.parquet": PARQUET[:-20]},
    "parquet: bytes": {"rows.parquet": parquet_of(prompt=[b"a"], completion=["b"])},
    "parquet: numbers": {"rows.parquet": parquet_of(prompt=["a"], completion=[5])},
    "parquet: null": {"rows.parquet": parquet_of(prompt=["a", "a"], completion=[None, "b"])},
    "parquet: not UTF-8": {"rows.parquet": parquet_of(prompt=NOT_TEXT, completion=["b"])},
    "folder: two types": {"train.csv": "prompt,completion\na,b\n", "train.jsonl": GOOD},
    "folder: other columns": {
        "train-0.csv": "prompt,completion\na,b\n",
        "train-1.csv": "a,b\na,b\n",
    },
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
    "LF": ({"rows.jsonl": TWO}, [FIRST, SECOND]),
    "CRLF": ({"rows.jsonl": TWO.replace("\n", "\r\n")}, [FIRST, SECOND]),
    "no line break at the end": ({"rows.jsonl": TWO[:-1]}, [FIRST, SECOND]),
    "BOM": ({"rows.jsonl": "\ufeff" + TWO}, [FIRST, SECOND]),
    "BOM in the middle": ({"rows.jsonl": FIRST_LINE + "\n\ufeff" + SECOND_LINE}, [FIRST, SECOND]),
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
    "U+FFFD, which is UTF-8": (
        {"rows.jsonl": unescaped(prompt="x\ufffdy", completion="b")},
        [(1, "x\ufffdy", "b")],
    ),
    "a line of 5 MB": (
        {"rows.jsonl": f"{row(notes='x' * 5_000_000)}\n{SECOND_LINE}"},
        [FIRST, SECOND],
    ),
    "csv": ({"rows.csv": CSV}, [FIRST, SECOND]),
    "csv: BOM": ({"rows.csv": "\ufeff" + CSV}, [FIRST, SECOND]),
    "csv: numbers are text": (
        {"rows.csv": "question,answer\n1.50,07\n2,1e3\n"},
        [(1, "1.50", "07"), (2, "2", "1e3")],
    ),
    "csv: words with a meaning are text": (
        {"rows.csv": "question,answer\n1 + 1?,2\nNA,None\ntrue?,True\n007,1.0\n"},
        [(1, "1 + 1?", "2"), (2, "NA", "None"), (3, "true?", "True"), (4, "007", "1.0")],
    ),
    "csv: line break in a cell": (
        {"rows.csv": 'prompt,completion\n"a\nc",b\nc,d\n'},
        [(1, "a\nc", "b"), (2, "c", "d")],
    ),
    "json: list": ({"rows.json": f"[{FIRST_LINE}, {SECOND_LINE}]"}, [FIRST, SECOND]),
    "json: lines": ({"rows.json": TWO}, [FIRST, SECOND]),
    "parquet": ({"rows.parquet": PARQUET}, [FIRST, SECOND]),
    "folder": (
        {"train-0.jsonl": f"{FIRST_LINE}\r\n", "train-1.jsonl": "\ufeff" + SECOND_LINE},
        [FIRST, SECOND],
    ),
}
