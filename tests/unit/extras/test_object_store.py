# SPDX-License-Identifier: Apache-2.0
"""The copy of a run in an object store, which is in the memory of this process.

tests/object_store trains beside a real server.
"""

import shutil
import threading
import time
from types import SimpleNamespace

import fsspec
import pytest

from core.checkpoint import checkpoints_in, find_damage
from core.exits import End, Exit
from damage import make_checkpoint
from extras.object_store.store import ObjectStore

URL = "memory://bucket/run"
# Methods by which the module changes something in a store
CHANGES = ("put_file", "pipe_file", "rm_file", "rm")


@pytest.fixture
def files():
    """A store in memory, which is empty before and after."""
    found = fsspec.filesystem("memory")
    yield found
    if found.exists("/bucket"):
        found.rm("/bucket", recursive=True)


def store_of(folder, limit=2, wish="auto", url=URL):
    """The copy of the run in a folder, as one call of it has it."""
    folder.mkdir(exist_ok=True)
    return ObjectStore(
        SimpleNamespace(
            output_url=url,
            output_dir=str(folder),
            save_total_limit=limit,
            resume_from_checkpoint=wish,
        )
    )


def upload(folder, step, **options):
    """Have one call of the run upload a checkpoint, and wait for that."""
    store = store_of(folder, **options)
    path = make_checkpoint(folder, step, numbers=5)
    store.saved(path)
    store._uploader.shutdown(wait=True)
    return path


def test_there_is_a_whole_one_after_each_change(files, tmp_path, monkeypatch, capsys):
    """An upload is cut before its first, second, ... change of the store, like by kill -9."""
    folder = tmp_path / "run"
    cut_at = 0
    is_complete = False
    while not is_complete:
        if files.exists("/bucket"):
            files.rm("/bucket", recursive=True)
        upload(folder, 1, limit=1)
        cut(files, monkeypatch, cut_at)
        upload(folder, 2, limit=1)
        is_complete = "warning" not in capsys.readouterr().err
        monkeypatch.undo()
        shutil.rmtree(folder)
        store_of(folder).before_resume()
        [found] = checkpoints_in(folder).values()
        assert find_damage(found) is None
        cut_at += 1
    assert cut_at > 5  # two parts, boxes, progress, manifest, and what is deleted
    assert list(store_of(folder)._stored()) == [2]


def test_a_checkpoint_is_kept_until_it_is_uploaded_or_replaced(
    files, tmp_path, monkeypatch, capsys
):
    event = threading.Event()
    begun = []
    put_file = files.put_file

    def put_later(file, path):
        begun.append(file)
        event.wait(60)
        put_file(file, path)

    monkeypatch.setattr(files, "put_file", put_later)
    store = store_of(tmp_path)
    store.saved(make_checkpoint(tmp_path, 1))
    end = time.monotonic() + 60
    while not begun and time.monotonic() < end:
        time.sleep(0.01)
    store.saved(make_checkpoint(tmp_path, 2))
    assert store.saved(make_checkpoint(tmp_path, 3)) == {1, 3}
    assert "warning: checkpoint-2 is only in" in capsys.readouterr().err
    event.set()
    assert store.ended(is_done=False) is None
    assert sorted(store._stored()) == [1, 3]


def test_a_result_that_is_not_uploaded_is_told_and_the_next_call_uploads_it(
    files, tmp_path, monkeypatch
):
    contents = {"model.safetensors": "weights", "status.json": '{"state": "done"}'}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    cut(files, monkeypatch, 1)
    assert "cut" in store_of(tmp_path).ended(is_done=True)
    monkeypatch.undo()
    assert store_of(tmp_path).ended(is_done=True) is None
    for name, content in contents.items():
        assert files.cat_file(f"/bucket/run/{name}").decode() == content


def test_a_new_run_does_not_replace_the_copy_of_another(files, tmp_path):
    upload(tmp_path / "one", 5)
    with pytest.raises(End) as end:
        store_of(tmp_path / "two", wish="none").before_resume()
    assert end.value.code == Exit.USAGE and "has the copy of a run" in end.value.why


def cut(files, monkeypatch, number):
    """Have the store fail from the change with this number on."""
    left = [number]

    def failing(method):
        def call(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                raise ConnectionError("cut")
            return method(*arguments, **options)

        return call

    for name in CHANGES:
        monkeypatch.setattr(files, name, failing(getattr(files, name)))
