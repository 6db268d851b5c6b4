"""Every bad file ends with 65, its name, the line or row, what is wrong and what to do, before a model loads;
--skip_bad_rows leaves the bad rows out and counts them; and what only looks odd is read as it is meant.
"""

import io
import json
import re
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet
from transformers import AutoTokenizer, ByT5Tokenizer

import llama
import rows

GOOD = '{"prompt": "Spell the word lamp.", "completion": "l-a-m-p"}'
TURNS = {
    "user": {"role": "user", "content": "a"},
    "assistant": {"role": "assistant", "content": "b"},
    "system": {"role": "system", "content": "c"},
}
COLUMNS, NO_TEXT, NO_ANSWER = "needs messages | prompt, completion", "has no text", "no answer"


def row(prompt="a", completion="b", **columns):
    return json.dumps({"prompt": prompt, "completion": completion, **columns})


def unescaped(**columns):
    return json.dumps(columns, ensure_ascii=False)


def conversation(*messages):
    return json.dumps(
        {
            "messages": [
                TURNS.get(message, message) if isinstance(message, str) else message
                for message in messages
            ]
        }
    )


# ---- Bad lines of a .jsonl file: the line, and words of the problem. Each is line 2 of a file with good rows ----
BAD_LINES = {
    "torn": (GOOD[:40], ["is not JSON", "Unterminated string", "column"]),
    "torn after a comma": ('{"prompt": "a", ', ["is not JSON", "column 17"]),
    "end of a torn line": ('"completion": "b"}', ["is not JSON", "Extra data at column 13"]),
    "two rows": (GOOD + GOOD, ["is not JSON", "Extra data"]),
    "single quotes": (
        "{'prompt': 'a', 'completion': 'b'}",
        ["is not JSON", "double quotes at column 2"],
    ),
    "comma at the end": ('{"prompt": "a", "completion": "b",}', ["is not JSON", "column 35"]),
    "text": ("hello", ["is not JSON", "column 1"]),
    "Latin-1": (
        unescaped(prompt="caf\xe9", completion="b").encode("latin-1"),
        ["utf-8", "0xe9 in position 15"],
    ),
    "half a character": (
        GOOD.encode()[:20] + "\xe9".encode()[:1] + GOOD.encode()[20:],
        ["utf-8", "in position 20"],
    ),
    "surrogates in UTF-8": (
        GOOD.encode()[:20] + b"\xed\xa0\x80" + GOOD.encode()[20:],
        ["utf-8", "in position 20"],
    ),
    "UTF-16": (GOOD.encode("utf-16-le").replace(b"\n", b""), ["not JSON"]),
    "backslash before a byte that is not UTF-8": (
        GOOD.encode().replace(b"la", b"\\\xe9"),
        ["utf-8", "position 28"],
    ),
    "NUL bytes": (b"\0" * 50, ["is not JSON", "column 1"]),
    "NUL byte in a text": (
        GOOD.encode().replace(b"lamp", b"la\0p"),
        ["is not JSON", "control character"],
    ),
    "tabulator in a text": (GOOD.replace("lamp", "la\tp"), ["is not JSON", "control character"]),
    "list": ("[1, 2]", ["is not a JSON object"]),
    "number": ("5", ["is not a JSON object"]),
    "null": ("null", ["is not a JSON object"]),
    "string": (json.dumps(GOOD), ["is not a JSON object"]),
    "key twice": ('{"prompt": "a", "prompt": "c", "completion": "b"}', ["each key once"]),
    "key twice in a message": (
        conversation("user", "assistant").replace(
            '"role": "user"', '"role": "user", "role": "user"'
        ),
        ["message 1 is not an object"],
    ),
    "nested without end": ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", ["RecursionError"]),
    "integer without end": ('{"prompt": ' + "9" * 5000 + ', "completion": "b"}', ["4300 digits"]),
    "no columns": ("{}", ["has the columns none", COLUMNS]),
    "other columns": ('{"prompt": "a", "reply": "b"}', ["has the columns prompt, reply", COLUMNS]),
    "a thousand columns": (
        json.dumps({f"column{i}": i for i in range(1000)}),
        ["column0, column1", COLUMNS],
    ),
    "prompt that is null": (row(None), ["message 1 (user)", NO_TEXT, "null"]),
    "completion that is null": (row("a", None), [NO_TEXT, "null"]),
    "completion that is a number": (row("a", 5), [NO_TEXT, "5"]),
    "completion that is NaN": (row("a", float("nan")), [NO_TEXT, "nan"]),
    "completion that is true": (row("a", True), [NO_TEXT, "True"]),
    "completion that is an object": (row("a", {"text": "b"}), [NO_TEXT, "{'text': 'b'}"]),
    "completion that is a list": (row("a", ["b"]), [NO_TEXT, "a list of 1 part"]),
    "prompt that is a list": (row(["a"]), ["can only concatenate list"]),
    "prompt as messages alone": (row([TURNS["user"]]), ["can only concatenate list"]),
    "empty completion": (row("a", ""), [NO_ANSWER]),
    "completion of spaces": (row("a", " \n\t "), [NO_ANSWER]),
    "empty answer after another": (
        conversation("user", "assistant", "user", {"role": "assistant", "content": " "}),
        ["message 4 (assistant) is empty"],
    ),
    "empty prompt": (row(""), [NO_ANSWER, "a user's text", "by assistant"]),
    "prompt of spaces": (row("  "), [NO_ANSWER, "a user's text"]),
    "instruction that is null": (
        '{"instruction": null, "input": "a", "output": "b"}',
        ["NoneType found"],
    ),
    "input that is a number": (
        '{"instruction": "a", "input": 5, "output": "b"}',
        ["expected str instance, int"],
    ),
    "messages that are null": (
        '{"messages": null}',
        ["has the columns messages", "messages is a list"],
    ),
    "messages that are text": (
        '{"messages": "hello"}',
        ["has the columns messages", "messages is a list"],
    ),
    "messages that are an object": ('{"messages": {"role": "user"}}', ["messages is a list"]),
    "no messages": (conversation(), [NO_ANSWER, "nobody"]),
    "messages of texts": ('{"messages": ["a", "b"]}', ["message 1 is not an object"]),
    "message without content": (
        conversation("user", {"role": "assistant"}),
        ["message 2 (assistant)", "has no content"],
    ),
    "message without role": (
        conversation({"content": "a"}, "assistant"),
        ["message 1 has no role"],
    ),
    "content that is null": (
        conversation("user", {"role": "assistant", "content": None}),
        [NO_TEXT],
    ),
    "content in parts": (
        conversation({"role": "user", "content": [{"text": "a"}]}, "assistant"),
        [NO_TEXT],
    ),
    "role that is a number": (
        conversation({"role": 1, "content": "a"}, "assistant"),
        ["message 1 has no role"],
    ),
    "answer first": (conversation("assistant", "user", "assistant"), [NO_ANSWER]),
    "question last": (conversation("system", "assistant", "user"), [NO_ANSWER]),
    "no user": (conversation("system", "assistant"), [NO_ANSWER, "by system, assistant"]),
    "no assistant": (conversation("system", "user"), [NO_ANSWER, "by system, user"]),
    "roles of another kind": (
        conversation({"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}),
        ["by human, gpt"],
    ),
    "lone surrogate in a text": (row("\ud800"), ["surrogates not allowed"]),
    "lone surrogate in a column": ('{"\\udc00": 5}', ["has the columns \\udc00", COLUMNS]),
    "lone surrogate in a role": (conversation({"role": "\udc00", "content": "a"}), ["by \\udc00"]),
    "line breaks in a role": (
        conversation({"role": "a\nerror: b\r\n", "content": "a"}),
        ["by a error: b"],
    ),
    "longer than --max_length": (
        row("a" * 500),
        ["no answer within --max_length 200", "tokens are prompt"],
    ),
}


def parquet_of(**columns):
    parquet.write_table(pa.table(columns), file := io.BytesIO())
    return file.getvalue()


NOT_TEXT = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))
PARQUET = parquet_of(prompt=["a", "c"], completion=["b", "d"])
# ---- Bad files of all types: {name: content}, words of the message, the rows that --skip_bad_rows keeps (None: it
# stops all the same, since nothing says where rows begin) ----
BAD_FILES = {
    "empty": ({"rows.jsonl": ""}, ["rows.jsonl", "empty"], None),
    "blank lines": (
        {"rows.jsonl": "\n \r\n\n"},
        ["rows.jsonl, line 1: is blank", "none of the 3 lines"],
        None,
    ),
    "only a BOM": ({"rows.jsonl": "\ufeff"}, ["rows.jsonl"], None),
    "no good line": (
        {"rows.jsonl": "{\n" * 7},
        ["line 1: is not JSON", "none of the 7 lines can be used, all for the same reason"],
        None,
    ),
    "four bad lines": (
        {"rows.jsonl": f"{{\n{{\n{{\n{GOOD}\n{{\n"},
        ["line 1: ", "line 3: ", "4 of 5 lines"],
        [4],
    ),
    "another type": ({"rows.txt": GOOD}, ["rows.txt"], None),
    "csv: empty": ({"rows.csv": ""}, ["rows.csv", "empty"], None),
    "csv: header alone": ({"rows.csv": "prompt,completion\n"}, ["rows.csv", "no data"], None),
    "csv: no header": (
        {"rows.csv": "a,b\nc,d\n"},
        ["rows.csv, row 1", "has the columns a, b", COLUMNS],
        None,
    ),
    "csv: semicolons": (
        {"rows.csv": "prompt;completion\na;b\n"},
        ["rows.csv, row 1", "prompt;completion"],
        None,
    ),
    "csv: too many cells": (
        {"rows.csv": "prompt,completion\na,b\nc,d,e\n"},
        ["rows.csv", "line 3, saw 3"],
        None,
    ),
    "csv: too few cells": (
        {"rows.csv": "prompt,completion\na,b\nc\n"},
        ["rows.csv, row 2", NO_ANSWER],
        [1],
    ),
    "csv: empty cells": (
        {"rows.csv": 'prompt,completion\n,b\na,""\na,b\n'},
        ["row 1: ", "row 2: ", NO_ANSWER],
        [3],
    ),
    "csv: open quote": (
        {"rows.csv": 'prompt,completion\na,"b\nc,d\n'},
        ["rows.csv", "EOF inside string"],
        None,
    ),
    "csv: Latin-1": (
        {"rows.csv": b"prompt,completion\na,\xe9\n"},
        ["rows.csv", "utf-8", "0xe9"],
        None,
    ),
    "csv: UTF-16": (
        {"rows.csv": "prompt,completion\na,b\n".encode("utf-16")},
        ["rows.csv", "utf-8"],
        None,
    ),
    "json: empty": ({"rows.json": ""}, ["rows.json", "empty"], None),
    "json: torn": ({"rows.json": f"[{GOOD},{GOOD[:40]}"}, ["rows.json", "position"], None),
    "json: torn line": (
        {"rows.json": f"{GOOD}\n{GOOD[:40]}\n"},
        ["rows.json", "JSON parse error"],
        None,
    ),
    "json: key twice": (
        {"rows.json": BAD_LINES["key twice"][0]},
        ["rows.json", "specified twice"],
        None,
    ),
    "json: Latin-1": (
        {"rows.json": GOOD.encode().replace(b"lamp", b"\xe9")},
        ["rows.json", "utf-8", "0xe9"],
        None,
    ),
    "json: no rows": ({"rows.json": "[]"}, ["rows.json", "no data"], None),
    "json: one object": (
        {"rows.json": f'{{"data": [{GOOD}]}}'},
        ["rows.json, row 1", "columns data", COLUMNS],
        None,
    ),
    "json: numbers": ({"rows.json": "[1, 2]"}, ["rows.json, row 1", COLUMNS], None),
    "json: mixed types": (
        {"rows.json": f"[{GOOD}, {row('a', 5)}, {row('a', None)}, {GOOD}]"},
        ["rows.json, row 2", "5", "row 3", "2 of 4 rows"],
        [1, 4],
    ),
    "json: nested without end": (
        {"rows.json": f"[{BAD_LINES['nested without end'][0]}]"},
        ["rows.json"],
        None,
    ),
    "parquet: empty": ({"rows.parquet": ""}, ["rows.parquet", "empty"], None),
    "parquet: truncated": ({"rows.parquet": PARQUET[:-20]}, ["rows.parquet", "corrupted"], None),
    "parquet: a hole": (
        {"rows.parquet": PARQUET[:60] + PARQUET[-100:]},
        ["rows.parquet", "bytes"],
        None,
    ),
    "parquet: text": ({"rows.parquet": GOOD}, ["rows.parquet", "not a parquet file"], None),
    "parquet: bytes": (
        {"rows.parquet": parquet_of(prompt=[b"a"], completion=["b"])},
        ["row 1", NO_TEXT],
        None,
    ),
    "parquet: numbers": (
        {"rows.parquet": parquet_of(prompt=["a"], completion=[5])},
        ["row 1", NO_TEXT],
        None,
    ),
    "parquet: null": (
        {"rows.parquet": parquet_of(prompt=["a", "a"], completion=[None, "b"])},
        ["rows.parquet, row 1", NO_TEXT, "1 of 2 rows"],
        [2],
    ),
    "parquet: not UTF-8": (
        {"rows.parquet": parquet_of(prompt=NOT_TEXT, completion=["b"])},
        ["utf-8", "0xff"],
        None,
    ),
    "folder: two types": (
        {"train.csv": "prompt,completion\na,b\n", "train.jsonl": GOOD},
        ["train.jsonl", "second file type"],
        None,
    ),
    "folder: an empty file": (
        {"train-0.jsonl": GOOD, "train-1.jsonl": ""},
        ["train-1.jsonl", "empty"],
        None,
    ),
    "folder: other columns": (
        {"train-0.csv": "prompt,completion\na,b\n", "train-1.csv": "a,b\na,b\n"},
        ["Schema at index 1 was different"],
        None,
    ),
    "folder: a bad line": (
        {"train.jsonl": f"{GOOD}\n{{\n"},
        ["train.jsonl, line 2: ", "not JSON"],
        [1],
    ),
    "folder: a bad line in the second file": (
        {"train-0.jsonl": f"{GOOD}\n\n", "train-1.jsonl": f"{GOOD}\n{{\n"},
        ["line 4: ", "not JSON"],
        [1, 3],
    ),
    "folder: nothing in it": ({"notes.txt": "a"}, ["data"], None),
    "folder named as a file": ({"rows.jsonl/train.txt": GOOD}, ["rows.jsonl"], None),
}
# ---- Files that are as good as others, and what they give: (number, prompt, answer) of each row ----
PLAIN = [(1, "a", "b"), (2, "c", "d")]
SEPARATORS = "x\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029y"
CSV = "prompt,completion\na,b\nc,d\n"
TWO = f"{row()}\n{row('c', 'd')}\n"
GOOD_FILES = {
    "LF": ({"rows.jsonl": TWO}, PLAIN),
    "CRLF": ({"rows.jsonl": TWO.replace("\n", "\r\n")}, PLAIN),
    "CR": ({"rows.jsonl": TWO.replace("\n", "\r")}, PLAIN),
    "no line break at the end": ({"rows.jsonl": TWO[:-1]}, PLAIN),
    "BOM": ({"rows.jsonl": "\ufeff" + TWO}, PLAIN),
    "BOM in the middle": ({"rows.jsonl": row() + "\n\ufeff" + row("c", "d")}, PLAIN),
    "blank lines": (
        {"rows.jsonl": f"\n{row()}\n \t\n\r\n{row('c', 'd')}\n\n"},
        [(2, "a", "b"), (5, "c", "d")],
    ),
    "other columns": (
        {
            "rows.jsonl": f'{row(score=float("nan"))}\n{{"question": "c", "answer": "d", "prompt": 5}}'
        },
        PLAIN,
    ),
    "columns named as ours": (
        {"rows.jsonl": TWO.replace("{", '{"row": "x", "labels": 5, "problem": "x", ')},
        PLAIN,
    ),
    "csv: columns named as ours": (
        {"rows.csv": "row,labels,problem,prompt,completion\nx,5,x,a,b\nx,5,x,c,d\n"},
        PLAIN,
    ),
    "characters that some split lines at": (
        {"rows.jsonl": f"{unescaped(prompt=SEPARATORS, completion='b')}\n{row('c', 'd')}"},
        [(1, SEPARATORS, "b"), PLAIN[1]],
    ),
    "U+FFFD, which is UTF-8": (
        {"rows.jsonl": unescaped(prompt="x\ufffdy", completion="b")},
        [(1, "x\ufffdy", "b")],
    ),
    "a line of 5 MB": ({"rows.jsonl": f"{row(notes='x' * 5_000_000)}\n{row('c', 'd')}"}, PLAIN),
    "csv": ({"rows.csv": CSV}, PLAIN),
    "csv: CRLF": ({"rows.csv": CSV.replace("\n", "\r\n")}, PLAIN),
    "csv: BOM": ({"rows.csv": "\ufeff" + CSV}, PLAIN),
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
    "json: list": ({"rows.json": f"[{row()}, {row('c', 'd')}]"}, PLAIN),
    "json: lines": ({"rows.json": TWO}, PLAIN),
    "json: BOM": ({"rows.json": "\ufeff" + TWO}, PLAIN),
    "json: one row": ({"rows.json": row()}, PLAIN[:1]),
    "parquet": ({"rows.parquet": PARQUET}, PLAIN),
    "folder": ({"train-0.jsonl": f"{row()}\r\n", "train-1.jsonl": "\ufeff" + row("c", "d")}, PLAIN),
}


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "model")


@pytest.fixture
def load(tmp_path, monkeypatch, tokenizer):
    """A function that writes files and loads them as the recipe would with the given flags."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()

    def load_files(files, *flags, tokenizer=tokenizer):
        for name, content in files.items():
            path = tmp_path / "data" / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        alone = [name.split("/")[0] for name in files if name.startswith("rows")]
        source = tmp_path / "data" / "".join(alone)  # the folder, if there is no such file
        command = [
            "llama.py",
            "--dataset_name",
            source,
            "--max_length",
            200,
            "--eval_strategy",
            "no",
            *flags,
        ]
        monkeypatch.setattr(sys, "argv", [str(word) for word in command])
        rows, eval_rows, counts = llama.load_data(llama.parse_args(), tokenizer)
        return rows.with_format(None), eval_rows and eval_rows.with_format(None), counts

    return load_files


@pytest.fixture
def problems_of(load, capsys):
    """A function that does the same, expects 65 and returns the lines of the message."""

    def stops(*arguments, **options):
        with pytest.raises(SystemExit) as stopped:
            load(*arguments, **options)
        lines = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")
        ]
        assert (
            stopped.value.code == 65
            and 1 <= len(lines) <= 6
            and all(len(line) < 600 for line in lines)
        )
        return lines

    return stops


def in_line_2(line):
    line = line if isinstance(line, bytes) else line.encode()
    return {"rows.jsonl": b"\n".join([GOOD.encode(), line, b"", GOOD.encode()])}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_or_left_out(name, load, problems_of):
    line, words = BAD_LINES[name]
    first, last = problems_of(in_line_2(line))
    assert "rows.jsonl, line 2: " in first and all(word in first for word in words), first
    assert (
        "1 of 4 lines cannot be used" in last and "fix them" in last and "--skip_bad_rows" in last
    )
    rows, _, counts = load(in_line_2(line), "--skip_bad_rows")
    assert (
        list(rows["row"]) == [1, 4]
        and counts["train rows"] == "2, 0 truncated to --max_length, 1 left out"
    )


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named(name, load, problems_of):
    files, words, kept = BAD_FILES[name]
    message = "\n".join(problems_of(files))
    assert all(word in message for word in words), message
    if kept is None:
        assert problems_of(files, "--skip_bad_rows") == message.splitlines()
    else:
        rows, _, counts = load(files, "--skip_bad_rows")
        assert list(rows["row"]) == kept and counts["train rows"].startswith(f"{len(kept)}, ")


@pytest.mark.parametrize("name", GOOD_FILES)
def test_what_looks_odd_is_read_as_it_is_meant(name, load, tokenizer):
    files, expected = GOOD_FILES[name]
    rows, _, counts = load(files)
    assert (
        list(rows["row"]) == [number for number, _, _ in expected]
        and " 0 left out" in counts["train rows"]
    )
    for found, (_, prompt, completion) in zip(rows, expected, strict=True):
        wanted = llama.tokenize_row({"prompt": prompt, "completion": completion}, tokenizer, 200)
        assert found["input_ids"] == wanted["input_ids"] and found["labels"] == wanted["labels"]


def test_two_processes_find_the_same_rows(load, problems_of):
    lines = [GOOD, "{", "", GOOD, GOOD, row("a", 5), GOOD, "[]", GOOD]
    files = {"rows.jsonl": "\r\n".join(lines)}
    alone = problems_of(files)
    assert problems_of(files, "--dataset_num_proc", 2) == alone and "line 8: " in alone[2]
    rows, _, counts = load(files, "--dataset_num_proc", 2, "--skip_bad_rows")
    assert list(rows["row"]) == [1, 4, 5, 7, 9] and counts["train rows"].endswith(" 3 left out")


def test_evaluation_rows_are_read_with_the_same_care(load, problems_of, tmp_path):
    files = {"train.jsonl": f'{GOOD}\n{{"question": "a"', "test.jsonl": f"{GOOD}\n{{\n"}
    flags = ["--eval_strategy", "epoch"]
    rows, eval_rows, counts = load(files, *flags, "--skip_bad_rows")
    assert list(rows["row"]) == list(eval_rows["row"]) == [1] and counts["eval rows"].endswith(
        " 1 left out"
    )
    assert "test.jsonl, line 2: " in problems_of({"train.jsonl": GOOD}, *flags)[0]
    missing = tmp_path / "held_out.jsonl"
    assert (
        "held_out.jsonl: [Errno 2] No such file"
        in problems_of({}, *flags, "--eval_dataset_name", missing)[0]
    )


def test_without_evaluation_rows_the_training_rows_are_not_read_anew_for_them(load, tmp_path):
    flags = ["--eval_strategy", "epoch", "--skip_bad_rows"]
    for source in ("", "train.jsonl"):  # a folder, a file
        flags += ["--dataset_name", tmp_path / "data" / source]
        rows, eval_rows, counts = load({"train.jsonl": f"{GOOD}\n{{\n"}, *flags)
        assert list(rows["row"]) == [1] and eval_rows is None and counts["eval rows"] == "none"


def test_an_unreadable_file_is_named(problems_of, monkeypatch):
    def refuse(*arguments, **options):  # root may read all files
        raise PermissionError(13, "Permission denied", "rows.jsonl")

    monkeypatch.setattr("rows.load_dataset", refuse)
    assert "rows.jsonl: [Errno 13] Permission denied" in problems_of({"rows.jsonl": GOOD})[0]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "TemplateError: Roles must alternate"),
        ("{{ messages[0].name.first }}", "UndefinedError"),
        ("{% for message in messages %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0]['content'] }}", "no answer in the text that the chat template makes"),
        ("", ""),
    ],
    ids=["role order", "unknown name", "no template", "arithmetic", "no answers", "nothing"],
)
def test_what_the_template_raises_is_a_problem_of_the_row(template, says, problems_of, tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    tokenizer.chat_template = template
    (problem,) = problems_of({"rows.jsonl": GOOD}, tokenizer=tokenizer)
    assert "rows.jsonl, line 1, the only one: " in problem and says in problem, problem


def test_a_tokenizer_without_places_is_a_problem(problems_of):
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = llama.DEFAULT_CHAT_TEMPLATE
    (problem,) = problems_of({"rows.jsonl": GOOD}, tokenizer=tokenizer)
    assert "line 1, the only one: cannot be used: KeyError: 'offset" in problem


def test_an_answer_cut_to_nothing_is_a_problem_and_one_cut_short_is_not(
    load, problems_of, tokenizer
):
    row = llama.tokenize_row(json.loads(GOOD), tokenizer, 1024)
    prompt = row["labels"].count(-100)
    (problem,) = problems_of({"rows.jsonl": GOOD}, "--max_length", prompt)
    assert (
        f"within --max_length {prompt}: raise --max_length, the longest prompt has {prompt} tokens"
        in problem
    )
    assert load({"rows.jsonl": GOOD}, "--max_length", prompt + 1)[2]["train rows"] == (
        "1, 1 truncated to --max_length, 0 left out"
    )


# ---- Where no row can be used: {name: content}, flags, the one line ----
ALL_ALIKE = {
    "columns": (
        {"rows.csv": "frage,antwort\na,b\nc,d\n"},
        [],
        "rows.csv: none of the 2 rows can be used, all for the same reason: {file}, row 1: has the columns "
        "frage, antwort; needs messages | prompt, completion | instruction, output | question, answer; "
        "messages is a list: rename your columns, or edit ROW_FORMATS in llama.py",
    ),
    "too long": (
        {"rows.jsonl": f"{row('a' * 500)}\n\n{row('a' * 600)}\n"},
        [],
        "rows.jsonl: none of the 2 lines can be used, all for the same reason: {file}, line 1: has no answer "
        "within --max_length 200: raise --max_length, the longest prompt has {longest} tokens",
    ),
    "tools": (
        {"rows.jsonl": f"{row(tools=['a'])}\n" * 3},
        ["--skip_bad_rows"],
        "rows.jsonl: none of the 3 lines can be used, all for the same reason: {file}, line 1: has tools, which "
        "this recipe does not pass to the chat template yet: remove the column if the answers do not need it, "
        "else leave out the row",
    ),
}


@pytest.mark.parametrize("name", ALL_ALIKE)
def test_where_all_rows_fail_alike_one_line_has_the_cure(name, problems_of, tmp_path, tokenizer):
    files, flags, says = ALL_ALIKE[name]
    longest = llama.tokenize_row({"prompt": "a" * 600, "completion": "b"}, tokenizer, 2000)[
        "labels"
    ].count(-100)
    folder = tmp_path / "data"
    says = says.format(file=folder / next(iter(files)), longest=longest)
    assert problems_of(files, *flags) == [f"error: {folder}/{says}"]


def test_where_all_rows_fail_and_not_alike_nobody_is_advised_to_leave_them_out(problems_of):
    lines = problems_of({"rows.jsonl": f"{{\n{row('a', 5)}\n"})
    assert len(lines) == 3 and lines[-1].endswith(
        "rows.jsonl: none of the 2 lines can be used: fix them"
    )


def test_columns_and_keys_that_nothing_reads_are_named(load):
    answer = TURNS["assistant"] | {"id": "x7"}
    lines = [row(source="web", score=1), row(source="web"), conversation("user", answer)]
    files = {"rows.jsonl": "\n".join(lines)}
    told = load(files)[2]["train rows"]
    assert told.endswith(
        "; not read: source in 2 rows, score in 1 rows, id (of messages) in 1 rows"
    )
    columns = load({"rows.csv": "prompt,completion,source\na,b,web\nc,d,web\n"})[2]["train rows"]
    assert columns == "2, 0 truncated to --max_length, 0 left out; not read: source"
    table = {
        "rows.parquet": parquet_of(
            prompt=["a"], completion=["b"], tools=pa.nulls(1), messages=pa.nulls(1)
        )
    }
    assert "not read" not in load(table)[2]["train rows"]  # null is as if absent


def test_the_cache_knows_the_rules_of_a_row(load, monkeypatch):
    """A row that was tokenised before a rule was made is read again."""
    file = {"rows.jsonl": row(tools=["a"])}
    with monkeypatch.context() as patch:
        known = tuple(() if item == rows.TOOL_COLUMNS else item for item in rows.KNOWN_BY)
        patch.setattr(rows, "KNOWN_BY", known)
        patch.setattr(rows, "TOOL_COLUMNS", ())
        assert "1, 0 truncated" in load(file)[2]["train rows"]
    with pytest.raises(SystemExit):
        load(file)


def test_all_rules_are_known_to_the_cache():
    """What `tokenize_split` keeps in the cache follows from functions of rows.py that a recipe calls for a row."""
    source = Path(rows.__file__).read_text()
    row_rules = re.findall(
        r"^def ((?:check|is_empty|described|parse_line|reason)\w*)", source, flags=re.M
    )
    assert {name for name in row_rules if name != "check_image"} <= {
        rule.__name__ for rule in rows.RULES
    }


def test_the_number_of_a_row_reaches_the_batch(load, tokenizer):
    rows = load(in_line_2("{"), "--skip_bad_rows")[0]
    assert llama.collate(rows.with_format("numpy"), [[0], [1]], tokenizer.pad_token_id)["row"] == [
        1,
        4,
    ]


def test_rows_are_tokenised_once(load, tmp_path):
    files = {"train.jsonl": f"{GOOD}\n{{\n", "test.jsonl": GOOD}
    flags = ["--eval_strategy", "epoch", "--skip_bad_rows"]
    load(files, *flags)
    cached = sorted((tmp_path / "cache").rglob("*.arrow"))
    load(
        {},
        "--dataset_name",
        tmp_path / "data",
        *flags,
        "--seed",
        1,
        "--output_dir",
        tmp_path / "other",
    )
    assert sorted((tmp_path / "cache").rglob("*.arrow")) == cached
    load({}, "--dataset_name", tmp_path / "data", *flags, "--max_length", 100)
    assert len(sorted((tmp_path / "cache").rglob("*.arrow"))) == len(cached) + 2


def test_a_recipe_copied_alone_reads_the_same_kinds_of_files(load, monkeypatch):
    table = io.BytesIO()
    parquet.write_table(pa.table({"prompt": ["a"], "completion": ["b"]}), table)
    files = {
        "rows.jsonl": '{"prompt": "a", "completion": "b"}\n',
        "rows.json": '[{"prompt": "a", "completion": "b"}]',
        "rows.csv": "prompt,completion\na,b\n",
        "rows.parquet": table.getvalue(),
    }
    monkeypatch.setattr(llama, "rows", None)
    found = [load({name: content})[0][0]["input_ids"] for name, content in files.items()]
    assert len(found[0]) > 2 and found == found[:1] * 4


@pytest.mark.parametrize("content", [None, 4], ids=str)
def test_a_recipe_copied_alone_ends_at_what_is_no_text(content, monkeypatch):
    monkeypatch.setattr(llama, "rows", None)
    for columns in (
        {"messages": [TURNS["user"], TURNS["assistant"] | {"content": content}]},
        {"prompt": "a", "completion": content},
        {"prompt": content, "completion": "b"},
    ):
        with pytest.raises(TypeError):  # a template would write None and 4 into the text
            llama.row_to_messages(columns)
    for columns in (
        {"messages": [TURNS["user"], TURNS["assistant"]]},
        {"prompt": "a", "completion": "b"},
    ):
        assert llama.row_to_messages(columns) == [TURNS["user"], TURNS["assistant"]]
