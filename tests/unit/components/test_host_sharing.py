# SPDX-License-Identifier: Apache-2.0
"""Arrays are computed once a host, the other ranks map them, and nothing is left behind."""

import errno
import os
import tempfile

import numpy as np
import pytest

from components import host_sharing
from components.host_sharing import SharedFiles, compute_once_a_host
from fakes import fake_accelerator

LARGE = np.arange(5, dtype=np.int32)
SMALL = np.array([7, 8], dtype=np.int64)


def compute(new_array):
    large = new_array(len(LARGE), np.int32)
    large[:] = LARGE
    return large, SMALL


def refuse():
    raise AssertionError("another rank of this host computes it")


@pytest.fixture
def shared(monkeypatch, tmp_path):
    """A function from a rank to its arrays: two hosts with two ranks each, one after the other."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    of_hosts = [(SharedFiles(tmp_path).write(compute), ""), ([], "")]

    def shared(rank, problem=""):
        accelerator = fake_accelerator(
            num_processes=4,
            process_index=rank,
            local_process_index=rank % 2,
            is_local_main_process=rank % 2 == 0,
            wait_for_everyone=lambda: None,
        )
        other = [("not this host's", ""), ([], "")]
        own = (of_hosts[0][0], problem), of_hosts[1]
        monkeypatch.setattr(
            host_sharing, "gather_object", lambda _: [*own, *other] if rank < 2 else [*other, *own]
        )
        return compute_once_a_host(accelerator, compute if rank % 2 == 0 else refuse)

    return shared


@pytest.mark.parametrize("rank", range(4))
def test_each_rank_maps_the_arrays_of_its_host(rank, shared):
    large, small = shared(rank)
    assert np.array_equal(large, LARGE) and large.dtype == LARGE.dtype
    assert np.array_equal(small, SMALL) and small.dtype == SMALL.dtype


def test_one_process_computes_for_itself_without_a_file(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/not/there")
    large, small = compute_once_a_host(fake_accelerator(num_processes=1), compute)
    assert np.array_equal(large, LARGE) and small is SMALL


def test_no_folder_of_temporary_files_remains(shared, tmp_path):
    before = sorted(tmp_path.iterdir())
    shared(0)
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_is_an_error_and_not_a_signal(monkeypatch, tmp_path):
    def is_full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", is_full)
    with pytest.raises(OSError, match="No space left"):
        SharedFiles(tmp_path).write(compute)


def test_all_ranks_end_with_73_if_one_host_has_no_room(shared, monkeypatch):
    def end(accelerator, code, message):
        raise SystemExit(f"{code} {message}")

    monkeypatch.setattr(host_sharing, "end_all_ranks", end)
    with pytest.raises(SystemExit, match="73 /tmp: No space left"):
        shared(1, problem="/tmp: No space left on device")
