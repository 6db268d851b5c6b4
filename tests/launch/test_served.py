# SPDX-License-Identifier: Apache-2.0
"""scripts/generate.py --server holds a real `transformers serve` against what was trained."""

import shutil
from functools import partial

import pytest
from safetensors.torch import save_file

from launching import edit_json, read_rows, recipe, script, tensors_of
from net import data_of
from ranks import free_port

STEPS = ["--logging_steps", "10", "--per_device_train_batch_size", "16"]


@pytest.fixture
def compare(whole, tiny):
    """A function that holds a server against the trained model."""

    def call(url, name, *words):
        words = ["--file", tiny / "data" / "test.jsonl", "--max_new_tokens", 16, *words]
        words += ["--server", url, "--server_model", name]
        return script("generate", whole, *words)

    return call


def fill_whole(tiny, folder):
    """Train until the answers are of words and end: about 60 steps."""
    flags = ["--max_steps", "60", "--learning_rate", "3e-3", "--save_steps", "0"]
    recipe(*data_of(tiny), *STEPS, *flags, "--output_dir", folder, code=0)


@pytest.fixture(scope="module")
def whole(tiny, once):
    """A trained model."""
    return once("served_whole", partial(fill_whole, tiny))


def test_a_served_model_says_what_was_trained(whole, url, compare, tmp_path):
    done = compare(url, whole, "--output", tmp_path / "answers.jsonl")
    assert done.returncode == 0, done.output
    answers = read_rows(tmp_path / "answers.jsonl")
    # Answers that are words: otherwise nothing is shown
    assert len({answer["answer"] for answer in answers}) > 5
    assert f"would give too: {len(answers)} of {len(answers)}" in done.output


def other_model(folder):
    weights = tensors_of(folder)
    weights["lm_head.weight"].mul_(-1)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def other_end(folder):
    # The end of a text, but no longer that of a turn
    edit_json(folder / "generation_config.json", eos_token_id=[2])


@pytest.mark.parametrize("change", [other_model, other_end])
def test_a_server_that_says_something_else_is_caught(change, whole, url, compare, tmp_path):
    served = shutil.copytree(whole, tmp_path / "served")
    change(served)
    done = compare(url, served)
    assert done.returncode == 76 and "Traceback" not in done.output, done.output
    assert "error: " in done.output


def test_a_server_that_cannot_answer_is_one_line(whole, url, compare):
    nowhere = f"http://127.0.0.1:{free_port()}/v1"
    for address, name in ((url, "runs/none"), (nowhere, whole)):
        done = compare(address, name)
        assert done.returncode == 69 and len(done.output.splitlines()) == 1, done.output
