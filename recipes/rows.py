"""Rows of any file, folder or hub data set, tokenised, with each bad one named by file and line, its cause and the fix; images likewise.

Every recipe uses this file when it lies beside it; a recipe that was copied alone reads rows plainly, and the first bad
one ends it with datasets' own traceback.
"""

import contextlib
import io
import json
import os
import re
from pathlib import Path

import numpy as np
import xxhash
from datasets import Dataset, Features, Value, load_dataset
from datasets import Image as ImageColumn
from fault_tolerance import fail
from PIL import Image

TEXT = dict.fromkeys("prompt completion chosen rejected instruction input output question answer".split(), str)  # a number in a CSV file is text
FILE_TYPES = {".jsonl": {"path": "text", "encoding": "latin-1"}, ".json": {"path": "json"}, ".parquet": {"path": "parquet"},
              ".csv": {"path": "csv", "keep_default_na": False, "converters": TEXT}}
DOCUMENT_TYPES = FILE_TYPES | {".txt": {"path": "text", "encoding": "latin-1", "sample_by": "document"}}  # each .txt file is one
OFFLINE = "Offline: python scripts/make_tiny_model.py (or the make_tiny_*.py of another recipe) runs/tiny, then --model_name_or_path runs/tiny/model --dataset_name runs/tiny/data/train.jsonl"
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


def check_columns(row, texts, label):
    """Raise a ValueError that says what is wrong if the row has no such columns, or no text in `texts`, the names of those of text."""
    wanted = [*texts, label]
    if not set(wanted) <= set(row):
        raise ValueError(f"has the columns {', '.join(row)[:80] or 'none'}; needs {', '.join(wanted)}: see --text_columns and --label_column")
    found = [row[name] for name in texts]
    if not all(isinstance(text, str) for text in found) or not "".join(found).strip():
        raise ValueError(f"has no text in {' and '.join(texts)}: {str(found)[1:80]}")


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


def files_of(name, split, types=FILE_TYPES):
    """Return the files of a data set: itself, or those of a folder whose names begin with the split; [] of a hub id."""
    return [Path(name)] if Path(name).suffix in types else sorted(f for f in Path(name).glob(f"{split}*") if f.suffix in types)


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
        if odd := [file.name for file in files if file.suffix != files[0].suffix or not file.stat().st_size]:
            fail(65, f"{name}: {', '.join(odd)[:200]}: empty, or of a second file type")
        place = {**reader, "data_files": [*map(str, files)]} if files else {"path": name, "name": config}
        rows = load_dataset(**place, streaming=streaming).get("train" if files else split)
    except ConnectionError as error:
        fail(69, f"{name}: {error}", OFFLINE)
    except Exception as error:  # the readers of files raise what they like
        fail(65, f"{name}: {' '.join(str(error.__cause__ or error).split())[:300]}")
    return fail(65, f"{name}: no rows in split {split}") if required and not rows else rows


def reason(error):
    """Why a row cannot be used, in one line."""
    if isinstance(error, json.JSONDecodeError):
        problem = f"is not JSON: {error.msg} at column {error.colno}" if error.doc.strip() else "is blank"
    else:
        problem = str(error) if type(error) is ValueError else f"cannot be used: {type(error).__name__}: {error}"
    return " ".join(problem.encode(errors="backslashreplace").decode().split())[:200]


def open_images(name, config, split, args):
    """Return the rows of a split, undecoded images and their labels: of a folder with SPLIT/CLASS/IMAGE or CLASS/IMAGE, or as open_split does."""
    required = split == args.dataset_train_split or args.eval_dataset_name
    if Path(name).is_dir() and not any(file.suffix == ".parquet" for file in files_of(name, split)):
        folder = Path(name) if required and not Path(name, split).is_dir() else Path(name, split)
        files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
        if not files:
            return fail(65, f"{folder}: no images in it") if required else None
        # What the cache knows them by, so that a file that has changed is looked at again
        known = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        columns = Features({args.image_column_name: ImageColumn(decode=False), args.label_column_name or "label": Value("string")})
        return Dataset.from_generator(list_images, features=columns, gen_kwargs={"folder": str(folder), "files": known, "columns": tuple(columns)})
    found = open_split(name, config, split, required) if required or not Path(name).exists() else None
    there, labels = set(found.features) if found else set(), {args.label_column_name} if args.label_column_name else {"label", "labels"}
    if found and not (args.image_column_name in there and labels & there):
        needs = f"{args.image_column_name} and {' or '.join(sorted(labels))}: see --image_column_name and --label_column_name"
        fail(65, f"{name}: has the columns {', '.join(found.features)}; needs {needs}")
    return found


def list_images(folder, files, columns):
    """Yield a row for each (path, size, time) in a folder, with the class that its place FOLDER/CLASS tells; None elsewhere."""
    for path, _, _ in files:
        parts = Path(path).parts
        yield dict(zip(columns, [{"bytes": None, "path": f"{folder}/{path}"}, parts[0] if len(parts) == 2 else None], strict=True))


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
        reason = "its format is none that Pillow knows" if "cannot identify" in str(error) else str(error)
        raise ValueError(f"{name}: is no whole image: {reason}") from None
    if deep:
        raise ValueError(f"{name}: has more than 8 bits a colour ({picture.mode}), of which 8 would be cut off: save it with 8")
    content = image["bytes"] or f"{size} {'/'.join(Path(name).parts[-2:])}".encode()
    return xxhash.xxh3_64_intdigest(content + str(label).encode()) >> 1


@contextlib.contextmanager
def decoding(image):
    """Fail with 65 where an image, {"bytes", "path"}, turns out to be broken behind its head."""
    try:
        yield
    except Exception as error:  # decoders raise what they like
        fail(65, f"{image['path']}: cannot be decoded: {error}: mend it, then go on from the newest checkpoint with --allow_change data")


def tokenize_split(rows, name, split, tokenize, args, nothing):
    """The second half of read_split."""
    source = source_of(name, split)
    unit = source.split()[-1]

    # The cache knows a function by its code, defaults and names: nothing of args among them, but the code of what it calls here
    def attempt(row, _=tuple(tool.__code__ for tool in (checked, checked_pair, check_columns, check_image, parse_line, reason))):
        try:
            return {**tokenize(parse_line(row["text"]) if unit == "line" else row), "problem": ""}
        except Exception as error:  # a template raises what it likes
            return {**nothing, "problem": reason(error)}

    try:
        done = rows.map(attempt, remove_columns=rows.column_names, num_proc=args.dataset_num_proc, desc=f"{'Tokenising' if 'truncated' in nothing else 'Checking'} {name}")
    except Exception as error:  # so does what writes them down
        fail(65, f"{name}: {' '.join(str(error.__cause__ or error).split())[:300]}")
    problems, kept = done["problem"][:], done.add_column("row", np.arange(1, len(done) + 1))
    if any(problems):  # a selection makes every later access slower
        kept = kept.select([i for i, problem in enumerate(problems) if not problem])
    bad = [f"{source} {i}: {problem}" for i, problem in enumerate(problems, 1) if problem and (problem != "is blank" or not kept)]
    if not kept or (bad and not args.skip_bad_rows):
        fail(65, *bad[:3], f"{name}: {len(bad)} of {len(rows)} {unit}s cannot be used: mend them, or leave them out with --skip_bad_rows")
    kept, told = kept.remove_columns("problem"), [str(len(kept))]
    if "truncated" in nothing:
        limits = " and ".join(f"--{limit}" for limit in vars(args) if re.fullmatch("max_(.*_)?length", limit))
        kept, told = kept.remove_columns("truncated"), [*told, f"{sum(done['truncated'][:])} truncated to {limits}"]
    return kept.with_format("numpy"), ", ".join([*told, f"{len(bad)} left out"])


def open_documents(name, config, split, required, args):
    """Return the documents of a split as they are, and the files they are in, [] of a hub id; (None, []) without that split, unless it is
    required. As files_of, but .txt files count too, each a document, and without one that is named after a split all of a folder are meant."""
    files = files_of(name, split, DOCUMENT_TYPES) or sorted(Path(name, split).rglob("*.txt"))
    files = files or (sorted(Path(name).rglob("*.txt")) if required else [])
    found = open_split(name, config, split, required, [args.text_column], files, args.streaming)
    if args.num_eval_documents and hasattr(found, "__len__") and len(found) <= args.num_eval_documents:
        fail(65, f"{name}: {len(found)} documents, of which --num_eval_documents {args.num_eval_documents} leaves none to train on")
    if args.text_column in (found and found.column_names or []):
        found = found.select_columns([args.text_column])  # the others cost time and memory
    return found, files


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
            raise ValueError(f"has the columns {', '.join(row)[:80] or 'none'}; needs {args.text_column}: see --text_column")
        if not isinstance(row[args.text_column], str):
            raise ValueError(f"has no text in {args.text_column}: {str(row[args.text_column])[:80]}")
        return row[args.text_column].encode().decode()  # no lone surrogates
    except Exception as error:  # of the parser, the codec
        if args.skip_bad_rows:
            return None
        raise ValueError(f"{place_of(number, name, files)}: {reason(error)}: mend it, or leave such documents out with --skip_bad_rows") from None


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
    at_hub = sorted(found.info.download_checksums or {}), {name: split.num_examples for name, split in (found.info.splits or {}).items()}
    known = [(file.name, file.stat().st_size) for file in files] or at_hub
    return xxhash.xxh3_128_hexdigest(json.dumps(known).encode())
