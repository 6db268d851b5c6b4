# SPDX-License-Identifier: Apache-2.0
"""Ranks verify and read a checkpoint together: each of them files that no other one reads."""

import pytest
from accelerate import Accelerator

from components import checkpoint, saved_state
from components.saved_state import (
    SavedState,
    require_on_every_host,
    verify_candidates,
    verify_together,
)
from proof.damage import make_checkpoint
from ranks import on_ranks

NUMBERS = 300_000  # in each tensor: enough for a rank to be given a file of its own


def test_each_file_is_verified_by_the_one_rank_that_reads_it(tmp_path, monkeypatch):
    made = make_checkpoint(tmp_path, 5, NUMBERS)
    hash_of = checkpoint.hash_of

    def hashed_here():
        hashed = []

        def hash_and_note(path):
            hashed.append(path.name)
            return hash_of(path)

        monkeypatch.setattr(checkpoint, "hash_of", hash_and_note)
        assert verify_together(Accelerator(), made) is None
        return hashed

    by_rank = on_ranks(hashed_here, 2)
    readers = checkpoint.readers_of_state(made, 2) | {checkpoint.PROGRESS: 0}
    assert set(readers.values()) == {0, 1}
    for rank, hashed in enumerate(by_rank):
        assert sorted(hashed) == sorted(name for name in readers if readers[name] == rank)


def test_each_file_is_opened_by_its_reader_which_sends_its_tensors_to_the_others(
    tmp_path, monkeypatch
):
    made = make_checkpoint(tmp_path, 5, NUMBERS)
    read_part = checkpoint.read_part

    def fetch_all():
        opened = []

        def read_and_note(path):
            opened.append(path.name)
            return read_part(path)

        monkeypatch.setattr(checkpoint, "read_part", read_and_note)
        state = SavedState.read(Accelerator(), made)
        return opened, {name: state.fetch(name).tolist() for name in state.names}

    by_rank = on_ranks(fetch_all, 2)
    readers = checkpoint.readers_of_state(made, 2)
    assert set(readers.values()) == {0, 1}
    saved = {name: tensor.tolist() for name, tensor in checkpoint.read_state(made).items()}
    for rank, (opened, fetched) in enumerate(by_rank):
        assert sorted(opened) == sorted(name for name in readers if readers[name] == rank)
        assert fetched == saved


def test_damage_that_one_rank_finds_counts_for_all(tmp_path):
    older = make_checkpoint(tmp_path, 3, NUMBERS)
    newer = make_checkpoint(tmp_path, 5, NUMBERS)
    readers = checkpoint.readers_of_state(newer, 2)
    (name,) = (name for name, reader in readers.items() if reader == 1)
    content = bytearray((newer / name).read_bytes())
    content[-1] ^= 1
    (newer / name).write_bytes(content)
    found = on_ranks(lambda: verify_candidates(Accelerator(), [newer, older]), 2)
    assert found == [{newer: f"{name} is not what was written", older: None}] * 2


def test_a_host_that_does_not_see_a_checkpoint_ends_all_ranks_and_it_is_not_taken_for_damaged(
    tmp_path, monkeypatch
):
    made = make_checkpoint(tmp_path, 5)

    def look():
        accelerator = Accelerator()
        monkeypatch.setattr(saved_state, "HOST", f"host-{accelerator.process_index}")
        if not accelerator.is_main_process:
            monkeypatch.setattr(saved_state, "appears", lambda file: False)
        with pytest.raises(SystemExit) as ended:
            require_on_every_host(accelerator, made)
        return ended.value.code

    assert on_ranks(look, 2) == [64, 64]
    assert made.is_dir()
