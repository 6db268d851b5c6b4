# SPDX-License-Identifier: Apache-2.0
"""A full cache is named, with 73, whatever the library made of the error of the disk."""

import errno

import datasets
import pytest
from huggingface_hub import constants

from components.data_files import Source, load_rows
from components.full_cache import find_fullest, find_no_room
from components.loading import loading
from components.rows import reading
from file_limits import largest_file


def load(source):
    load_rows(source)


def prepare(source):
    rows = datasets.Dataset.from_dict({"text": ["one row"] * 100})
    cache = str(datasets.config.HF_DATASETS_CACHE / "prepared.arrow")
    datasets.config.HF_DATASETS_CACHE.mkdir()
    with reading(source):
        rows.map(lambda row: {"tokens": [1] * 100}, cache_file_name=cache)


@pytest.mark.parametrize("read", [load, prepare])
def test_rows_that_do_not_fit_in_the_cache_end_with_73(read, tmp_path, monkeypatch, capsys):
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "one row"}\n' * 100)
    source = Source(str(file), None, "train", (file,), is_required=True)
    with pytest.raises(SystemExit, match="73"), largest_file(200):
        read(source)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line == (
        f"error: {file}: the cache {cache} cannot take it: File too large: make room there, or "
        "name another folder by the environment variable HF_DATASETS_CACHE"
    )


def test_so_do_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SystemExit, match="73"), loading("model", "somebody/something"):
        raise OSError(errno.ENOSPC, "No space left on device")
    line = capsys.readouterr().err
    assert line.startswith(f"error: somebody/something: the cache {tmp_path} cannot take it: No sp")
    assert line.endswith("by the environment variable HF_HUB_CACHE\n")


def test_the_cause_of_an_exception_counts():
    def write():
        try:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        except OSError as error:
            raise RuntimeError("no rows could be made") from error

    with pytest.raises(RuntimeError) as raised:
        write()
    assert find_no_room(raised.value) == errno.EDQUOT
    assert find_no_room(PermissionError(errno.EACCES, "Permission denied")) is None
    assert find_no_room(ValueError("no such column")) is None


def test_of_several_caches_the_fullest_disk_is_named(tmp_path, monkeypatch):
    class Usage:
        def __init__(self, free):
            self.free = free

    free = {str(tmp_path / "a"): 7, str(tmp_path / "b"): 3}
    for folder in free:
        (tmp_path / folder).mkdir()
    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage(free[folder]))
    folders = {"A": str(tmp_path / "a"), "B": str(tmp_path / "b"), "C": str(tmp_path / "none")}
    assert find_fullest(folders) == "B"
    assert find_fullest({"C": folders["C"]}) == "C"
