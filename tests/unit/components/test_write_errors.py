# SPDX-License-Identifier: Apache-2.0
"""An error of writing is reported with what helps; free bytes are named only for a full disk."""

import errno
import os

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from components.write_errors import CURES, WriteError


def error_of(number):
    return OSError(number, os.strerror(number), "runs/full/state.safetensors")


@pytest.mark.parametrize("number", [number for number in CURES if number != errno.ENOSPC])
def test_each_error_is_said_with_its_cure_and_without_free_bytes(number, tmp_path):
    said = WriteError.of(error_of(number)).describe(tmp_path, nbytes=2**60)
    assert said.startswith(f"[Errno {number}] {os.strerror(number)}: 'runs/full/state.safetensors'")
    assert said.endswith(CURES[number]) and "are free" not in said


@pytest.mark.parametrize(("nbytes", "asks_for_files"), [(2**60, False), (1, True)])
def test_a_full_disk_is_said_with_its_bytes_or_the_number_of_its_files(
    nbytes, asks_for_files, tmp_path
):
    said = WriteError.of(error_of(errno.ENOSPC)).describe(tmp_path, nbytes)
    assert f"it needs {nbytes:,} bytes, " in said and f" are free in {tmp_path}" in said
    assert ("df -i" in said) == asks_for_files


def test_the_number_is_found_in_what_safetensors_raises():
    with pytest.raises(SafetensorError) as full:
        save_file({"weight": torch.ones(2**20)}, "/dev/full/state.safetensors")
    assert WriteError.of(full.value).number == errno.ENOTDIR


def test_an_error_without_a_cure_is_said_as_it_is(tmp_path):
    assert WriteError.of(OSError("odd")).describe(tmp_path, 1) == "odd"
