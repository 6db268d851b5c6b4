# SPDX-License-Identifier: Apache-2.0
"""scripts/check_server.py holds a real `transformers serve` against what was trained."""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from launching import INTERPRETER, REPO, data_of, recipe, run

STARTS = 120  # seconds in which the server starts; it takes 5 to 10 on two idle cores
STEPS = ["--logging_steps", "10", "--per_device_train_batch_size", "16"]


def check_server(*arguments):
    return run(sys.executable, REPO / "scripts" / "check_server.py", *arguments)


def fill_whole(tiny, folder):
    """Train until the answers are of words and end: about 60 steps."""
    flags = ["--max_steps", "60", "--learning_rate", "3e-3", "--output_dir", folder]
    done = recipe(*data_of(tiny), *STEPS, *flags)
    assert done.returncode == 0, done.output[-3000:]


def fill_adapters(tiny, base, folder):
    rows = ["--dataset_name", tiny / "data" / "train.jsonl"]
    rows += ["--eval_dataset_name", tiny / "data" / "test.jsonl"]
    flags = ["--use_peft", "--max_steps", "10", "--learning_rate", "2e-2", "--output_dir", folder]
    done = recipe("--model_name_or_path", base, *rows, *STEPS, *flags)
    assert done.returncode == 0, done.output[-3000:]


def fill_merged(adapters, folder):
    done = run(sys.executable, REPO / "scripts" / "merge.py", adapters, folder)
    assert done.returncode == 0, done.output


@pytest.fixture(scope="module")
def whole(tiny, once):
    """A trained model."""
    return once("served_whole", partial(fill_whole, tiny))


@pytest.fixture(scope="module")
def adapters(tiny, whole, once):
    """Adapters on the trained model, which change its answers."""
    return once("served_adapters", partial(fill_adapters, tiny, whole))


@pytest.fixture(scope="module")
def merged(adapters, once):
    """The adapters merged into their base."""
    return once("served_merged", partial(fill_merged, adapters))


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


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
            yield address
        finally:
            process.terminate()
            process.wait(timeout=60)


def test_a_served_model_says_what_was_trained(whole, url, tmp_path):
    done = check_server(whole, "--url", url, "--model", whole, "--json", tmp_path / "verdict.json")
    assert done.returncode == 0, done.output
    assert f"{whole} at {url}/v1 says what {whole} says" in done.output
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["passed"] and verdict["same_answers"] == verdict["prompts"] == 50
    assert verdict["same_lengths_of_prompts"] == 50
    assert verdict["largest_logprob_gap"] is None  # `transformers serve` returns none
    # Answers that are words, and that end: otherwise nothing is shown
    assert len({answer["server"] for answer in verdict["answers"]}) > 10
    assert [answer["ended_by"] for answer in verdict["answers"]].count("stop") > 25


def test_merged_adapters_that_are_served_say_what_the_adapters_say(adapters, merged, url, tmp_path):
    done = check_server(adapters, "--url", url, "--model", merged)
    assert done.returncode == 0, done.output
    assert "50/50 same" in done.output


@pytest.fixture
def copied(whole, tmp_path):
    """A copy of the trained model, in which a test plants a fault."""
    folder = tmp_path / "copied"
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("checkpoint-*"))
    return folder


def differ(folder, url, model):
    """Check a server that differs, and return the line with which that ends."""
    done = check_server(folder, "--url", url, "--model", model)
    assert done.returncode == 76 and "Traceback" not in done.output, done.output
    (line,) = [line for line in done.output.splitlines() if line.startswith("error: ")]
    return line


def test_a_server_of_another_model_is_caught(adapters, whole, url):
    line = differ(adapters, url, whole)  # The base without its adapters
    assert "but the trained model says" in line


def test_a_changed_chat_template_is_caught(copied, whole, url):
    path = copied / "chat_template.jinja"
    path.write_text(path.read_text().replace("message['content']", "message['content'] + ' '"))
    line = differ(whole, url, copied)
    assert "tokens of prompt 1, but training made" in line and "(50 of 50 prompts)" in line


def test_answers_that_do_not_end_are_caught(copied, whole, url):
    path = copied / "generation_config.json"
    config = json.loads(path.read_text())
    config["eos_token_id"] = [2]  # The end of a text, but no longer that of a turn
    path.write_text(json.dumps(config))
    line = differ(whole, url, copied)
    assert "runs on after" in line and "does not end at token 3" in line and "eos_token_id" in line


def test_a_repetition_penalty_of_the_folder_is_caught(copied, whole, url):
    path = copied / "generation_config.json"
    config = json.loads(path.read_text()) | {"repetition_penalty": 2.0}
    path.write_text(json.dumps(config))
    assert "but the trained model says" in differ(whole, url, copied)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--model", "runs/nothing"], 69, "answers with 500"),
        ([], 69, "name the model by --model"),
    ],
)
def test_what_the_server_cannot_answer_is_one_line(words, code, says, whole, url):
    done = check_server(whole, "--url", url, *words)
    lines = done.output.splitlines()
    assert done.returncode == code and len(lines) == 1 and says in lines[0], done.output


def test_without_a_server_the_command_ends_at_once(whole):
    done = check_server(whole, "--url", f"http://127.0.0.1:{free_port()}", "--model", whole)
    lines = done.output.splitlines()
    assert done.returncode == 69 and len(lines) == 1 and "start the server" in lines[0], done.output
