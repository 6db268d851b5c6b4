# SPDX-License-Identifier: Apache-2.0
"""Files of rows: bad lines and bad files with what is said of them, and good ones that look odd."""

import io
import json
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import parquet

GOOD = '{"prompt": "Spell the word lamp.", "completion": "l-a-m-p"}'
USER = {"role": "user", "content": "a"}
ASSISTANT = {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "c"}
COLUMNS = "needs messages | prompt, completion"
NO_TEXT = "has no text"
NO_ANSWER = "no answer"

SHAREGPT = [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]
TURNS_OF_A_PAIR = {
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "chosen": [{"role": "assistant", "content": "2"}],
    "rejected": [{"role": "assistant", "content": "3"}],
}

Files = dict[str, str | bytes]  # {name: content}


@dataclass(frozen=True)
class BadLine:
    """A line of a .jsonl file that cannot be used, and words of its problem."""

    content: str | bytes
    says: list[str]


@dataclass(frozen=True)
class BadFiles:
    """Files that cannot be used, and words of the message.

    kept: numbers of the rows that --skip_bad_rows keeps; None where it ends all the same, since
    nothing says where rows begin, or no row is good.
    """

    files: Files
    says: list[str]
    kept: list[int] | None


@dataclass(frozen=True)
class GoodFiles:
    """Files that are as good as others, and (number, prompt, answer) of each of their rows."""

    files: Files
    rows: tuple[tuple[int, str, str], ...]


BAD_LINES: dict[str, BadLine] = {}
BAD_FILES: dict[str, BadFiles] = {}
GOOD_FILES: dict[str, GoodFiles] = {}


def bad_line(name: str, content: str | bytes, says: list[str]) -> None:
    """Declare a bad line."""
    BAD_LINES[name] = BadLine(content, says)


def bad_files(name: str, files: Files, says: list[str], kept: list[int] | None = None) -> None:
    """Declare bad files."""
    BAD_FILES[name] = BadFiles(files, says, kept)


def bad_file(
    name: str, file: str, content: str | bytes, says: list[str], kept: list[int] | None = None
) -> None:
    """Declare one bad file."""
    BAD_FILES[name] = BadFiles({file: content}, says, kept)


def good_files(name: str, files: Files, *rows: tuple[int, str, str]) -> None:
    """Declare good files."""
    GOOD_FILES[name] = GoodFiles(files, rows)


def good_file(name: str, file: str, content: str | bytes, *rows: tuple[int, str, str]) -> None:
    """Declare one good file."""
    GOOD_FILES[name] = GoodFiles({file: content}, rows)


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
IN_A_TEXT = 20  # a position in GOOD that is within a text
HEAD = GOOD.encode()[:IN_A_TEXT]
TAIL = GOOD.encode()[IN_A_TEXT:]

# ---- Bad lines ----
bad_line("torn", TORN, ["is not JSON", "Unterminated string", "column"])
bad_line("torn after a comma", '{"prompt": "a", ', ["is not JSON", "column 17"])
bad_line("end of a torn line", '"completion": "b"}', ["is not JSON", "Extra data at column 13"])
bad_line("two rows", GOOD + GOOD, ["is not JSON", "Extra data"])
bad_line(
    "single quotes",
    "{'prompt': 'a', 'completion': 'b'}",
    ["is not JSON", "double quotes at column 2"],
)
bad_line("comma at the end", '{"prompt": "a", "completion": "b",}', ["is not JSON", "column 35"])
bad_line("text", "hello", ["is not JSON", "column 1"])
bad_line(
    "Latin-1",
    unescaped(prompt="caf\xe9", completion="b").encode("latin-1"),
    ["utf-8", "0xe9 in position 15"],
)
bad_line(
    "half a character",
    HEAD + b"\xc3" + TAIL,
    ["utf-8", "in position 20"],
)
bad_line(
    "surrogates in UTF-8",
    HEAD + b"\xed\xa0\x80" + TAIL,
    ["utf-8", "in position 20"],
)
bad_line("UTF-16", GOOD.encode("utf-16-le").replace(b"\n", b""), ["not JSON"])
bad_line(
    "backslash before a byte that is not UTF-8",
    GOOD.encode().replace(b"la", b"\\\xe9"),
    ["utf-8", "position 28"],
)
bad_line("NUL bytes", b"\0" * 50, ["is not JSON", "column 1"])
bad_line(
    "NUL byte in a text",
    GOOD.encode().replace(b"lamp", b"la\0p"),
    ["is not JSON", "control character"],
)
bad_line("tabulator in a text", GOOD.replace("lamp", "la\tp"), ["is not JSON", "control character"])
bad_line("list", "[1, 2]", ["is not a JSON object"])
bad_line("number", "5", ["is not a JSON object"])
bad_line("null", "null", ["is not a JSON object"])
bad_line("string", json.dumps(GOOD), ["is not a JSON object"])
bad_line("key twice", '{"prompt": "a", "prompt": "c", "completion": "b"}', ["each key once"])
bad_line(
    "key twice in a message",
    conversation(USER, ASSISTANT).replace('"role": "user"', '"role": "user", "role": "user"'),
    ["message 1 is not an object"],
)
bad_line(
    "nested without end", '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", ["RecursionError"]
)
bad_line(
    "integer without end", '{"prompt": ' + "9" * 5000 + ', "completion": "b"}', ["4300 digits"]
)
bad_line("no columns", "{}", ["has the columns none", COLUMNS])
bad_line(
    "other columns", '{"prompt": "a", "reply": "b"}', ["has the columns prompt, reply", COLUMNS]
)
bad_line(
    "a thousand columns",
    json.dumps({f"column{i}": i for i in range(1000)}),
    ["column0, column1", COLUMNS],
)
bad_line("prompt that is null", row(None), ["message 1 (user)", NO_TEXT, "null"])
bad_line("completion that is null", row("a", None), [NO_TEXT, "null"])
bad_line("completion that is a number", row("a", 5), [NO_TEXT, "5"])
bad_line("completion that is NaN", row("a", float("nan")), [NO_TEXT, "nan"])
bad_line("completion that is true", row("a", True), [NO_TEXT, "True"])
bad_line("completion that is an object", row("a", {"text": "b"}), [NO_TEXT, "{'text': 'b'}"])
bad_line("completion that is a list", row("a", ["b"]), ["message 2 is not an object"])
bad_line("prompt that is a list", row(["a"]), ["message 1 is not an object"])
bad_line(
    "empty completion",
    row("a", ""),
    [NO_ANSWER, "by user, and that of the assistant (the completion) is empty"],
)
bad_line("completion of spaces", row("a", " \n\t "), [NO_ANSWER])
bad_line(
    "empty answer after another",
    conversation(USER, ASSISTANT, USER, {"role": "assistant", "content": " "}),
    ["message 4 (assistant) is empty"],
)
bad_line(
    "empty prompt",
    row(""),
    [NO_ANSWER, "a user's text", "by assistant, and that of the user (the prompt) is empty"],
)
bad_line("prompt of spaces", row("  "), [NO_ANSWER, "a user's text"])
bad_line(
    "instruction that is null",
    '{"instruction": null, "input": "a", "output": "b"}',
    ["its instruction must be a text, but is null"],
)
bad_line(
    "input that is a number",
    '{"instruction": "a", "input": 5, "output": "b"}',
    ["its input must be a text, but is 5"],
)
bad_line(
    "messages that are null",
    '{"messages": null}',
    ["has the columns messages", "messages is a list"],
)
bad_line(
    "messages that are text",
    '{"messages": "hello"}',
    ["has the columns messages", "messages is a list"],
)
bad_line("messages that are an object", '{"messages": {"role": "user"}}', ["messages is a list"])
bad_line("no messages", conversation(), [NO_ANSWER, "nobody"])
bad_line("messages of texts", '{"messages": ["a", "b"]}', ["message 1 is not an object"])
bad_line(
    "message without content",
    conversation(USER, {"role": "assistant"}),
    ["message 2 (assistant)", "has no content"],
)
bad_line(
    "message without role", conversation({"content": "a"}, ASSISTANT), ["message 1 has no role"]
)
bad_line(
    "content that is null", conversation(USER, {"role": "assistant", "content": None}), [NO_TEXT]
)
bad_line(
    "content with an image",
    conversation({"role": "user", "content": [{"type": "image_url"}]}, ASSISTANT),
    ["message 1 (user)", "not text: image_url"],
)
bad_line(
    "role that is a number",
    conversation({"role": 1, "content": "a"}, ASSISTANT),
    ["message 1 has no role"],
)
bad_line("answer first", conversation(ASSISTANT, USER, ASSISTANT), [NO_ANSWER])
bad_line("question last", conversation(SYSTEM, ASSISTANT, USER), [NO_ANSWER])
bad_line(
    "unknown role",
    conversation(USER, {**ASSISTANT, "role": "bot"}),
    ["by user, bot; unknown role: bot; known are system, developer, user, assistant, tool"],
)
bad_line("no user", conversation(SYSTEM, ASSISTANT), [NO_ANSWER, "by system, assistant"])
bad_line("no assistant", conversation(SYSTEM, USER), [NO_ANSWER, "by system, user"])
bad_line(
    "roles of another kind",
    conversation({"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}),
    ["by human, gpt"],
)
bad_line("lone surrogate in a text", row("\ud800"), ["surrogates not allowed"])
bad_line("lone surrogate in a column", '{"\\udc00": 5}', ["has the columns \\udc00", COLUMNS])
bad_line(
    "lone surrogate in a role", conversation({"role": "\udc00", "content": "a"}), ["by \\udc00"]
)
bad_line(
    "line breaks in a role",
    conversation({"role": "a\nerror: b\r\n", "content": "a"}),
    ["by a error: b"],
)
bad_line(
    "longer than --max_length",
    row("a" * 500),
    ["no answer within --max_length 200", "tokens are prompt"],
)

NOT_TEXT = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))
PARQUET = parquet_of(prompt=["a", "c"], completion=["b", "d"])

# ---- Bad files ----
bad_file("empty", "rows.jsonl", "", ["rows.jsonl: the file is empty"])
bad_file(
    "blank lines",
    "rows.jsonl",
    "\n \r\n\n",
    ["rows.jsonl: none of the 3 lines", "line 1: is blank"],
)
bad_file("only a BOM", "rows.jsonl", "\ufeff", ["rows.jsonl"])
bad_file(
    "no good line",
    "rows.jsonl",
    "{\n" * 7,
    ["line 1: is not JSON", "none of the 7 lines can be used, all for the same reason"],
)
bad_file(
    "four bad lines",
    "rows.jsonl",
    f"{{\n{{\n{{\n{GOOD}\n{{\n",
    ["line 1: ", "line 3: ", "4 of 5 lines"],
    kept=[4],
)
bad_file("another type", "rows.txt", GOOD, ["rows.txt"])
bad_file("csv: empty", "rows.csv", "", ["rows.csv", "empty"])
bad_file("csv: only a header", "rows.csv", "prompt,completion\n", ["rows.csv", "no data"])
bad_file(
    "csv: no header", "rows.csv", "a,b\nc,d\n", ["rows.csv, row 1", "has the columns a, b", COLUMNS]
)
bad_file(
    "csv: semicolons",
    "rows.csv",
    "prompt;completion\na;b\n",
    ["rows.csv, row 1", "prompt;completion"],
)
bad_file(
    "csv: too many cells",
    "rows.csv",
    "prompt,completion\na,b\nc,d,e\n",
    ["rows.csv", "line 3, saw 3"],
)
bad_file(
    "csv: too few cells",
    "rows.csv",
    "prompt,completion\na,b\nc\n",
    ["rows.csv, row 2", NO_ANSWER],
    kept=[1],
)
bad_file(
    "csv: empty cells",
    "rows.csv",
    'prompt,completion\n,b\na,""\na,b\n',
    ["row 1: ", "row 2: ", NO_ANSWER],
    kept=[3],
)
bad_file(
    "csv: open quote",
    "rows.csv",
    'prompt,completion\na,"b\nc,d\n',
    ["rows.csv", "EOF inside string"],
)
bad_file("csv: Latin-1", "rows.csv", b"prompt,completion\na,\xe9\n", ["rows.csv", "utf-8", "0xe9"])
bad_file(
    "csv: UTF-16", "rows.csv", "prompt,completion\na,b\n".encode("utf-16"), ["rows.csv", "utf-8"]
)
bad_file("json: empty", "rows.json", "", ["rows.json", "empty"])
bad_file("json: torn", "rows.json", f"[{GOOD},{TORN}", ["rows.json", "position"])
bad_file("json: torn line", "rows.json", f"{GOOD}\n{TORN}\n", ["rows.json", "JSON parse error"])
bad_file(
    "json: key twice", "rows.json", BAD_LINES["key twice"].content, ["rows.json", "specified twice"]
)
bad_file(
    "json: Latin-1",
    "rows.json",
    GOOD.encode().replace(b"lamp", b"\xe9"),
    ["rows.json", "utf-8", "0xe9"],
)
bad_file("json: no rows", "rows.json", "[]", ["rows.json", "no data"])
bad_file(
    "json: one object",
    "rows.json",
    f'{{"data": [{GOOD}]}}',
    ["rows.json, row 1", "columns data", COLUMNS],
)
bad_file(
    "json: numbers", "rows.json", "[1, 2]", ["rows.json: none of the 2 rows", "row 1: ", COLUMNS]
)
bad_file(
    "json: mixed types",
    "rows.json",
    f"[{GOOD}, {row('a', 5)}, {row('a', None)}, {GOOD}]",
    ["rows.json, row 2", "5", "row 3", "2 of 4 rows"],
    kept=[1, 4],
)
bad_file(
    "json: nested without end",
    "rows.json",
    f"[{BAD_LINES['nested without end'].content}]",
    ["rows.json"],
)
bad_file("parquet: empty", "rows.parquet", "", ["rows.parquet", "empty"])
bad_file("parquet: truncated", "rows.parquet", PARQUET[:-20], ["rows.parquet", "corrupted"])
bad_file(
    "parquet: a hole", "rows.parquet", PARQUET[:60] + PARQUET[-100:], ["rows.parquet", "bytes"]
)
bad_file("parquet: text", "rows.parquet", GOOD, ["rows.parquet", "not a parquet file"])
bad_file(
    "parquet: bytes",
    "rows.parquet",
    parquet_of(prompt=[b"a"], completion=["b"]),
    ["row 1", NO_TEXT],
)
bad_file(
    "parquet: numbers", "rows.parquet", parquet_of(prompt=["a"], completion=[5]), ["row 1", NO_TEXT]
)
bad_file(
    "parquet: null",
    "rows.parquet",
    parquet_of(prompt=["a", "a"], completion=[None, "b"]),
    ["rows.parquet, row 1", NO_TEXT, "1 of 2 rows"],
    kept=[2],
)
bad_file(
    "parquet: not UTF-8",
    "rows.parquet",
    parquet_of(prompt=NOT_TEXT, completion=["b"]),
    ["utf-8", "0xff"],
)
bad_files(
    "folder: two types",
    {"train.csv": "prompt,completion\na,b\n", "train.jsonl": GOOD},
    ["train.jsonl", "not of the type of the first file"],
)
bad_files(
    "folder: an empty file",
    {"train-0.jsonl": GOOD, "train-1.jsonl": ""},
    ["train-1.jsonl", "empty"],
)
bad_files(
    "folder: other columns",
    {"train-0.csv": "prompt,completion\na,b\n", "train-1.csv": "a,b\na,b\n"},
    ["Schema at index 1 was different"],
)
bad_files(
    "folder: a bad line",
    {"train.jsonl": f"{GOOD}\n{{\n"},
    ["train.jsonl, line 2: ", "not JSON"],
    kept=[1],
)
bad_files(
    "folder: a bad line in the second file",
    {"train-0.jsonl": f"{GOOD}\n\n", "train-1.jsonl": f"{GOOD}\n{{\n"},
    ["line 4: ", "not JSON"],
    kept=[1, 3],
)
bad_files("folder: nothing in it", {"notes.txt": "a"}, ["data"])
bad_file("folder named as a file", "rows.jsonl/train.txt", GOOD, ["rows.jsonl"])

# ---- Good files ----
SEPARATORS = "x\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029y"
CSV = "prompt,completion\na,b\nc,d\n"
TWO = f"{FIRST_LINE}\n{SECOND_LINE}\n"

good_file(
    "messages in other forms",
    "rows.jsonl",
    row([USER])
    + "\n"
    + json.dumps(
        {"conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]}
    )
    + "\n"
    + conversation({"role": "user", "content": [{"type": "text", "text": "a"}]}, ASSISTANT),
    FIRST,
    SECOND,
    (3, "a", "b"),
)
good_file("LF", "rows.jsonl", TWO, FIRST, SECOND)
good_file("CRLF", "rows.jsonl", TWO.replace("\n", "\r\n"), FIRST, SECOND)
good_file("CR", "rows.jsonl", TWO.replace("\n", "\r"), FIRST, SECOND)
good_file("no line break at the end", "rows.jsonl", TWO[:-1], FIRST, SECOND)
good_file("BOM", "rows.jsonl", "\ufeff" + TWO, FIRST, SECOND)
good_file("BOM in the middle", "rows.jsonl", FIRST_LINE + "\n\ufeff" + SECOND_LINE, FIRST, SECOND)
good_file(
    "blank lines",
    "rows.jsonl",
    f"\n{FIRST_LINE}\n \t\n\r\n{SECOND_LINE}\n\n",
    (2, "a", "b"),
    (5, "c", "d"),
)
good_file(
    "other columns",
    "rows.jsonl",
    f'{row(score=float("nan"))}\n{{"question": "c", "answer": "d", "prompt": 5}}',
    FIRST,
    SECOND,
)
good_file(
    "columns named as ours",
    "rows.jsonl",
    TWO.replace("{", '{"row": "x", "labels": 5, "problem": "x", '),
    FIRST,
    SECOND,
)
good_file(
    "csv: columns named as ours",
    "rows.csv",
    "row,labels,problem,prompt,completion\nx,5,x,a,b\nx,5,x,c,d\n",
    FIRST,
    SECOND,
)
good_file(
    "characters that some split lines at",
    "rows.jsonl",
    f"{unescaped(prompt=SEPARATORS, completion='b')}\n{SECOND_LINE}",
    (1, SEPARATORS, "b"),
    SECOND,
)
good_file(
    "U+FFFD, which is UTF-8",
    "rows.jsonl",
    unescaped(prompt="x\ufffdy", completion="b"),
    (1, "x\ufffdy", "b"),
)
good_file(
    "a line of 5 MB",
    "rows.jsonl",
    f"{row(notes='x' * 5_000_000)}\n{SECOND_LINE}",
    FIRST,
    SECOND,
)
good_file("csv", "rows.csv", CSV, FIRST, SECOND)
good_file("csv: CRLF", "rows.csv", CSV.replace("\n", "\r\n"), FIRST, SECOND)
good_file("csv: BOM", "rows.csv", "\ufeff" + CSV, FIRST, SECOND)
good_file(
    "csv: numbers are text",
    "rows.csv",
    "question,answer\n1.50,07\n2,1e3\n",
    (1, "1.50", "07"),
    (2, "2", "1e3"),
)
good_file(
    "csv: words with a meaning are text",
    "rows.csv",
    "question,answer\n1 + 1?,2\nNA,None\ntrue?,True\n007,1.0\n",
    (1, "1 + 1?", "2"),
    (2, "NA", "None"),
    (3, "true?", "True"),
    (4, "007", "1.0"),
)
good_file(
    "csv: line break in a cell",
    "rows.csv",
    'prompt,completion\n"a\nc",b\nc,d\n',
    (1, "a\nc", "b"),
    (2, "c", "d"),
)
good_file("json: list", "rows.json", f"[{FIRST_LINE}, {SECOND_LINE}]", FIRST, SECOND)
good_file("json: lines", "rows.json", TWO, FIRST, SECOND)
good_file("json: BOM", "rows.json", "\ufeff" + TWO, FIRST, SECOND)
good_file("json: one row", "rows.json", FIRST_LINE, FIRST)
good_file("parquet", "rows.parquet", PARQUET, FIRST, SECOND)
good_files(
    "folder",
    {"train-0.jsonl": f"{FIRST_LINE}\r\n", "train-1.jsonl": "\ufeff" + SECOND_LINE},
    FIRST,
    SECOND,
)
