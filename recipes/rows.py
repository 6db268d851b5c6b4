"""Rows of any file, folder or hub data set, tokenised, with each bad one named by file and line, its cause and the fix; images likewise.

Every recipe uses this file when it lies beside it; a recipe that was copied alone reads rows plainly, and the first bad
one ends it with datasets' own traceback.
"""

import contextlib
import io
import json
import os
import re
import sys
from collections import Counter, UserDict
from pathlib import Path

import numpy as np
import xxhash
from datasets import Dataset, Features, Value, load_dataset
from datasets import Image as ImageColumn
from PIL import Image

from fault_tolerance import fail

TEXT = dict.fromkeys(
    "prompt completion chosen rejected instruction input output question answer".split(), str
)  # a number in a CSV file is text
FILE_TYPES = {
    ".jsonl": {"path": "text", "encoding": "latin-1"},
    ".json": {"path": "json"},
    ".parquet": {"path": "parquet"},
    ".csv": {"path": "csv", "keep_default_na": False, "converters": TEXT},
}
DOCUMENT_TYPES = FILE_TYPES | {
    ".txt": {"path": "text", "encoding": "latin-1", "sample_by": "document"}
}  # each .txt file is one
OFFLINE = "Offline: python scripts/make_tiny.py llama (or another recipe) runs/tiny, then --model_name_or_path runs/tiny/model --dataset_name runs/tiny/data/train.jsonl"
NOTHING = {
    "input_ids": [],
    "labels": [],
    "truncated": False,
    "length": 0,
    "largest": 0,
    "hash": 0,
}  # what `tokenize` has of a row that cannot be used

# Tuples, not sets, since `tokenize_split` gives them to the cache, which knows a tuple by its text.
TOOL_COLUMNS = ("tools", "functions")  # of a row: what the assistant may call
TOOL_KEYS = ("tool_calls", "function_call", "tool_call_id")  # of a message
TOOL_ROLES = ("tool", "function")
# Keys of a message that say what is trained on. The recipes train on all that the assistant says and on nothing else.
TRAINED_KEYS = ("weight", "train", "loss")
# Keys of a message that carry a part of what was said. A row is refused where the chat template drops one of them.
# Any other key (id, timestamp, ...) describes the message; to refuse those would refuse most logs of conversations,
# so the start summary names them instead.
SAID_KEYS = (
    "name",
    "reasoning_content",
    "reasoning",
    "thinking",
    "thoughts",
    "thought",
    "refusal",
    "tools",
    "documents",
    "image",
    "images",
    "audio",
    "audios",
    "video",
    "videos",
    "file",
    "files",
    "attachments",
)


class NotedRow(UserDict):
    """A row that notes which of its columns are read, so that the start summary can name the others."""

    def __init__(self, row):
        super().__init__()
        self.data = row  # not copied: a row of a data set decodes a column when it is read
        self.read = set()
        self.dropped_keys = set()  # of its messages, by the chat template

    def __getitem__(self, name):
        self.read.add(name)
        return self.data[name]

    def not_read(self):
        """Return the names of what nothing reads, at most 20, so that rows with thousands of columns stay small."""
        columns = [name for name in self.data if name not in self.read]
        keys = [f"{key} (of messages)" for key in sorted(self.dropped_keys)]
        return [*keys, *columns][:20]


def parse_line(text):
    """Return the object in a line of a .jsonl file, given as latin-1; raise a ValueError that says why there is none."""
    line = text.encode("latin-1").decode("utf-8-sig")
    row = json.loads(
        line,
        object_pairs_hook=lambda pairs: dict(pairs) if len(dict(pairs)) == len(pairs) else pairs,
    )
    if not isinstance(row, dict):
        raise ValueError("is not a JSON object with each key once")
    return row


def is_empty(value):
    """Whether a column or key is as if it were absent: readers of files fill what a row lacks with null."""
    if isinstance(value, str):
        value = value.strip()
    return value in (None, "", [], {}, "null", "[]", "{}")  # tools are often JSON in a text


def described(value):
    """Return the start of a value as text, for a message."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"a list of {len(value)} part{'' if len(value) == 1 else 's'}"
    return str(value)[:80]


def check_tools(row):
    """Raise a ValueError if a row has tools, which the recipes do not pass to the chat template."""
    for column in TOOL_COLUMNS:
        if not is_empty(row.get(column)):
            raise ValueError(
                f"has {column}, which this recipe does not pass to the chat template yet: "
                "remove the column if the answers do not need it, else leave out the row"
            )


def check_message(message, number):
    """Raise a ValueError that says why a message cannot be used; number: its place in the conversation, from 1."""
    if not isinstance(message, dict):
        raise ValueError(
            f"message {number} is not an object with role and content: {described(message)}"
        )
    role = message.get("role")
    if not isinstance(role, str):
        raise ValueError(f"message {number} has no role: {described(message)}")
    place = f"message {number} ({role[:40]})"
    calls = [key for key in TOOL_KEYS if not is_empty(message.get(key))]
    if calls or role in TOOL_ROLES:
        raise ValueError(
            f"{place} has {', '.join(calls) or 'the role of a tool'}, and tool calls are not supported yet"
        )
    if not isinstance(message.get("content"), str):
        found = (
            f"its content is {described(message['content'])}"
            if "content" in message
            else "it has no content"
        )
        raise ValueError(f"{place} has no text: {found}; content has to be one text")
    for key in TRAINED_KEYS:
        wanted = message.get(key)
        happens = role == "assistant"
        if wanted is not None and wanted != happens:  # 1 is True, 0 is False
            done = "is trained on" if happens else "is not trained on"
            raise ValueError(
                f"{place} has {key} {described(wanted)}, but what the {role[:40]} says {done}: "
                "the recipe cannot change that for one message yet"
            )


def checked(messages, row, formats):
    """Return the messages of a row, or raise a ValueError that says why they cannot be used. formats: {question's column: answer's}."""
    if not isinstance(messages, list):
        wanted = " | ".join(map(", ".join, formats.items()))
        raise ValueError(
            f"has the columns {', '.join(row)[:80] or 'none'}; needs messages | {wanted}; messages is a list: rename your columns, or edit ROW_FORMATS"
        )
    check_tools(row)
    for number, message in enumerate(messages, 1):
        check_message(message, number)
    said = [message["role"] for message in messages if message["content"].strip()]
    if (
        "user" not in said
        or "assistant" not in said[said.index("user") :]
        or messages[0]["role"] == "assistant"
    ):
        raise ValueError(
            f"has no answer to train on after a user's text: its texts are by {', '.join(said)[:80] or 'nobody'}"
        )
    for number, message in enumerate(messages, 1):
        if message["role"] == "assistant" and not message["content"].strip():
            raise ValueError(
                f"message {number} (assistant) is empty: the model would learn to say nothing"
            )
    return messages


def check_keys(row, messages, tokenizer):
    """Raise a ValueError if a message has a key that carries a part of what was said and that the chat template drops.
    Keys that only describe a message are noted in the row. A key is dropped if the text is the same without it."""
    others = []
    for message in messages:
        others += [
            key
            for key in message
            if key not in ("role", "content", *TRAINED_KEYS) and not is_empty(message[key])
        ]
    others = list(dict.fromkeys(others))
    if not others:
        return

    def text_without(keys):
        fewer = [
            {key: value for key, value in message.items() if key not in keys}
            for message in messages
        ]
        try:
            return tokenizer.apply_chat_template(fewer, tokenize=False)
        except Exception:  # a template raises what it likes; one that needs a key uses it
            return None

    text = tokenizer.apply_chat_template(messages, tokenize=False)
    dropped = others
    if text_without(others) != text:
        dropped = [key for key in others if text_without([key]) == text]
    lost = [key for key in dropped if key in SAID_KEYS]
    if lost:
        number, message = next(
            (i, m) for i, m in enumerate(messages, 1) if not is_empty(m.get(lost[0]))
        )
        raise ValueError(
            f"message {number} ({message['role'][:40]}) has {', '.join(lost)}, which the chat template drops: "
            "remove it from the data, or use a tokenizer whose template writes it"
        )
    if isinstance(row, NotedRow):
        row.dropped_keys.update(dropped)


def check_columns(row, texts, label):
    """Raise a ValueError that says what is wrong if the row has no such columns, or no text in `texts`, the names of those of text."""
    wanted = [*texts, label]
    if not set(wanted) <= set(row):
        raise ValueError(
            f"has the columns {', '.join(row)[:80] or 'none'}; needs {', '.join(wanted)}: see --text_columns and --label_column"
        )
    found = [row[name] for name in texts]
    if not all(isinstance(text, str) for text in found) or not "".join(found).strip():
        raise ValueError(f"has no text in {' and '.join(texts)}: {str(found)[1:80]}")


def checked_pair(row):
    """Return prompt, chosen and rejected of a row, or raise a ValueError that says why they cannot be used: both answers are texts or lists of
    messages; the prompt is of the same kind, or they begin with it."""
    prompt, chosen, rejected = (row.get(name) for name in ("prompt", "chosen", "rejected"))
    kind = type(chosen)
    if kind not in (str, list) or type(rejected) is not kind or (kind, type(prompt)) == (str, list):
        raise ValueError(
            f"has the columns {', '.join(row)[:80] or 'none'}; needs chosen and rejected, both texts or both lists of messages, and prompt, of the same kind, unless they begin with it: edit row_to_pair"
        )
    check_tools(row)
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if kind is list:
            checked((prompt if type(prompt) is list else []) + answer, row, {})
        if not (answer if kind is str else answer and answer[-1]["content"]).strip():
            raise ValueError(f"has no text in {name}")
    return prompt, chosen, rejected


def files_of(name, split, types=FILE_TYPES):
    """Return the files of a data set: itself, or those of a folder whose names begin with the split; [] of a hub id."""
    return (
        [Path(name)]
        if Path(name).suffix in types
        else sorted(f for f in Path(name).glob(f"{split}*") if f.suffix in types)
    )


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


def open_split(name, config, split, required, texts=(), files=None, streaming=False):
    """Return the rows of a split as they are, those of a .jsonl file as lines. texts: further columns of CSV files that are text.
    files: those of the split, if they are known. streaming: as a data set that is read in order alone."""
    files = files_of(name, split) if files is None else files
    reader = DOCUMENT_TYPES[files[0].suffix] if files else {}
    if "converters" in reader:
        reader = reader | {"converters": TEXT | dict.fromkeys(texts, str)}
    try:
        if odd := [
            file.name for file in files if file.suffix != files[0].suffix or not file.stat().st_size
        ]:
            fail(65, f"{name}: {', '.join(odd)[:200]}: empty, or of a second file type")
        place = (
            {**reader, "data_files": [*map(str, files)]}
            if files
            else {"path": name, "name": config}
        )
        rows = load_dataset(**place, streaming=streaming).get("train" if files else split)
    except ConnectionError as error:
        fail(69, f"{name}: {error}", OFFLINE)
    except Exception as error:  # the readers of files raise what they like
        fail(65, f"{name}: {' '.join(str(error.__cause__ or error).split())[:300]}")
    return fail(65, f"{name}: no rows in split {split}") if required and not rows else rows


def reason(error):
    """Why a row cannot be used, in one line."""
    if isinstance(error, json.JSONDecodeError):
        problem = (
            f"is not JSON: {error.msg} at column {error.colno}" if error.doc.strip() else "is blank"
        )
    else:
        problem = (
            str(error)
            if type(error) is ValueError
            else f"cannot be used: {type(error).__name__}: {error}"
        )
    return " ".join(problem.encode(errors="backslashreplace").decode().split())[:300]


def open_images(name, config, split, args):
    """Return the rows of a split, undecoded images and their labels: of a folder with SPLIT/CLASS/IMAGE or CLASS/IMAGE, or as open_split does."""
    required = split == args.dataset_train_split or args.eval_dataset_name
    if Path(name).is_dir() and not any(file.suffix == ".parquet" for file in files_of(name, split)):
        folder = Path(name) if required and not Path(name, split).is_dir() else Path(name, split)
        files = sorted(
            path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")
        )
        if not files:
            return fail(65, f"{folder}: no images in it") if required else None
        # What the cache knows them by, so that a file that has changed is looked at again
        known = [
            (str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns)
            for path in files
        ]
        columns = Features(
            {
                args.image_column_name: ImageColumn(decode=False),
                args.label_column_name or "label": Value("string"),
            }
        )
        return Dataset.from_generator(
            list_images,
            features=columns,
            gen_kwargs={"folder": str(folder), "files": known, "columns": tuple(columns)},
        )
    found = (
        open_split(name, config, split, required) if required or not Path(name).exists() else None
    )
    there, labels = (
        set(found.features) if found else set(),
        {args.label_column_name} if args.label_column_name else {"label", "labels"},
    )
    if found and not (args.image_column_name in there and labels & there):
        needs = f"{args.image_column_name} and {' or '.join(sorted(labels))}: see --image_column_name and --label_column_name"
        fail(65, f"{name}: has the columns {', '.join(found.features)}; needs {needs}")
    return found


def list_images(folder, files, columns):
    """Yield a row for each (path, size, time) in a folder, with the class that its place FOLDER/CLASS tells; None elsewhere."""
    for path, _, _ in files:
        parts = Path(path).parts
        yield dict(
            zip(
                columns,
                [
                    {"bytes": None, "path": f"{folder}/{path}"},
                    parts[0] if len(parts) == 2 else None,
                ],
                strict=True,
            )
        )


def check_image(image, label):
    """Return a hash of an image, {"bytes", "path"}, and its label, or raise a ValueError that says why they cannot be used. Of a file only the
    head and the last bytes are read, and all of it where those are not the end of a PNG or JPEG file, as if it were cut off."""
    name = image and image["path"] or "an image without a path"
    if label is None or str(label).strip() in ("", "nan", "inf", "-inf"):
        raise ValueError(f"{name}: has no class, or does not lie in FOLDER/CLASS")
    try:
        with io.BytesIO(image["bytes"]) if image["bytes"] else open(image["path"], "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 16, 0))
            ends = file.read().endswith((b"IEND\xaeB`\x82", b"\xff\xd9"))
            file.seek(0)
            with Image.open(file) as picture:
                deep = picture.mode.startswith(("I", "F"))
                if not ends:
                    picture.load()
    except Exception as error:  # decoders raise what they like
        reason = (
            "its format is none that Pillow knows"
            if "cannot identify" in str(error)
            else str(error)
        )
        raise ValueError(f"{name}: is no whole image: {reason}") from None
    if deep:
        raise ValueError(
            f"{name}: has more than 8 bits a colour ({picture.mode}), of which 8 would be cut off: save it with 8"
        )
    content = image["bytes"] or f"{size} {'/'.join(Path(name).parts[-2:])}".encode()
    return xxhash.xxh3_64_intdigest(content + str(label).encode()) >> 1


@contextlib.contextmanager
def decoding(image):
    """Fail with 65 where an image, {"bytes", "path"}, turns out to be broken behind its head."""
    try:
        yield
    except Exception as error:  # decoders raise what they like
        fail(
            65,
            f"{image['path']}: cannot be decoded: {error}: fix it, then resume from the newest checkpoint with --allow_change data",
        )


def alike(problems):
    """Whether all problems are of one kind: the same words up to the first colon, whatever the numbers in them."""
    return len({re.sub(r"\d+", "", problem.split(": ")[0]) for problem in problems}) == 1


def with_cure(problems):
    """Return the problem that all rows share, with its cure. Made here, not where a row is read: the cache may have read
    the row for another recipe."""
    prompts = [re.search(r"(\d+) tokens are prompt", problem) for problem in problems]
    if all(prompts):
        longest = max(int(found.group(1)) for found in prompts)
        text = problems[0].split(": ")[0]
        return f"{text}: raise --max_length, the longest prompt has {longest} tokens"
    problem = problems[0]
    if re.search(r"edit \w+$", problem):
        return f"{problem} in {sys.argv[0]}"
    return problem


def unusable(problems, source, name, num_rows, some_good):
    """Return the lines of the message for rows that cannot be used. problems: {number of the row, from 1: its problem}.
    num_rows: all rows, blank lines included. some_good: whether any can be used; without, nobody is advised to leave out
    the others."""
    unit = source.split()[-1]
    count, texts = len(problems), list(problems.values())
    first = [f"{source} {number}: {problem}" for number, problem in list(problems.items())[:3]]
    if some_good:
        advice = "fix them, or leave them out with --skip_bad_rows"
        return [*first, f"{name}: {count} of {num_rows} {unit}s cannot be used: {advice}"]
    if count == 1:
        return [f"{source} {next(iter(problems))}, the only one: {with_cure(texts)}"]
    if alike(texts):
        which = f"{source} {next(iter(problems))}"
        return [
            f"{name}: none of the {count} {unit}s can be used, all for the same reason: {which}: {with_cure(texts)}"
        ]
    return [*first, f"{name}: none of the {count} {unit}s can be used: fix them"]


def told_not_read(counts, num_rows):
    """Return what the summary says of columns that nothing reads, "" if there are none. counts: {name: rows with it}."""
    if not counts:
        return ""
    names = [
        name if count == num_rows else f"{name} in {count} rows" for name, count in counts.items()
    ]
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"; not read: {', '.join(names[:20])}{more}"


# What decides about a row, besides the recipe: the cache knows a function by its code and defaults, and what it calls by name alone
RULES = (
    checked,
    checked_pair,
    check_columns,
    check_image,
    parse_line,
    reason,
    is_empty,
    described,
    check_tools,
    check_message,
    check_keys,
    NotedRow.__init__,
    NotedRow.__getitem__,
    NotedRow.not_read,
)
KNOWN_BY = (
    *(rule.__code__ for rule in RULES),
    TOOL_COLUMNS,
    TOOL_KEYS,
    TOOL_ROLES,
    TRAINED_KEYS,
    SAID_KEYS,
)


def tokenize_split(rows, name, split, tokenize, args, nothing, others=()):
    """The second half of read_split. others: further columns, which the rows no longer have since nothing reads them."""
    source = source_of(name, split)
    unit = source.split()[-1]

    # The cache knows this function by its code, defaults and names: nothing of args among them, but the rules that it calls
    def attempt(row, _=KNOWN_BY):
        try:
            row = NotedRow(parse_line(row["text"]) if unit == "line" else row)
            return {**tokenize(row), "problem": "", "not_read": json.dumps(row.not_read())}
        except Exception as error:  # a template raises what it likes
            return {**nothing, "problem": reason(error), "not_read": "[]"}

    try:
        done = rows.map(
            attempt,
            remove_columns=rows.column_names,
            num_proc=args.dataset_num_proc,
            desc=f"{'Tokenising' if 'truncated' in nothing else 'Checking'} {name}",
        )
    except Exception as error:  # so does what writes them down
        fail(65, f"{name}: {' '.join(str(error.__cause__ or error).split())[:300]}")
    problems, kept = done["problem"][:], done.add_column("row", np.arange(1, len(done) + 1))
    if any(problems):  # a selection makes every later access slower
        kept = kept.select([i for i, problem in enumerate(problems) if not problem])
    bad = {number: problem for number, problem in enumerate(problems, 1) if problem}
    not_blank = {number: problem for number, problem in bad.items() if problem != "is blank"}
    if kept or not_blank:  # blank lines between rows do no harm
        bad = not_blank
    if not kept or (bad and not args.skip_bad_rows):
        fail(65, *unusable(bad, source, name, len(rows), len(kept) > 0))
    not_read = Counter(dict.fromkeys(others, len(kept)))
    for names, count in Counter(kept["not_read"][:]).items():
        not_read.update(dict.fromkeys(json.loads(names), count))
    kept, told = kept.remove_columns(["problem", "not_read"]), [str(len(kept))]
    if "truncated" in nothing:
        limits = " and ".join(
            f"--{limit}" for limit in vars(args) if re.fullmatch("max_(.*_)?length", limit)
        )
        kept, told = (
            kept.remove_columns("truncated"),
            [*told, f"{sum(done['truncated'][:])} truncated to {limits}"],
        )
    counts = ", ".join([*told, f"{len(bad)} left out"])
    if split == args.dataset_train_split:  # once: rows to evaluate on mostly have the same columns
        counts += told_not_read(not_read, len(kept))
    return kept.with_format("numpy"), counts


def open_documents(name, config, split, required, args):
    """Return the documents of a split as they are, the files they are in, [] of a hub id, and what the summary says of columns that nothing
    reads; (None, [], "") without that split, unless it is required. As files_of, but .txt files count too, each a document, and without one
    that is named after a split all of a folder are meant."""
    files = files_of(name, split, DOCUMENT_TYPES) or sorted(Path(name, split).rglob("*.txt"))
    files = files or (sorted(Path(name).rglob("*.txt")) if required else [])
    found = open_split(name, config, split, required, [args.text_column], files, args.streaming)
    if (
        args.num_eval_documents
        and hasattr(found, "__len__")
        and len(found) <= args.num_eval_documents
    ):
        fail(
            65,
            f"{name}: {len(found)} documents, of which --num_eval_documents {args.num_eval_documents} leaves none to train on",
        )
    if not found:
        return None, [], ""
    unread = [name for name in columns_of_documents(found, files) if name != args.text_column]
    if args.text_column in (found.column_names or []):
        found = found.select_columns([args.text_column])  # the others cost time and memory
    return found, files, told_not_read(dict.fromkeys(unread, 1), 1)


def columns_of_documents(found, files):
    """Return the names of the columns of documents: those of the first where each has its own, and none of .txt files."""
    kind = files[0].suffix if files else None
    if kind == ".txt":
        return []
    if kind != ".jsonl" and found.column_names:
        return found.column_names
    first = next(iter(found), {})
    if kind != ".jsonl":
        return list(first)
    try:
        return list(parse_line(first["text"]))
    except ValueError:  # a bad line is named when it is read
        return []


def text_of(row, number, name, files, args):
    """Return the text of a row of open_documents, None of one that cannot be used and is left out. Else a ValueError names it by file and
    line, cause and fix. number: of the row, from 1, in all files."""
    kind = files[0].suffix if files else None
    try:
        if kind == ".txt":
            return row["text"].encode("latin-1").decode("utf-8-sig")
        if kind == ".jsonl":
            row = parse_line(row["text"]) if row["text"].strip() else {args.text_column: ""}
        if args.text_column not in row:
            raise ValueError(
                f"has the columns {', '.join(row)[:80] or 'none'}; needs {args.text_column}: see --text_column"
            )
        if not isinstance(row[args.text_column], str):
            raise ValueError(
                f"has no text in {args.text_column}: {str(row[args.text_column])[:80]}"
            )
        return row[args.text_column].encode().decode()  # no lone surrogates
    except Exception as error:  # of the parser, the codec
        if args.skip_bad_rows:
            return None
        raise ValueError(
            f"{place_of(number, name, files)}: {reason(error)}: fix it, or leave such documents out with --skip_bad_rows"
        ) from None


def place_of(number, name, files):
    """Return the name of a row: its file, and the line where there are lines. number: from 1, in all files."""
    if files and files[0].suffix == ".txt":
        return str(files[number - 1])
    if not files or files[0].suffix != ".jsonl":
        return f"{files[0] if len(files) == 1 else name}, row {number}"
    for file in files:
        with open(file, encoding="latin-1") as lines:
            length = sum(1 for _ in lines)
        if number <= length:
            return f"{file}, line {number}"
        number -= length


def identity_of(found, files):
    """Return a hash of what is known of a data set that is not read as a whole: names and sizes of its files, or of the hub's, and numbers of rows."""
    at_hub = (
        sorted(found.info.download_checksums or {}),
        {name: split.num_examples for name, split in (found.info.splits or {}).items()},
    )
    known = [(file.name, file.stat().st_size) for file in files] or at_hub
    return xxhash.xxh3_128_hexdigest(json.dumps(known).encode())
