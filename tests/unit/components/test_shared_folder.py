# SPDX-License-Identifier: Apache-2.0
"""Ranks of several hosts find out, before they train, whether they share the output folder."""

import os

import pytest
from accelerate import Accelerator

from components.shared_folder import find_host_without
from core.stop import HOST
from ranks import on_ranks


@pytest.mark.parametrize(("folders", "found"), [(("a", "a"), None), (("a", "b"), HOST)])
def test_a_host_with_another_folder_is_found(tmp_path, folders, found):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    def look():
        folder = tmp_path / folders[int(os.environ["RANK"])]
        return find_host_without(Accelerator(), folder, seconds=0.5)

    assert on_ranks(look, 2) == [found, found]
    assert not list((tmp_path / "a").iterdir()) and not list((tmp_path / "b").iterdir())
