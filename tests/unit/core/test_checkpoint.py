# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in this process: damage is found, foreign files stay, and one is always whole."""

import errno
import json
import os

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import damage
from core import checkpoint
from launching import read_json


class TestDamage:
    def test_flipped_bits_are_found(self, tmp_path):
        assert damage.flipped_bits(damage.make_checkpoint(tmp_path, 5), 1000) == (1000, [])

    def test_cut_and_lost_files_are_found(self, tmp_path):
        assert damage.cut_and_lost_files(damage.make_checkpoint(tmp_path, 5)) == (70, [])

    def test_the_checkpoint_before_a_damaged_one_is_taken(self, tmp_path):
        assert damage.older_one_is_taken(tmp_path / "run") == (5, [])

    @pytest.mark.parametrize("name", damage.FILES)
    def test_a_pickle_with_a_manifest_that_fits_is_not_run(self, name, tmp_path):
        forged, mark = damage.make_checkpoint(tmp_path, 5), tmp_path / "mark"
        damage.forge(forged, name, mark)
        assert checkpoint.find_damage(forged) is None
        with pytest.raises((SafetensorError, ValueError)):
            (read_json if name == checkpoint.PROGRESS else load_file)(forged / name)
        assert not mark.exists()
        torch.load((forged / name).rename(tmp_path / "pickle"), weights_only=False)
        assert mark.exists()  # the pickle was a real one


class TestFolder:
    def test_foreign_files_stay_and_are_not_taken(self, tmp_path):
        assert damage.stray_files(tmp_path / "run")[1] == []


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
