# SPDX-License-Identifier: Apache-2.0
"""scripts/generate.py --server holds a real `transformers serve` against what was trained."""

import contextlib
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from safetensors.torch import save_file

from launching import INTERPRETER, REPO, edit_json, read_rows, recipe, script, tensors_of
from net import data_of
from ranks import free_port

STARTS = 120  # seconds in which the server starts; it takes 5 to 10 on two idle cores
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


def wait_for(address, process, log):
    """Wait until a server answers at an address."""
    end = time.monotonic() + STARTS
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(URLError, OSError):
            urlopen(f"{address}/health", timeout=5).close()
            return
        time.sleep(0.2)
    raise TimeoutError(log.read_text()[-3000:])


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The address of a `transformers serve` that loads whatever folder a question names."""
    log = tmp_path_factory.mktemp("served") / "log"
    address = f"http://127.0.0.1:{free_port()}"
    program = Path(INTERPRETER).with_name("transformers")
    command = [program, "serve", "--host", "127.0.0.1", "--port", address.rpartition(":")[2]]
    command += ["--device", "cpu", "--no-continuous-batching"]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, cwd=REPO)
        try:
            wait_for(address, process, log)
            yield f"{address}/v1"
        finally:
            process.terminate()
            process.wait(timeout=60)


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
