# SPDX-License-Identifier: Apache-2.0
"""What hosts must have in common is compared, and what each has for itself is said."""

import errno
import os
import sys
import tempfile
import time

import pytest
from accelerate import Accelerator

from components import host_checks
from components.host_checks import describe_cache, facts_of_host, find_difference, hashes_of_recipe
from components.shared_folder import SECONDS_FOR_FILE
from components.status import HOST
from launching import RECIPE
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


def test_of_many_differences_some_are_named():
    facts = {f"components/{number}.py": "of SHA-256 0" for number in range(9)}
    line = find_difference([("a", facts), ("b", dict.fromkeys(facts, "of SHA-256 1"))])
    assert line.count("components/") == host_checks.NAMED_DIFFERENCES
    assert line.endswith("; 4 more differ: copy the same recipes to all hosts")


@pytest.mark.parametrize("setting", ["bf16", "no"])
def test_the_strategy_and_its_precision_are_compared(setting, arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", [RECIPE])
    [facts] = on_ranks(
        lambda: facts_of_host(Accelerator(cpu=True, mixed_precision=setting), arguments)
    )
    assert facts["mixed precision"] == setting and facts["the strategy"] == "one process"
    assert "--output_dir" not in facts and "--seed" in facts


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


def test_hosts_with_caches_of_their_own_say_so_and_wait_for_a_moment(describe, tmp_path):
    lines, seconds = describe("a", "b")
    said = "each downloads and tokenizes into a cache of its own"
    temporary = f"and writes temporary files to its {tempfile.gettempdir()}; checkpoints are staged"
    assert lines[0].startswith(f"{said} ({tmp_path}/a), {temporary}")
    assert seconds < SECONDS_FOR_FILE / 2


def test_a_cache_that_cannot_be_written_to_is_not_said_to_be_a_hosts_own(
    describe, tmp_path, monkeypatch
):
    def refuse(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    lines, seconds = describe("a", "a")
    said = f"{HOST} cannot write to its cache of models and rows ({tmp_path}/a): Read-only file sys"
    assert lines[0].startswith(said) and lines[1] == lines[0]
    assert seconds < host_checks.SECONDS_FOR_CACHE
