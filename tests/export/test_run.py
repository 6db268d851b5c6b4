# SPDX-License-Identifier: Apache-2.0
"""llama.cpp runs what scripts/export.py made, and says what was trained.

`make test-export` installs llama-cpp-python, which takes minutes to compile, and runs these tests.
They are not part of `make test`.
"""

import importlib.util
import re
from functools import partial

import pytest

from launching import data_of, recipe, script

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None,
    reason="llama-cpp-python is not installed: make test-export",
)
OWN_WORDS = ("--pre_tokenizer", "smollm")  # whose rules the tiny tokenizers have
RECIPES = ("llama", "mixtral", "llama_dpo")


STEPS = ("--max_steps", "2", "--learning_rate", "2e-2", "--logging_steps", "1")


def export(*arguments):
    return script("export", *arguments, *OWN_WORDS)


def train(tiny, name, folder, *flags):
    recipe(*data_of(tiny), *STEPS, *flags, "--output_dir", folder, name=name, code=0)


@pytest.fixture(scope="module")
def trained(tiny_of, once):
    """A function from a recipe to the folder of a short run."""
    return lambda name: once(f"run_{name}", partial(train, tiny_of(name), name))


def gap_of(done):
    """Return an export's largest difference of a logit, and the prompts with other tokens."""
    assert done.returncode == 0, done.output
    (line,) = [line for line in done.output.splitlines() if "logit gap of the GGUF" in line]
    found = re.search(r"is (\S+), its bound .*; (\d+) of (\d+) prompts", line)
    return float(found[1]), int(found[3]) - int(found[2])


@pytest.mark.parametrize("name", RECIPES)
def test_the_gguf_answers_with_the_tokens_of_the_trained_folder(name, trained, tmp_path):
    gap, others = gap_of(export(trained(name), tmp_path / "out", "--to", "gguf"))
    assert gap < 1e-4 and others == 0


@pytest.mark.parametrize("outtype", ["f16", "q8_0"])
def test_each_type_of_weights_runs_and_says_how_far_it_is_off(outtype, trained, tmp_path):
    done = export(trained("llama"), tmp_path / "out", "--to", "ollama", "--outtype", outtype)
    assert gap_of(done)[0] > 0


def test_merged_adapters_run_too(tiny, tmp_path):
    train(tiny, "llama", tmp_path / "run", "--use_peft")
    script("merge", tmp_path / "run", tmp_path / "merged", code=0)
    assert gap_of(export(tmp_path / "merged", tmp_path / "out", "--to", "gguf"))[1] == 0


def test_a_gap_above_the_bound_is_an_error_and_leaves_what_was_made(trained, tmp_path):
    flags = ("--to", "gguf", "--outtype", "q8_0", "--bound", "1e-9")
    done = export(trained("llama"), tmp_path / "out", *flags)
    assert done.returncode == 76, done.output
    assert not (tmp_path / "out").exists() and (tmp_path / "out.unfinished").exists()
