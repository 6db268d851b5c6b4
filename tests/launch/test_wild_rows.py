# SPDX-License-Identifier: Apache-2.0
"""What the user names is what is read: paths, columns and images; what is odd in it is said.

All is seen from outside: command lines, summaries, files and exit codes.
"""

import csv
import json
import math
import re
import shutil

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

import launching
from launching import REPO, errors_of, read_metrics, read_rows, recipe, rehearse

# Characters that patterns expand, and some that only look odd
FOLDER = "my [ab] rows*"
NEIGHBOR = "my a rowszz"  # FOLDER as a pattern
FILE = "tr[12]in?"
NEIGHBOR_FILE = "tr1in1"  # FILE as a pattern
OWN, OTHERS, COPIES, NEW = 24, 5, 7, 4  # rows of the file, of its neighbors; held-out rows
FORMATS = {
    "llama": ".jsonl",
    "llama_dpo": ".json",
    "mixtral": ".parquet",
    "bert": ".csv",
    "bert_ner": ".parquet",
    "t5": ".jsonl",
}


def plan(name, model, rows, out, *arguments):
    """Return the summary of a run that is only planned, in one line."""
    words = ["--model_name_or_path", model, "--dataset_name", rows, "--output_dir", out]
    return " ".join(recipe(*words, *arguments, "--dry_run", name=name, code=0).output.split())


def write_rows(path, rows):
    """Write rows in the format of a file's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        launching.write_rows(path, rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path


def distinct_rows(tiny):
    """Rows of a tiny model, no two of which are alike."""
    return list({str(row): row for row in read_rows(tiny / "data" / "train.jsonl")}.values())


@pytest.mark.parametrize("recipe", FORMATS)
def test_a_file_that_exists_is_that_file_and_copies_in_another_are_counted(
    recipe, tiny_of, tmp_path
):
    """Beside each path are files that it fits as a pattern.

    COPIES of the rows to evaluate on are trained on too, and NEW are not.
    """
    rows = distinct_rows(tiny_of(recipe))
    own, rest = rows[:OWN], rows[OWN:]
    suffix = FORMATS[recipe]
    train = write_rows(tmp_path / FOLDER / f"{FILE}{suffix}", own)
    held_out = write_rows(tmp_path / FOLDER / f"[e]val{suffix}", own[:COPIES] + rest[:NEW])
    for folder in (FOLDER, NEIGHBOR):
        write_rows(tmp_path / folder / f"{NEIGHBOR_FILE}{suffix}", rest[-OTHERS:])
        write_rows(tmp_path / folder / f"eval{suffix}", rest[-OTHERS:])
    words = ["--eval_dataset_name", held_out]
    summary = plan(recipe, tiny_of(recipe) / "model", train, tmp_path / "run", *words)
    assert f"train rows: {OWN}" in summary
    assert f"eval rows: {COPIES + NEW}" in summary
    assert f"warning: {COPIES} of the {COPIES + NEW} held-out rows are trained on too" in summary


WRONG = ["wrong " * 50]


def write_texts(folder, ending, texts):
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}{ending}").write_text(text)


@pytest.mark.parametrize(
    ("suffix", "flags"),
    [(".txt", []), (".parquet", ["--streaming"])],
    ids=["texts", "stream"],
)
def test_documents_of_a_path_that_exists_are_those(suffix, flags, tiny_of, tmp_path):
    tiny = tiny_of("mistral_pretrain")
    rows = distinct_rows(tiny)[:3]
    texts = [row["text"] for row in rows]
    if suffix == ".txt":
        named = tmp_path / FOLDER
        write_texts(named, "[1].txt", texts)
        write_texts(tmp_path / NEIGHBOR, "1.txt", WRONG)
    else:
        named = write_rows(tmp_path / FOLDER / f"{FILE}{suffix}", rows)
        for folder in (FOLDER, NEIGHBOR):
            path = tmp_path / folder / f"{NEIGHBOR_FILE}{suffix}"
            write_rows(path, [{"text": text} for text in WRONG])
    words = ["--num_train_epochs", 1, "--max_length", 64]
    summary = plan("mistral_pretrain", tiny / "model", named, tmp_path / "run", *words, *flags)
    assert steps_in(summary) == steps_of(tiny / "model", texts, passes=1, per_step=64 * 8)
    assert "wrong" not in summary.partition("sample: ")[2]


def test_a_folder_of_any_layout_and_several_files_are_those_that_were_named(tiny_of, tmp_path):
    tiny = tiny_of("llama")
    rows = distinct_rows(tiny)
    # The library finds the files of such a folder by itself
    write_rows(tmp_path / FOLDER / "data" / "train-00000-of-00001.parquet", rows[:8])
    write_rows(tmp_path / NEIGHBOR / "data" / "train-00000-of-00001.parquet", rows[8:10])
    # A folder that is called like a file, as some programs write them
    write_rows(tmp_path / "part[1].csv" / "part-0.csv", rows[10:13])
    names = [tmp_path / FOLDER, tmp_path / "part[1].csv"]
    for number in (1, 2):
        names.append(write_rows(tmp_path / f"[{number}]" / f"x{number}?.jsonl", rows[13:15]))
        write_rows(tmp_path / f"{number}" / f"x{number}y.jsonl", rows[:7])
    first, *others = names
    summary = plan("llama", tiny / "model", first, tmp_path / "run", "--dataset_name", *names)
    assert f"train rows: {8 + 3 + 2 + 2} in {1 + len(others)} data sets" in summary


def test_images_of_a_folder_that_exists_are_those_and_copies_are_found_by_content(
    tiny_of, tmp_path
):
    tiny = tiny_of("vit")
    images = sorted((tiny / "data" / "train").rglob("*.png"))
    fresh = sorted((tiny / "data" / "test").rglob("*.png"))
    for place, path in enumerate(images[:20]):
        for folder, number in ((FOLDER, 20), (NEIGHBOR, 3)):
            if place < number:
                copy_to(path, tmp_path / folder / "train" / f"{place % 2}[a]" / f"{place}.png")
    for place, path in enumerate(images[:6]):  # Copies under another name, of the same class
        copy_to(path, tmp_path / FOLDER / "test" / f"{place % 2}[a]" / f"copy {place}.png")
    for place, path in enumerate(fresh[:4]):  # Others under the same name
        copy_to(path, tmp_path / FOLDER / "test" / f"{place % 2}[a]" / f"{place}.png")
    summary = plan("vit", tiny / "model", tmp_path / FOLDER, tmp_path / "run")
    assert "train rows: 20" in summary and "eval rows: 10" in summary
    assert "warning: 6 of the 10 held-out rows are trained on too" in summary


def copy_to(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def test_a_split_that_is_held_out_of_rows_with_copies_is_counted(tiny_of, tmp_path):
    tiny = tiny_of("llama")
    rows = distinct_rows(tiny)[:100]
    once = write_rows(tmp_path / "once.jsonl", rows)
    twice = write_rows(tmp_path / "twice.jsonl", rows + rows)
    words = ["--eval_split", 0.25]
    summary = plan("llama", tiny / "model", twice, tmp_path / "run", *words)
    copies = int(re.search(r"warning: (\d+) of the 50 held-out rows are trained on", summary)[1])
    # A held-out row's copy is trained on with a chance of 3/4; 4 standard deviations on each side
    assert 25 < copies <= 50
    assert "trained on too" not in plan("llama", tiny / "model", once, tmp_path / "run", *words)


# ---- The output folder ----
@pytest.mark.parametrize(
    ("recipe", "file", "out"),
    [
        ("llama", "out/run.json", "out"),
        ("t5", "out/predictions.jsonl", "link"),
        ("bert", "out/chats.jsonl", "out/deep/run"),
        ("mistral_pretrain", "out/chats.jsonl", "out"),
    ],
)
def test_an_output_folder_in_which_rows_would_be_lost_or_mixed_is_refused(
    recipe, file, out, tiny_of, tmp_path
):
    tiny = tiny_of(recipe)
    rows = write_rows(tmp_path / file, distinct_rows(tiny)[:8])
    (tmp_path / "link").symlink_to("out")
    before = rows.read_bytes()
    words = ["--model_name_or_path", tiny / "model", "--output_dir", tmp_path / out]
    words += ["--dataset_name", rows.parent if rows.stem == "chats" else rows]
    (line,) = errors_of(launching.recipe(*words, "--max_steps", 1, name=recipe, code=64))
    assert f"--output_dir {tmp_path / out} " in line
    assert rows.read_bytes() == before and list(rows.parent.iterdir()) == [rows]


# ---- Columns ----
@pytest.mark.parametrize(
    ("columns", "num_texts", "unread"),
    [("question sentence", 2, "day"), ("text aspect", 1, "aspect")],
)
def test_a_second_text_is_read_as_a_pair_or_told(columns, num_texts, unread, tiny_of, tmp_path):
    rows = []
    for number in range(20):
        row = {name: f"the food was good {number}" for name in columns.split()}
        rows.append({**row, "label": number % 2, "day": "2020-01-01 10:00"})
    file = write_rows(tmp_path / "rows.jsonl", rows)
    words = [tiny_of("bert") / "model", file, tmp_path / "run"]
    summary = plan("bert", *words)
    assert f"not read: {unread}" in summary
    pair = plan("bert", *words, "--text_columns", *columns.split())
    for told, number in ((summary, num_texts), (pair, 2)):
        assert told.partition("sample: ")[2].partition(" -> ")[0].count("[SEP]") == number


# ---- Steps of pre-training ----
def tokens_of(model, texts):
    """Return the number of tokens of texts, each with an end of sequence."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    return sum(len(tokenizer(text)["input_ids"]) + 1 for text in texts)


def steps_of(model, texts, passes, per_step):
    """Return the steps in which each token but the first of all is predicted or begins a text."""
    return math.ceil((passes * tokens_of(model, texts) - 1) / per_step)


def steps_in(summary):
    return int(re.search(r"steps: ([\d,]+)", summary)[1].replace(",", ""))


def texts_of_tokens(model, number):
    """Return texts that have this number of tokens, each with its end."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer("Momo is a baker in Gret and buys flour. " * number)["input_ids"]
    for cut in range(1, len(ids)):
        texts = ["Quovu is a smith.", tokenizer.decode(ids[:cut])]
        if tokens_of(model, texts) == number:
            return texts
    raise AssertionError(f"no text has {number} tokens")


def test_no_step_is_without_a_token_to_predict(tiny_of, tmp_path):
    """Two steps of two ranks and one token more, which begins a text: it is predicted by none."""
    tiny = tiny_of("mistral_pretrain")
    texts = texts_of_tokens(tiny / "model", 2 * 2 * 32 + 1)
    file = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    words = ["--model_name_or_path", tiny / "model", "--dataset_name", file, "--max_length", 32]
    words += ["--num_train_epochs", 1, "--per_device_train_batch_size", 1, "--save_steps", 0]
    words += ["--output_dir", tmp_path / "run", "--nonfinite", "stop", "--logging_steps", 1]
    program = REPO / "recipes" / "mistral_pretrain.py"
    done = rehearse("ddp", *words, num_processes=2, script=program, code=0)
    steps = read_metrics(tmp_path / "run")[0]
    assert len(steps) == 2 and all(math.isfinite(step["loss"]) for step in steps)
    assert steps[-1]["epoch"] == 1 and "Read 1 whole passes" in done.output
