# SPDX-License-Identifier: Apache-2.0
"""Trained folders to be exported."""

import pytest

from adapter_folders import make_base


@pytest.fixture(scope="session")
def base(once):
    """A small model in several files."""
    return once("exporting_base", lambda folder: make_base(folder, shard="100KB"))


@pytest.fixture(scope="session")
def tied(once):
    return once(
        "exporting_tied", lambda folder: make_base(folder, "llama", "--tie_word_embeddings")
    )


@pytest.fixture(scope="session")
def mixture(once):
    return once("exporting_mixture", lambda folder: make_base(folder, "mixtral"))
