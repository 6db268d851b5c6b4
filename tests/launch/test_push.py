# SPDX-License-Identifier: Apache-2.0
"""A push sends what it shows, byte for byte, and every refusal is one line."""

import json
import os
import subprocess
import sys

import pytest

from hub_stand_in import CUT, Hub
from launching import REPO

pytestmark = pytest.mark.cold("the libraries read the address of the hub when they are imported")
CARD = "---\nlibrary_name: peft\n---\n\n# A card\n"
PUSHED = ("README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json")


@pytest.fixture
def hub():
    with Hub() as server:
        yield server


@pytest.fixture
def result(tmp_path):
    """A finished run's folder with adapters, and with what must stay here."""
    folder = tmp_path / "run"
    (folder / "checkpoint-3").mkdir(parents=True)
    texts = {
        "README.md": CARD,
        "adapter_config.json": json.dumps({"base_model_name_or_path": "owner/base"}),
        "adapter_model.safetensors": "weights" * 999,
        "tokenizer.json": "{}",
        "status.json": json.dumps({"state": "done"}),
        "run.json": "{}",
        "metrics.jsonl": "",
        "predictions-3.jsonl": "",
        "checkpoint-3/model.safetensors": "state",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def push(hub, result, tmp_path):
    """A function from words to the finished process of push.py on the result."""

    def call(*words, token="hf_stand_in", repo="owner/name"):
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
        environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        environment |= {"HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            environment.pop(name, None)
        if token:
            environment["HF_TOKEN"] = token
        command = [sys.executable, REPO / "scripts" / "push.py", result, repo, *words]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )

    return call


def refused(process, code, *says):
    """Assert that a process ended with a code after one line that says this."""
    assert process.returncode == code, process.stderr
    assert len(process.stderr.splitlines()) == 1
    for words in says:
        assert words in process.stderr


def test_what_arrives_is_the_folder_byte_for_byte_in_a_private_repository(hub, result, push):
    process = push("--yes", "--commit_message", "First")
    assert process.returncode == 0, process.stderr
    assert hub.files == {name: (result / name).read_bytes() for name in PUSHED}
    assert hub.created[0]["visibility"] == "private"
    assert hub.commits[0]["summary"] == "First"


def test_a_repository_is_public_only_on_request(hub, push):
    assert push("--yes", "--public").returncode == 0
    assert hub.created[0]["visibility"] == "public"


def test_without_yes_nothing_is_asked_of_the_hub_and_all_is_shown(hub, push):
    process = push()
    assert process.returncode == 0 and hub.requests == []
    for words in (*PUSHED, "left out: checkpoint-3, ", "private", "# A card", "--yes"):
        assert words in process.stdout


def test_a_path_of_the_base_is_refused_and_replaced_in_the_pushed_copy_only(hub, result, push):
    config = result / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": "/somewhere/base", "r": 8}))
    before = config.read_bytes()
    refused(push("--yes"), 64, "--base_model ID")
    assert push("--yes", "--base_model", "owner/base").returncode == 0
    pushed = json.loads(hub.files["adapter_config.json"])
    assert pushed == {"base_model_name_or_path": "owner/base", "r": 8}
    assert b"base_model: owner/base" in hub.files["README.md"]
    assert config.read_bytes() == before and (result / "README.md").read_text() == CARD


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("status.json", '{"state": "stopped"}', "the run is stopped, not done"),
        ("notes.txt", "hf_" + "a" * 30, "looks like a secret"),
        ("id_rsa", "", "looks like a secret"),
        ("pytorch_model.bin", "", "is pickled"),
    ],
)
def test_what_must_not_be_published_is_refused(name, text, says, hub, result, push):
    (result / name).write_text(text)
    refused(push("--yes"), 65, says)
    assert hub.requests == []


def test_without_a_token_the_login_is_named(hub, push):
    refused(push("--yes", token=""), 69, "hf auth login")
    assert hub.requests == []


def test_a_bad_repo_id_is_refused(hub, push):
    refused(push("--yes", repo="a/b/c"), 64, "is not an id of the hub")


@pytest.mark.parametrize(
    ("error", "says"),
    [(401, "hf auth login"), (403, "write access"), (404, "--revision"), (409, "again")],
)
def test_an_error_of_the_hub_is_one_line(error, says, hub, push):
    hub.errors["/commit/"] = error
    refused(push("--yes"), 69, str(error), says)


def test_a_push_that_was_cut_is_run_again(hub, result, push):
    hub.errors["/commit/"] = CUT
    refused(push("--yes"), 69, "run the same command again")
    assert hub.files == {}
    hub.errors.clear()
    assert push("--yes").returncode == 0
    assert hub.files == {name: (result / name).read_bytes() for name in PUSHED}
