# SPDX-License-Identifier: Apache-2.0
"""The copy of a run in an object store, which is in the memory of this process.

tests/object_store trains beside a real server.
"""

import json
import shutil
import threading
import time
from concurrent.futures import wait
from pathlib import Path

import fsspec
import pytest

from components import resuming
from components.folder import has_result
from components.object_store import ObjectStore
from core.checkpoint import find_damage
from damage import make_checkpoint
from object_memory import URL

pytestmark = pytest.mark.usefixtures("new_process")
# Methods by which the module changes something in a store
CHANGES = ("put_file", "pipe_file", "rm_file", "rm")


@pytest.fixture
def files():
    """A store in memory, which is empty before and after."""
    found = fsspec.filesystem("objects")
    yield found
    if found.exists("/bucket"):
        found.rm("/bucket", recursive=True)


@pytest.fixture
def store(files, tmp_path):
    return ObjectStore(URL, tmp_path)


def upload(store, path, limit=2, kept_step=None):
    store.start_upload(path, limit, kept_step)
    finish_uploads(store)


def finish_uploads(store):
    wait([upload.work for upload in store._uploads])


def choose(store, requested, dry_run=False):
    """The checkpoint that a run continues from, as rank 0 chooses it."""
    folder = store._folder
    damages = {}
    for path in resuming.find_candidates(folder, store, requested, dry_run):
        damages[path] = find_damage(path)
        if damages[path] is None:
            break
    return resuming.choose_checkpoint(folder, store, requested, dry_run, damages)


def stored_steps(store):
    return sorted({stored.step for stored in store.stored.checkpoints()})


class TestContinuing:
    def test_a_lost_folder_continues_from_the_store(self, store, tmp_path):
        made = make_checkpoint(tmp_path, 5)
        upload(store, made)
        before = {path.name: path.read_bytes() for path in made.iterdir()}
        shutil.rmtree(made)
        found = choose(store, "auto")
        assert found == made and find_damage(found) is None
        assert {path.name: path.read_bytes() for path in found.iterdir()} == before

    def test_if_all_are_damaged_here_and_there_the_run_does_not_start_over(
        self, store, files, tmp_path, capsys
    ):
        damaged = make_checkpoint(tmp_path, 5)
        upload(store, damaged)
        (damaged / "progress.json").write_text("{")
        files.pipe_file(f"{store.stored.newest().path}/progress.json", b"{")
        with pytest.raises(SystemExit, match="65"):
            choose(store, "auto")
        assert f"all checkpoints there and in {URL} are damaged" in capsys.readouterr().err

    def test_a_damaged_one_in_the_store_ends_with_65(self, store, files, tmp_path, capsys):
        made = make_checkpoint(tmp_path, 5)
        upload(store, made)
        shutil.rmtree(made)
        files.pipe_file(f"{store.stored.newest().path}/progress.json", b"{")
        with pytest.raises(SystemExit, match="65"):
            choose(store, "auto")
        assert "cannot be trusted: progress.json has 1 bytes" in capsys.readouterr().err

    def test_a_damaged_one_in_the_store_is_passed_over_for_one_before_it(
        self, store, files, tmp_path, capsys
    ):
        for step in (3, 5):
            upload(store, make_checkpoint(tmp_path, step))
            shutil.rmtree(tmp_path / f"checkpoint-{step}")
        damaged = store.stored.newest()
        progress = files.cat_file(f"{damaged.path}/progress.json")
        files.pipe_file(f"{damaged.path}/progress.json", b"{")
        assert choose(store, "auto") == tmp_path / "checkpoint-3"
        assert f"warning: {URL}/{damaged.name} cannot be trusted" in capsys.readouterr().err
        upload(store, make_checkpoint(tmp_path, 5))  # with the same bytes as before the damage
        assert files.cat_file(f"{damaged.path}/progress.json") == progress

    def test_the_result_of_a_run_that_is_done_is_fetched(self, store, tmp_path):
        contents = {
            "run.json": "{}",
            "model.safetensors": "weights",
            "status.json": '{"state": "done"}',
        }
        for name, content in contents.items():
            (tmp_path / name).write_text(content)
        assert store.upload_result() is None
        for name in contents:
            (tmp_path / name).unlink()
        store.connect(dry_run=False)
        assert not (tmp_path / "model.safetensors").exists()
        assert choose(store, "auto") is None
        assert {name: (tmp_path / name).read_text() for name in contents} == contents

    @pytest.mark.parametrize("is_done", [True, False])
    def test_a_folder_that_is_behind_takes_over_what_the_store_says_of_the_run(
        self, store, files, tmp_path, is_done
    ):
        """A host comes back after another one has gone on with its run."""
        make_checkpoint(tmp_path, 4)
        upload(store, make_checkpoint(tmp_path, 8))
        further = {"status.json": '{"state": "done"}' if is_done else "{}", "metrics.jsonl": "8"}
        result = {"model.safetensors": "of step 8"} if is_done else {}
        for name, content in (further | result).items():
            files.pipe_file(f"{store._transport.root}/{name}", content.encode())
        shutil.rmtree(tmp_path / "checkpoint-8")
        before = {"status.json": '{"state": "done", "step": 4}', "metrics.jsonl": "4"}
        for name, content in (before | {"model.safetensors": "of step 4"}).items():
            (tmp_path / name).write_text(content)
        assert choose(store, "auto") == tmp_path / "checkpoint-8"
        for name, content in (further | result).items():
            assert (tmp_path / name).read_text() == content
        assert store.upload_result() is None
        assert store.stored.has_same("status.json")
        for name, content in result.items():
            assert files.cat_file(f"{store._transport.root}/{name}").decode() == content

    def test_the_best_checkpoint_is_fetched_too(self, store, tmp_path):
        upload(store, make_checkpoint(tmp_path, 2))
        upload(store, make_checkpoint(tmp_path, 6, best={"step": 2}), kept_step=2, limit=1)
        for step in (2, 6):
            shutil.rmtree(tmp_path / f"checkpoint-{step}")
        assert choose(store, "auto") == tmp_path / "checkpoint-6"
        assert find_damage(tmp_path / "checkpoint-2") is None
        assert (tmp_path / "latest").read_text() == "checkpoint-6"

    def test_an_upload_that_is_cut_leaves_no_mixture_of_two_results(
        self, store, files, tmp_path, monkeypatch
    ):
        names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        index = json.dumps({"weight_map": dict(enumerate(names))})
        cut_at = 0
        problem = True
        while problem is not None:
            for content in ("old", "new"):
                for name in names:
                    (tmp_path / name).write_text(content)
                (tmp_path / "model.safetensors.index.json").write_text(index)
                (tmp_path / "status.json").write_text(json.dumps({"state": "done", "is": content}))
                if content == "new":
                    cut(files, monkeypatch, cut_at)
                problem = store.upload_result()
                monkeypatch.undo()
            fetched = tmp_path / f"fetched-{cut_at}"
            files.get(store._transport.root, str(fetched), recursive=True)
            if has_result(fetched):
                assert len({(fetched / name).read_text() for name in names}) == 1
            cut_at += 1
        assert cut_at > 5  # what is deleted, two shards, index and status


class TestTwoRuns:
    def test_the_copy_of_another_run_is_refused(self, files, tmp_path, capsys):
        folders = [tmp_path / name for name in ("first", "second", "returned")]
        ObjectStore(URL, folders[0]).connect(dry_run=False)
        ObjectStore("objects://bucket/other", folders[1]).connect(dry_run=False)
        with pytest.raises(SystemExit, match="64"):
            ObjectStore(URL, folders[1]).connect(dry_run=False)
        assert "has the copy of another run" in capsys.readouterr().err
        ObjectStore(URL, folders[0]).connect(dry_run=False)
        ObjectStore(URL, folders[2]).connect(dry_run=False)  # A new folder continues the run.


class TestLongUploads:
    @pytest.fixture
    def held_back(self, files, monkeypatch):
        """An event for which each upload of weights waits, and the files that were begun."""
        event = threading.Event()
        begun = []
        put_file = files.put_file

        def put_later(file, path):
            begun.append(Path(file).parent.name)
            event.wait(60)
            put_file(file, path)

        monkeypatch.setattr(files, "put_file", put_later)
        yield event, begun
        event.set()

    def test_one_that_is_replaced_meanwhile_never_has_a_manifest(self, store, tmp_path, held_back):
        event, begun = held_back
        store.start_upload(make_checkpoint(tmp_path, 5, numbers=10), limit=2)
        wait_until(lambda: begun)
        replacement = make_checkpoint(tmp_path, 5, numbers=20)
        event.set()
        finish_uploads(store)
        assert store.stored.newest() is None
        upload(store, replacement)
        shutil.rmtree(replacement)
        assert len(store.stored.checkpoints()) == 1
        assert find_damage(choose(store, "auto")) is None


def wait_until(is_so):
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


class TestKeeping:
    def test_the_newest_and_the_best_are_kept(self, store, tmp_path):
        for step in (1, 2, 3, 4):
            upload(store, make_checkpoint(tmp_path, step), kept_step=1)
        assert stored_steps(store) == [1, 3, 4]

    def test_there_is_a_whole_one_after_each_change(
        self, store, files, tmp_path, monkeypatch, capsys
    ):
        """The upload is cut before its first, second, ... change of the store, like by kill -9."""
        limit = 1
        cut_at = 0
        is_complete = False
        while not is_complete:
            if files.exists("/bucket"):
                files.rm("/bucket", recursive=True)
            upload(store, make_checkpoint(tmp_path, 1), limit)
            upload(store, make_checkpoint(tmp_path, 2, numbers=10), limit)
            cut(files, monkeypatch, cut_at)
            upload(store, make_checkpoint(tmp_path, 2, numbers=20), limit)
            is_complete = "warning" not in capsys.readouterr().err
            monkeypatch.undo()
            shutil.rmtree(tmp_path)
            found = choose(store, "auto")
            assert found is not None and find_damage(found) is None
            cut_at += 1
        assert cut_at > 5  # two parts, progress, manifest, and what is deleted
        assert len(store.stored.checkpoints()) == limit


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


def test_a_store_out_of_reach_ends_with_69(store, files, monkeypatch, capsys):
    cut(files, monkeypatch, 0)
    with pytest.raises(SystemExit, match="69"):
        store.connect(dry_run=False)
    assert capsys.readouterr().err == f"error: --output_url {URL}: cannot be reached: cut\n"
