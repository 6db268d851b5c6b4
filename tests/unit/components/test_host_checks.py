# SPDX-License-Identifier: Apache-2.0
"""What hosts must have in common is compared, and what each has for itself is said."""

import os
import time

import pytest
from accelerate import Accelerator

from components import host_checks
from components.host_checks import describe_cache, find_difference, hashes_of_recipe
from ranks import on_ranks

FACTS = {"torch": "2.13.0", "llama.py": "of SHA-256 0", "the strategy": "DDP", "--seed": "42"}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("torch", "2.12.0", "torch is 2.13.0 on a and 2.12.0 on b: install the same versions on"),
        ("peft", "0.21", "peft is not there on a and 0.21 on b: install the same versions on all"),
        ("llama.py", "of SHA-256 1", "llama.py is of SHA-256 0 on a and of SHA-256 1 on b: copy"),
        ("the strategy", "FSDP2", "the strategy is DDP on a and FSDP2 on b: launch all hosts with"),
        ("--seed", "1", "--seed is 42 on a and 1 on b: run the same command on all hosts"),
    ],
)
def test_what_differs_is_named_with_both_hosts_and_a_fix(name, value, says):
    assert find_difference([("a", FACTS), ("b", dict(FACTS))]) is None
    assert find_difference([("a", FACTS), ("b", FACTS | {name: value})]).startswith(says)


def test_the_files_of_the_recipe_are_compared(tmp_path):
    recipe = tmp_path / "llama.py"
    recipe.write_text("steps = 1")
    before = hashes_of_recipe(recipe)
    recipe.write_text("steps = 2")
    after = hashes_of_recipe(recipe)
    assert [name for name in before if before[name] != after[name]] == ["llama.py"]
    assert "components/host_checks.py" in before


@pytest.fixture
def describe(monkeypatch, tmp_path):
    """A function that has two ranks describe their caches, and returns their lines and seconds."""

    def on_two_ranks(*folders):
        def look():
            folder = tmp_path / folders[int(os.environ["RANK"])]
            monkeypatch.setattr(host_checks.constants, "HF_HOME", str(folder))
            accelerator = Accelerator()
            start = time.monotonic()
            return describe_cache(accelerator), time.monotonic() - start

        lines, seconds = zip(*on_ranks(look, 2), strict=True)
        return lines, max(seconds)

    return on_two_ranks


def test_hosts_that_share_a_cache_say_so(describe, tmp_path):
    lines, _ = describe("a", "a")
    assert lines == (f"they share the cache of models and rows ({tmp_path}/a)",) * 2
