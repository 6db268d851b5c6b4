# SPDX-License-Identifier: Apache-2.0
"""What the user names is what is read: paths, columns and images; what is odd in it is said.

All is seen from outside: command lines, summaries, files and exit codes.
"""

import csv
import json
import shutil

import pytest
from datasets import Dataset

import launching
from launching import errors_of, read_rows, recipe

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


# ---- The output folder ----
@pytest.mark.parametrize(
    ("recipe", "file", "out"),
    [
        ("llama", "out/run.json", "link"),
        ("bert", "out/chats.jsonl", "out/deep/run"),
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
