# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in this process: damage is found, foreign files stay, and one is always whole."""

import errno
import json
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import damage
from core import checkpoint
from launching import read_json


def is_found(folder, name):
    """Whether damage to a file is found, and the file named.

    A wrong hash in the manifest blames the file that it is about.
    """
    problem = checkpoint.find_damage(folder)
    return problem is not None and (problem.startswith(name) or name == damage.MANIFEST)


def test_each_of_1000_flipped_bits_is_found(tmp_path):
    made = damage.make_checkpoint(tmp_path, 5)
    dice = random.Random(0)
    for number in range(1000):
        path = made / damage.NAMES[number % len(damage.NAMES)]
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
        path.write_bytes(flipped)
        assert is_found(made, path.name)
        path.write_bytes(whole)


@pytest.mark.parametrize("name", damage.NAMES)
def test_a_file_that_is_cut_or_lost_is_found_and_the_checkpoint_before_is_taken(name, tmp_path):
    older = damage.make_checkpoint(tmp_path, 3)
    newest = damage.make_checkpoint(tmp_path, 7)
    path = newest / name
    whole = path.read_bytes()
    for content in (*(whole[: tenth * len(whole) // 10] for tenth in range(10)), whole + b"x"):
        path.write_bytes(content)
        assert is_found(newest, name)
    for replace in (Path.mkdir, lambda path: path.symlink_to("nowhere"), lambda path: None):
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()
        replace(path)
        assert is_found(newest, name)
    assert damage.find_checkpoint(tmp_path) == older
    assert len(list(tmp_path.glob("checkpoint-7.damaged-*"))) == 1 and not newest.exists()


@pytest.mark.parametrize("name", damage.FILES)
def test_a_pickle_with_a_manifest_that_fits_is_not_run(name, tmp_path):
    forged, mark = damage.make_checkpoint(tmp_path, 5), tmp_path / "mark"
    damage.forge(forged, name, mark)
    assert checkpoint.find_damage(forged) is None
    with pytest.raises((SafetensorError, ValueError)):
        (read_json if name == checkpoint.PROGRESS else load_file)(forged / name)
    assert not mark.exists()
    torch.load((forged / name).rename(tmp_path / "pickle"), weights_only=False)
    assert mark.exists()  # the pickle was a real one


def test_foreign_files_stay_and_are_not_taken(tmp_path):
    for name in ("checkpoint-", "checkpoint--3", "checkpoint-8 copy", "xcheckpoint-4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint-99").write_text("mine")
    (tmp_path / "checkpoint-77").symlink_to("nowhere")
    before = {*tmp_path.rglob("*")}
    for step in (1, 2, 3):
        newest = damage.make_checkpoint(tmp_path, step, limit=1)
    assert damage.find_checkpoint(tmp_path) == newest
    assert {*tmp_path.rglob("*")} == before | {newest, *newest.iterdir()}


def test_the_state_is_read_from_all_of_its_files_and_from_one_of_an_earlier_version(tmp_path):
    several = damage.make_checkpoint(tmp_path, 5)
    whole = dict(checkpoint.read_whole(several))
    assert sorted(whole) == ["state.weight.exp_avg", "weight"]
    # Those of an earlier version have whole tensors, and no file that says so
    (several / "boxes.json").unlink()
    manifest = read_json(several / "manifest.json")
    del manifest["boxes.json"]
    (several / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.find_damage(several) is None
    again = dict(checkpoint.read_whole(several))
    assert whole.keys() == again.keys() and all(whole[name].equal(again[name]) for name in whole)


def test_what_a_disk_does_not_give_now_is_no_damage(tmp_path, monkeypatch):
    """A missing mount or a server that is away must not have checkpoints set aside."""
    made = damage.make_checkpoint(tmp_path, 5)

    def refuse(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checkpoint, "hash_of", refuse)
    with pytest.raises(OSError, match="Input/output"):
        checkpoint.find_damage(made)


def test_a_run_that_began_elsewhere_goes_on_from_its_own_checkpoints(tmp_path):
    before, own = damage.make_checkpoint(tmp_path / "before", 100), tmp_path / "own"
    assert damage.find_checkpoint(own, str(before)) == before
    newer = damage.make_checkpoint(own, 120)
    assert damage.find_checkpoint(own, str(before)) == newer
    (newer / "progress.json").unlink()
    # The damaged one is set aside
    assert damage.find_checkpoint(own, str(before)) == before
    assert len(list(own.glob("checkpoint-120.damaged-*"))) == 1
