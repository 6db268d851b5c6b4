# SPDX-License-Identifier: Apache-2.0
"""Bases that adapters are merged into."""

import pytest

from adapter_folders import make_base


@pytest.fixture(scope="module")
def base(once):
    return once("merging_base", lambda folder: make_base(folder, shard="100KB"))


@pytest.fixture(scope="module")
def tied(once):
    return once("merging_tied", lambda folder: make_base(folder, "llama", "--tie_word_embeddings"))


@pytest.fixture(scope="module")
def mixture(once):
    return once("merging_mixture", lambda folder: make_base(folder, "mixtral", shard="100KB"))
