# SPDX-License-Identifier: Apache-2.0
"""Several data sets become one, in shares that depend on the seed and on nothing else."""

import json
from collections import Counter

import datasets
import pytest

from components.mixture import divide, read_splits
from example_arguments import MixtureFlags


def take_name(row):
    """Prepare a row as simply as can be."""
    if not row["name"]:
        raise ValueError("has no name")
    return {"name": row["name"], "length": 1, "hash": hash(row["name"]) >> 1, "truncated": False}


@pytest.fixture
def mix(tmp_path, monkeypatch):
    """A function that writes files of these sizes and returns their rows, mixed."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def mix_files(sizes, weights=(), evaluate=False, **flags):
        names = []
        for file, size in sizes.items():
            rows = [{"name": f"{file}{number}"} for number in range(1, size + 1)]
            path = tmp_path / f"{file}.jsonl"
            path.write_text("\n".join(map(json.dumps, rows)))
            names.append(str(path))
        args = MixtureFlags(names, dataset_weights=weights, **flags)
        return read_splits(args, take_name, evaluate=evaluate)

    return mix_files


def names_of(rows):
    return rows.dataset["name"][:].tolist()


# ---- Joined ----


def test_rows_are_numbered_as_one_and_found_in_their_files(mix, tmp_path):
    rows, _ = mix({"a": 3, "b": 2}, weights=[1, 3])
    assert f"{tmp_path / 'b.jsonl'} (numbered from 4): 2, 0 truncated" in rows.notes
    for index, name in enumerate(names_of(rows)):
        assert rows.place(index) == f"{tmp_path / name[0]}.jsonl, line {name[1:]}"


def test_a_bad_row_is_named_with_its_own_file(mix, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text('{"name": "x"}\n{"name": ""}\n')
    (tmp_path / "good.jsonl").write_text('{"name": "y"}\n')
    args = MixtureFlags([str(tmp_path / "good.jsonl"), str(tmp_path / "bad.jsonl")])
    with pytest.raises(SystemExit, match="65"):
        read_splits(args, take_name, evaluate=False)
    assert f"{tmp_path / 'bad.jsonl'}, line 2: has no name" in capsys.readouterr().err


def test_a_best_model_needs_rows_to_choose_it_by(mix, capsys):
    _, eval_rows = mix({"a": 4}, evaluate=True, eval_split=1, load_best_model_at_end=True)
    assert len(eval_rows) == 1
    with pytest.raises(SystemExit, match="64"):
        mix({"a": 4}, evaluate=True, load_best_model_at_end=True)
    assert "--load_best_model_at_end needs rows" in capsys.readouterr().err


# ---- Weights ----
def test_weights_are_shares_of_as_many_rows_as_there_are(mix):
    rows, _ = mix({"a": 10, "b": 90}, weights=[3, 1])
    counts = Counter(name[0] for name in names_of(rows))
    assert counts == {"a": 75, "b": 25}
    times = Counter(names_of(rows))
    assert {times[name] for name in times if name[0] == "a"} == {7, 8}
    assert {times[name] for name in times if name[0] == "b"} == {1}
    assert rows.notes.count("mixed 3 : 1: 75 rows of ") == 1
    assert "each 7 or 8 times" in rows.notes and "25 of the 90 rows of" in rows.notes


def test_the_mixture_is_a_function_of_the_seed(mix):
    sizes = {"a": 10, "b": 30}
    first, _ = mix(sizes, weights=[1, 1])
    again, _ = mix(sizes, weights=[1, 1])
    other, _ = mix(sizes, weights=[1, 1], seed=7)
    assert names_of(first) == names_of(again) != names_of(other)
    assert first.fingerprint == again.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("total", "weights", "shares"),
    [(10, [1, 1, 1], [4, 3, 3]), (100, [3, 1], [75, 25]), (5, [0.1, 0.9], [1, 4]), (0, [1], [0])],
)
def test_shares_add_up(total, weights, shares):
    assert divide(total, weights) == shares


def test_the_same_data_set_twice_is_refused(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"name": "x"}')
    args = MixtureFlags([str(tmp_path / "a.jsonl")] * 2)
    with pytest.raises(SystemExit, match="64"):
        read_splits(args, take_name, evaluate=False)
    assert "given twice; --dataset_weights repeats rows" in capsys.readouterr().err


# ---- Rows to evaluate on ----
def test_rows_that_are_held_out_are_never_trained_on_even_where_rows_are_repeated(mix):
    rows, held_out = mix({"a": 10, "b": 90}, weights=[3, 1], eval_split=0.2, evaluate=True)
    assert len(held_out) == 20 and len(rows) == 80
    assert not set(names_of(rows)) & set(names_of(held_out))


def test_each_data_set_brings_its_test_split(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for folder, splits in {"a": ("train", "test"), "b": ("train",), "c": ("train", "test")}.items():
        for split in splits:
            (tmp_path / folder).mkdir(exist_ok=True)
            file = tmp_path / folder / f"{split}.jsonl"
            file.write_text(json.dumps({"name": f"{folder} {split}"}))
    args = MixtureFlags([str(tmp_path / folder) for folder in "abc"])
    rows, eval_rows = read_splits(args, take_name, evaluate=True)
    assert names_of(rows) == ["a train", "b train", "c train"]
    assert names_of(eval_rows) == ["a test", "c test"]
