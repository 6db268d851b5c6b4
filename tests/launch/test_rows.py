"""Rows that several processes prepare are those that one prepares."""

from dataclasses import dataclass, replace

import datasets
import pytest

from components.rows import read_splits
from row_files import GOOD, row

LINES = [GOOD, "{", "", GOOD, GOOD, row("a", 5), GOOD, "[]", GOOD]


@dataclass(frozen=True)
class Arguments:
    """What a recipe's arguments have."""

    dataset_name: str
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    eval_dataset_name: str | None = None
    skip_bad_rows: bool = False
    dataset_num_proc: int | None = None


def answer_of(row):
    if not isinstance(row["completion"], str):
        raise ValueError(f"has no text: {row['completion']}")
    return {"answer": row["completion"]}


def test_two_processes_find_the_same_rows(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_bytes("\r\n".join(LINES).encode())
    args = Arguments(str(path))
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
