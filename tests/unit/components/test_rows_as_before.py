"""The components read rows as recipes/rows.py does: the same rows, counts, messages and codes.

To be deleted together with recipes/rows.py.
"""

import json
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import rows as old
from PIL import Image
from transformers import AutoTokenizer

import bert
import llama
import llama_dpo
import t5
import vit
from components import conversations
from components.columns import validate_texts
from components.documents import open_documents
from components.images import check_image, open_image_splits
from components.rows import describe_rows, open_splits, prepare_rows, read_splits
from launching import REPO
from row_files import BAD_FILES, BAD_LINES, GOOD, GOOD_FILES, TURNS_OF_A_PAIR, parquet_of, row

NEW_RULES = SimpleNamespace(
    checked=conversations.validate_conversation,
    check_keys=conversations.validate_message_keys,
    checked_pair=conversations.validate_pair,
    check_columns=validate_texts,
    check_image=check_image,
)


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "model")


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """A function that compares what two functions return, or print before they end."""
    monkeypatch.chdir(REPO)
    (tmp_path / "data").mkdir()

    def outcome_of(function, name):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / name)
        code = None
        found = None
        try:
            found = function()
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr().err.replace("bits a colour", "bits per color")  # as it was
        return code, [line for line in printed.splitlines() if "error: " in line], found

    def assert_same(recipe, of_old, of_new):
        before = outcome_of(of_old, "old")
        with monkeypatch.context() as patch:
            patch.setattr(recipe, "rows", NEW_RULES)
            after = outcome_of(of_new, "new")
        assert after == before
        return after

    return assert_same


def write(folder, files):
    """Write files, and return the one named rows.*, or the folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    alone = [name.split("/")[0] for name in files if name.startswith("rows")]
    return str(folder / "".join(alone))


def table_of(found):
    """The columns, types and rows of a data set."""
    if found is None:
        return None
    assert found.format["type"] == "numpy"
    return found.features, found.with_format(None).to_list()


def arguments(name, *flags):
    words = ["--dataset_name", name, "--max_length", "200", *flags]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["recipes/llama.py", *words])
        return llama.parse_args()


def llama_rows(name, flags, tokenizer):
    """Two functions that load the rows of recipes/llama.py."""
    args = arguments(name, *flags)
    evaluate = args.eval_strategy != "no"

    def of_old():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["recipes/llama.py"])  # named where a fix edits it
            train_rows, eval_rows, notes = llama.load_data(args, tokenizer)
        return table_of(train_rows), table_of(eval_rows), notes

    def of_new():
        prepare = partial(llama.tokenize_row, tokenizer=tokenizer, max_length=args.max_length)
        train_rows, eval_rows = read_splits(args, prepare, evaluate=evaluate)
        eval_table = None if eval_rows is None else table_of(eval_rows.dataset)
        return table_of(train_rows.dataset), eval_table, describe_rows(train_rows, eval_rows)

    return of_old, of_new


NAMED = ["--eval_strategy", "no"]
LEFT_OUT = [*NAMED, "--skip_bad_rows"]


def lines_of(names):
    """The bad lines with these names, among good and blank ones."""
    lines = [GOOD.encode()]
    for name in names:
        line = BAD_LINES[name].content
        lines += [line if isinstance(line, bytes) else line.encode(), b""]
    return b"\n".join([*lines, GOOD.encode()])


@pytest.mark.parametrize("first", range(0, len(BAD_LINES), 3))
def test_bad_lines(first, compare, tmp_path, tokenizer):
    names = list(BAD_LINES)[first : first + 3]  # as many as a message names
    source = write(tmp_path / "data", {"rows.jsonl": lines_of(names)})
    code, lines, _ = compare(llama, *llama_rows(source, NAMED, tokenizer))
    assert code == 65 and len(lines) == len(names) + 1


def test_bad_lines_that_are_left_out(compare, tmp_path, tokenizer):
    source = write(tmp_path / "data", {"rows.jsonl": lines_of(BAD_LINES)})
    code, _, (rows, _, notes) = compare(llama, *llama_rows(source, LEFT_OUT, tokenizer))
    assert code is None and len(rows[1]) == 2
    assert notes["train rows"].endswith(f" {len(BAD_LINES)} left out")


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(name, compare, tmp_path, tokenizer):
    source = write(tmp_path / "data", BAD_FILES[name].files)
    compare(llama, *llama_rows(source, NAMED, tokenizer))
    if BAD_FILES[name].kept is not None:
        compare(llama, *llama_rows(source, LEFT_OUT, tokenizer))


@pytest.mark.parametrize("name", GOOD_FILES)
def test_good_files(name, compare, tmp_path, tokenizer):
    source = write(tmp_path / "data", GOOD_FILES[name].files)
    code, _, found = compare(llama, *llama_rows(source, NAMED, tokenizer))
    assert code is None and found is not None


MIXED = "\r\n".join([GOOD, "{", "", GOOD, row(score=1), row("a", 5), GOOD, "[]", GOOD])
FOLDERS = {
    "both splits": {"train.jsonl": f"{GOOD}\n{{\n", "test.jsonl": f"{GOOD}\n{{\n{GOOD}"},
    "no rows to evaluate on": {"train.jsonl": MIXED},
    "other columns": {"train.jsonl": MIXED, "test.csv": "question,answer,c\n1,2,3\n"},
    "only bad rows to evaluate on": {"train.jsonl": GOOD, "test.jsonl": "{\n{\n"},
    "an empty file to evaluate on": {"train.jsonl": GOOD, "test.jsonl": ""},
    "two files": {"train-0.jsonl": MIXED, "train-1.jsonl": MIXED},
}


@pytest.mark.parametrize("num_proc", [1, 2])
@pytest.mark.parametrize("skip", [[], ["--skip_bad_rows"]], ids=["named", "left out"])
@pytest.mark.parametrize("name", FOLDERS)
def test_folders(name, skip, num_proc, compare, tmp_path, tokenizer):
    flags = [*skip, "--dataset_num_proc", str(num_proc)]
    source = write(tmp_path / "data", FOLDERS[name])
    compare(llama, *llama_rows(source, flags, tokenizer))


@pytest.mark.parametrize("held_out", ["held_out.jsonl", "missing.jsonl", "rows.csv"])
def test_rows_to_evaluate_on_from_elsewhere(held_out, compare, tmp_path, tokenizer):
    files = {"train.jsonl": GOOD, "held_out.jsonl": MIXED, "rows.csv": "prompt,completion\na,b\n"}
    write(tmp_path / "data", files)
    source = str(tmp_path / "data" / "train.jsonl")
    flags = ["--skip_bad_rows", "--eval_dataset_name", str(tmp_path / "data" / held_out)]
    compare(llama, *llama_rows(source, flags, tokenizer))


def test_a_hub_id_without_the_hub(compare, tokenizer):
    code, _, _ = compare(llama, *llama_rows("nobody/nothing", [], tokenizer))
    assert code in (65, 69)


ALIKE = {
    "columns": {"rows.csv": "frage,antwort\na,b\nc,d\n"},
    "too long": {"rows.jsonl": f"{row('a' * 500)}\n\n{row('a' * 600)}\n"},
    "tools": {"rows.jsonl": f"{row(tools=['a'])}\n" * 3},
    "the only one": {"rows.csv": "frage,antwort\na,b\n"},
    "not alike": {"rows.jsonl": f"{{\n{row('a', 5)}\n"},
}


@pytest.mark.parametrize("name", ALIKE)
def test_where_no_row_can_be_used(name, compare, tmp_path, tokenizer):
    source = write(tmp_path / "data", ALIKE[name])
    code, _, _ = compare(llama, *llama_rows(source, NAMED, tokenizer))
    assert code == 65


PAIRS = {
    "texts": {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"},
    "no prompt": {"chosen": "1 + 1 = 2", "rejected": "1 + 1 = 3"},
    "messages": TURNS_OF_A_PAIR,
    "a key that describes": TURNS_OF_A_PAIR | {"source": "web"},
    "other columns": {"question": "a", "answer": "b"},
    "one answer": {"prompt": "a", "chosen": "b"},
    "two kinds": TURNS_OF_A_PAIR | {"rejected": "b"},
    "a prompt of another kind": {"prompt": [{}], "chosen": "a", "rejected": "b"},
    "an empty answer": {"prompt": "a", "chosen": "b", "rejected": " "},
    "no messages": TURNS_OF_A_PAIR | {"chosen": []},
    "tools": {"prompt": "a", "chosen": "b", "rejected": "c", "tools": ["t"]},
    "the same answer": TURNS_OF_A_PAIR | {"rejected": TURNS_OF_A_PAIR["chosen"]},
}


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name, skip, compare, tmp_path, tokenizer):
    lines = [PAIRS["texts"], PAIRS[name], PAIRS["messages"]]
    content = "".join(json.dumps(pair) + "\n" for pair in lines)
    source = write(tmp_path / "data", {"rows.jsonl": content})
    flags = ["--eval_strategy", "no"] + ["--skip_bad_rows"] * skip
    args = arguments(source, *flags)
    prepare = partial(llama_dpo.tokenize_answers, tokenizer=tokenizer, max_length=200)

    def of_old():
        found, notes = old.read_split(
            source, None, "train", prepare, args, True, llama_dpo.BAD_PAIR
        )
        return table_of(found), notes

    def of_new():
        found, _ = read_splits(args, prepare, evaluate=False)
        return table_of(found.dataset), found.notes

    compare(llama_dpo, of_old, of_new)


TABLES = {
    "rows.csv": "source,target,text,label\n12,013,1e3,2\n,b,c,3\na,b,,5.5\nc,d,e,\n",
    "rows.jsonl": '{"source": "a", "target": "b", "text": "a", "label": 2}\n'
    '{"source": "a", "text": "b", "label": "x"}\n{"source": "c", "target": 5, "text": 7}\n',
    "rows.parquet": parquet_of(source=["a"], target=["b"], text=["c"], label=[1.5], score=[2]),
}


def texts_and_labels(source, skip, tokenizer):
    """Two functions that load the rows of recipes/bert.py."""
    args = Namespace(
        **vars(arguments(source)) | {"skip_bad_rows": skip, "text_columns": ["text"]},
        label_column="label",
    )

    def of_old():
        found, notes = bert.load_texts(source, None, "train", tokenizer, args)
        return table_of(found), notes

    def of_new():
        split, _ = open_splits(args, evaluate=False, text_columns=args.text_columns)
        prepare = partial(
            bert.tokenize_text,
            tokenizer=tokenizer,
            max_length=args.max_length,
            columns=args.text_columns,
            label_column=args.label_column,
            names=split.class_names(args.label_column),
        )
        found = prepare_rows(split, prepare, args)
        assert found.prefix == old.source_of(source, "train")
        return table_of(found.dataset), found.notes

    return of_old, of_new


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_texts_with_labels(name, skip, compare, tmp_path, tokenizer):
    source = write(tmp_path / "data", {name: TABLES[name]})
    compare(bert, *texts_and_labels(source, skip, tokenizer))


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_texts_with_targets(name, skip, compare, tmp_path, tokenizer):
    source = write(tmp_path / "data", {name: TABLES[name]})
    names = ["source_lang", "target_lang"]
    args = Namespace(
        **vars(arguments(source)) | {"skip_bad_rows": skip, "source_prefix": "in: "},
        source_column="source",
        target_column="target",
        max_source_length=3,
        max_target_length=9,
        **dict.fromkeys(names),
    )
    del args.max_length

    def of_old():
        found, notes = t5.load_pairs(source, None, "train", tokenizer, args)
        return table_of(found), notes

    def of_new():
        prepare = partial(
            t5.tokenize_pair,
            tokenizer=tokenizer,
            columns=("source", "target"),
            languages=(None, None),
            prefix=args.source_prefix,
            max_source_length=args.max_source_length,
            max_target_length=args.max_target_length,
        )
        found, _ = read_splits(
            args,
            prepare,
            evaluate=False,
            text_columns=["source", "target"],
            limits=["max_source_length", "max_target_length"],
        )
        return table_of(found.dataset), found.notes

    compare(t5, of_old, of_new)


def image_arguments(source, **changes):
    columns = {"image_column_name": "image", "label_column_name": None}
    return Namespace(**vars(arguments(source)) | columns | changes)


def images_and_labels(args):
    """Two functions that load the images of recipes/vit.py."""

    def images_of(found):
        return found.with_format(None).to_list()

    def of_old():
        images, found, notes = vit.load_images(args.dataset_name, None, "train", args)
        eval_images, eval_found, eval_notes = vit.load_images(args.dataset_name, None, "test", args)
        tables = [table_of(found), table_of(eval_found)]
        return images_of(images), eval_images and images_of(eval_images), *tables, notes, eval_notes

    def of_new():
        prepared = []
        notes = []
        encoded = []
        for split in open_image_splits(args, evaluate=True):
            if split is None:
                encoded.append(None)
                prepared.append(None)
                notes.append("none")
                continue
            label = partial(vit.label_image, names=split.class_names("label"))
            found = prepare_rows(split, label, args)
            encoded.append(images_of(split.dataset))
            prepared.append(table_of(found.dataset))
            notes.append(found.notes)
        return *encoded, *prepared, *notes

    return of_old, of_new


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("spoilt", [None, "text", "loose", "deep", "16 bits", "no test", "empty"])
def test_folders_of_images(spoilt, skip, compare, tmp_path):
    folder = tmp_path / "data"
    for split in ("train", "test"):
        for number, label in enumerate(["cat", "dog", "cat"]):
            path = folder / split / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8 + number, 8)).save(path)
    deep = Image.fromarray(np.full((8, 8), 40000, dtype=np.uint16))
    if spoilt == "text":
        (folder / "train" / "cat" / "a.txt").write_text("hello")
    elif spoilt == "loose":
        Image.new("RGB", (8, 8)).save(folder / "train" / "loose.png")
    elif spoilt == "deep":
        (folder / "train" / "cat" / "more").mkdir()
        Image.new("RGB", (8, 8)).save(folder / "train" / "cat" / "more" / "0.png")
    elif spoilt == "16 bits":
        deep.save(folder / "train" / "cat" / "deep.png")
    elif spoilt == "no test":
        (folder / "test").rename(tmp_path / "elsewhere")
    elif spoilt == "empty":
        (folder / "train").rename(tmp_path / "elsewhere")
        (folder / "train").mkdir()
    compare(vit, *images_and_labels(image_arguments(str(folder), skip_bad_rows=skip)))


@pytest.mark.parametrize("changes", [{}, {"label_column_name": "kind"}], ids=["labels", "kind"])
@pytest.mark.parametrize("column", ["label", "labels", "kind"])
def test_tables_of_images(column, changes, compare, tmp_path):
    names = datasets.ClassLabel(names=["zebra", "ant"])
    features = datasets.Features({"image": datasets.Image(), column: names, "id": names})
    pictures = [Image.new("RGB", (8 + number, 8)) for number in range(3)]
    table = {"image": pictures, column: [1, 0, 1], "id": [0, 0, 0]}
    path = tmp_path / "data" / "rows.parquet"
    datasets.Dataset.from_dict(table, features=features).to_parquet(path)
    args = image_arguments(str(path), dataset_test_split="none", **changes)
    of_old, of_new = images_and_labels(args)
    compare(vit, of_old, of_new)


DOCUMENTS = {
    "rows.jsonl": '\ufeff{"text": "a", "url": "b"}\n\n{\n{"text": 5}\n{"other": 1}\n'
    '{"text": "\\ud800"}\n{"text": ""}\n',
    "rows.json": '[{"text": "a", "url": "b"}, {"text": "c", "url": "d"}]',
    "rows.csv": "text,url\n1e3,b\nc,d\n",
    "rows.parquet": parquet_of(text=["a", None], url=["b", "c"]),
}
FOLDERS_OF_DOCUMENTS = {
    "files": {"train-0.jsonl": '{"text": "a"}\n{\n', "train-1.jsonl": '{"text": "c"}\n{\n'},
    "texts": {"a.txt": "a\nb", "b.txt": b"\xe9", "more/c.txt": "\ufeffc"},
    "both splits": {"train/a.txt": "a", "test/b.txt": "b"},
    "another type": {"train.csv": "text\na\n", "train.txt": "b"},
    "nothing": {"notes.md": "a"},
}


def document_arguments(source, **changes):
    more = {"text_column": "text", "streaming": False, "num_eval_documents": 0}
    return Namespace(**vars(arguments(source)) | more | changes)


def documents_of(source, args):
    """Two functions that open documents and read all of them."""

    def text_or_problem(read, row, number):
        try:
            return read(row, number)
        except ValueError as problem:
            return str(problem)

    def of_old():
        found, files, notes = old.open_documents(source, None, "train", True, args)

        def read(row, number):
            return old.text_of(row, number, source, files, args)

        texts = [text_or_problem(read, row, number) for number, row in enumerate(found, 1)]
        return texts, notes, old.identity_of(found, files), [str(file) for file in files]

    def of_new():
        documents, eval_documents = open_documents(args, evaluate=False)
        assert eval_documents is None
        texts = []
        for number, found in enumerate(documents.dataset, 1):
            texts.append(text_or_problem(documents.text_of, found, number))
        files = [str(file) for file in documents.source.files]
        return texts, documents.notes, documents.fingerprint, files

    return of_old, of_new


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name, skip, streaming, compare, tmp_path):
    source = write(tmp_path / "data", {name: DOCUMENTS[name]})
    args = document_arguments(source, skip_bad_rows=skip, streaming=streaming)
    code, _, _ = compare(vit, *documents_of(source, args))
    assert code is None


@pytest.mark.parametrize("name", FOLDERS_OF_DOCUMENTS)
def test_folders_of_documents(name, compare, tmp_path):
    source = write(tmp_path / "data", FOLDERS_OF_DOCUMENTS[name])
    compare(vit, *documents_of(source, document_arguments(source)))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_documents_that_are_held_out(number, compare, tmp_path):
    source = write(tmp_path / "data", {"rows.csv": DOCUMENTS["rows.csv"]})
    args = document_arguments(source, num_eval_documents=number)

    def of_old():
        found, _, _ = old.open_documents(source, None, "train", True, args)
        return list(found.take(number)), list(found.skip(number))

    def of_new():
        documents, held_out = open_documents(args, evaluate=True)
        assert documents.num_before == number and held_out.num_before == 0
        return list(held_out.dataset), list(documents.dataset)

    code, _, _ = compare(vit, of_old, of_new)
    assert code == (None if number == 1 else 65)


def test_the_files_that_are_compared_are_those_of_the_old_tests():
    """So that no case is lost when tests/unit/test_bad_data.py is deleted."""
    text = Path(REPO / "tests" / "unit" / "test_bad_data.py").read_text()
    for name in [*BAD_LINES, *BAD_FILES, *GOOD_FILES]:
        assert f'"{name}": ' in text
