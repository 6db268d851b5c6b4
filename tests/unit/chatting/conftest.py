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
    """Four folders of adapters on the same base: two of LoRA, DoRA, and one with a whole module."""

    def fill(folder):
        kinds = ({}, {}, {"use_dora": True}, {"modules_to_save": ["lm_head"]})
        for seed, options in enumerate(kinds):
            write_adapters(folder / str(seed), base, seed=seed, scale=0.5, **options)

    folder = once("chatting_adapters", fill)
    return [folder / str(seed) for seed in range(4)]
