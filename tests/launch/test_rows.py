"""Rows that several processes prepare are those that one prepares."""

from dataclasses import replace

import datasets
import pytest

from components.rows import read_splits
from example_arguments import RowFlags
from row_files import GOOD, row

LINES = [GOOD, "{", "", GOOD, GOOD, row("a", 5), GOOD, "[]", GOOD]


def answer_of(row):
    if not isinstance(row["completion"], str):
        raise ValueError(f"has no text: {row['completion']}")
    return {"answer": row["completion"]}


def test_two_processes_find_the_same_rows(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_bytes("\r\n".join(LINES).encode())
    args = RowFlags(str(path))
    messages = []
    for num_proc in (None, 2):
        cache = tmp_path / f"cache of {num_proc}"
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        with pytest.raises(SystemExit, match="65"):
            read_splits(replace(args, dataset_num_proc=num_proc), answer_of, evaluate=False)
        printed = capsys.readouterr().err.splitlines()
        messages.append([line for line in printed if line.startswith("error: ")])
    assert messages[0] == messages[1] and "line 8: " in messages[0][2]
    args = replace(args, dataset_num_proc=2, skip_bad_rows=True)
    rows, _ = read_splits(args, answer_of, evaluate=False)
    assert rows.dataset["row"][:].tolist() == [1, 4, 5, 7, 9]
    assert rows.dataset["answer"][:].tolist() == ["l-a-m-p"] * 5
    assert " 3 left out" in rows.notes
