# SPDX-License-Identifier: Apache-2.0
"""Bases that adapters are merged into, and calls of merge.py."""

import shutil
import sys
from functools import partial

import pytest

import merge as command
from adapter_folders import make_base, write_adapters
from calling import call
from merged_folders import FEW
from merging import session


@pytest.fixture(scope="module")
def base(once):
    return once("merging_base", lambda folder: make_base(folder, shard="100KB"))


@pytest.fixture(scope="module")
def tied(once):
    return once("merging_tied", lambda folder: make_base(folder, "llama", "--tie_word_embeddings"))


@pytest.fixture(scope="module")
def mixture(once):
    return once("merging_mixture", lambda folder: make_base(folder, "mixtral", shard="100KB"))


@pytest.fixture
def merge(monkeypatch, capsys):
    """A function from words of a command line to (exit code, what was printed)."""

    return partial(call, monkeypatch, capsys, command, session, *FEW)


@pytest.fixture(scope="module")
def merged(tied, once):
    """A merged folder with its adapters: folder/adapters and folder/merged."""

    def fill(folder):
        write_adapters(folder / "adapters", tied)
        words = ["merge.py", *FEW, str(folder / "adapters"), str(folder / "merged")]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", words)
            session.run(command.parse_args())

    return once("merging_merged", fill)


@pytest.fixture
def copy(merged, tmp_path):
    """A copy of the merged folder without its receipt, whose hashes would show any change."""
    shutil.copytree(merged / "merged", tmp_path / "copy")
    (tmp_path / "copy" / "receipt.json").unlink()
    return tmp_path / "copy"
