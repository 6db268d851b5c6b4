# SPDX-License-Identifier: Apache-2.0
"""A small model, and adapters that are trained on it."""

import pytest

from adapter_folders import make_base, write_adapters


@pytest.fixture(scope="module")
def base(once):
    """A folder with model/ and data/."""
    return once("chatting_base", make_base)


@pytest.fixture(scope="module")
def adapters(base, once):
    """Two folders of adapters on the same base."""

    def fill(folder):
        for seed in (0, 1):
            write_adapters(folder / str(seed), base, seed=seed, scale=0.5)

    folder = once("chatting_adapters", fill)
    return folder / "0", folder / "1"
