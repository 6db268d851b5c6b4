# SPDX-License-Identifier: Apache-2.0
"""A push sends what it shows, byte for byte, and every refusal is one line."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from adapter_folders import make_base, write_adapters
from hub_stand_in import CUT, CUT_WITHIN, Hub, Planted
from launching import REPO, run
from merged_folders import FEW, edit_json, edit_tensors

pytestmark = pytest.mark.cold("the libraries read the address of the hub when they are imported")
HF = Path(sys.executable).with_name("hf")
CARD = "---\nlibrary_name: peft\n---\n\n# A card\n"
PUSHED = ("README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json")
RUN = {
    "arguments": {
        "output_dir": "/home/alice/run",
        "model_name_or_path": "/home/alice/base",
        "dataset_name": ["/home/alice/rows.jsonl"],
        "load_in_4bit": True,
        "columns": ["prompt=question"],
    },
    "base_weights": "a" * 64,
    "launch": {"ACCELERATE_X": "alice"},
}


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
        "run.json": json.dumps(RUN),
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
        environment = environment_of(hub, tmp_path)
        if token:
            environment["HF_TOKEN"] = token
        command = [sys.executable, REPO / "scripts" / "push.py", result, repo, *words]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )

    return call


def environment_of(hub, folder):
    """Return the environment of a process for which the stand-in is the hub."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    environment |= {"HF_HOME": str(folder / "home"), "NO_PROXY": "127.0.0.1"}
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        environment.pop(name, None)
    return environment


def whole(hub, result):
    """Whether the hub has the folder byte for byte, and beside it what is pushed of run.json."""
    expected = {name: (result / name).read_bytes() for name in PUSHED}
    record = json.loads(hub.files.get("run_public.json", b"{}"))
    return hub.files == expected | {"run_public.json": hub.files["run_public.json"]} and record


def refused(process, code, *says):
    """Assert that a process ended with a code after one line that says this."""
    assert process.returncode == code, process.stderr
    assert len(process.stderr.splitlines()) == 1
    for words in says:
        assert words in process.stderr


def test_what_arrives_is_the_folder_byte_for_byte_in_a_private_repository(hub, result, push):
    process = push("--yes", "--commit_message", "First")
    assert process.returncode == 0, process.stderr
    assert whole(hub, result)
    assert hub.created[0]["visibility"] == "private"
    assert hub.commits[0]["summary"] == "First"


def test_a_repository_is_public_only_on_request(hub, push):
    assert push("--yes", "--public").returncode == 0
    assert hub.created[0]["visibility"] == "public"


def test_without_yes_nothing_is_asked_of_the_hub_and_all_is_shown(hub, push):
    process = push()
    assert process.returncode == 0 and hub.requests == []
    for words in (*PUSHED, "stays here: checkpoint-3, ", "private", "# A card", "--yes"):
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
        ("README.md", "hf_" + "a" * 30, "has a secret in it"),
        ("tokenizer.json", "-----BEGIN PRIVATE KEY-----", "has a secret in it"),
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
    [
        (401, "hf auth login"),
        (403, "write access"),
        (404, "--revision"),
        (409, "again"),
        (429, "wait, and run the same command again"),
        (500, "run the same command again later"),
        (503, "run the same command again later"),
    ],
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
    assert whole(hub, result)


def test_what_is_pushed_of_a_run_has_no_path_and_no_name(hub, push):
    process = push("--yes")
    assert process.returncode == 0, process.stderr
    assert json.loads(hub.files["run_public.json"]) == {
        "arguments": {"load_in_4bit": True, "columns": ["prompt=question"]},
        "base_weights": "a" * 64,
    }
    assert "run_public.json (what loading reads of run.json)" in process.stdout


def test_how_long_to_wait_is_told(hub, push):
    hub.errors["/commit/"] = Planted(429, headers={"Retry-After": "77"})
    refused(push("--yes"), 69, "429", "wait 77 s")


@pytest.mark.parametrize(
    "planted",
    [Planted(429, 1, {"Retry-After": "0"}), Planted(503, 1), Planted(CUT_WITHIN, 1)],
    ids=["too many requests", "unavailable", "cut"],
)
def test_an_upload_that_fails_once_is_tried_again(planted, hub, result, push):
    oid = hashlib.sha256((result / "adapter_model.safetensors").read_bytes()).hexdigest()
    hub.errors[oid] = planted
    process = push("--yes")
    assert process.returncode == 0, process.stderr
    assert whole(hub, result) and hub.requests.count(f"PUT /lfs/{oid}") == 2


def test_a_push_cut_within_an_upload_goes_on_with_what_is_missing(hub, result, push):
    (result / "model-00002-of-00002.safetensors").write_bytes(b"more weights" * 999)
    oid = hashlib.sha256((result / "model-00002-of-00002.safetensors").read_bytes()).hexdigest()
    hub.errors[oid] = CUT_WITHIN
    process = push("--yes")
    assert process.returncode == 69 and hub.files == {}
    assert "run the same command again" in process.stderr.splitlines()[-1]
    assert "Traceback" not in process.stderr and len(hub.stored) == 1
    hub.errors.clear()
    hub.requests.clear()
    process = push("--yes")
    assert process.returncode == 0, process.stderr
    assert [request for request in hub.requests if "PUT" in request] == [f"PUT /lfs/{oid}"]
    expected = {
        name: (result / name).read_bytes() for name in (*PUSHED, "model-00002-of-00002.safetensors")
    }
    assert hub.files == expected | {"run_public.json": hub.files["run_public.json"]}


def test_adapters_that_were_pushed_and_fetched_refuse_another_base(hub, push, result, tmp_path):
    base = make_base(tmp_path / "base")
    for path in result.glob("*.*"):
        path.unlink()
    write_adapters(result, base)
    assert str(base) in (result / "README.md").read_text()  # peft's own card
    assert push("--yes", "--base_model", "owner/base").returncode == 0
    assert not [name for name, content in hub.files.items() if bytes(tmp_path) in content]
    fetched = tmp_path / "fetched"
    words = ["download", "owner/name", "--local-dir", fetched]
    done = run(HF, *words, env=environment_of(hub, tmp_path))
    assert done.returncode == 0, done.output
    assert not (fetched / "run.json").exists()
    edit_json(fetched / "adapter_config.json", base_model_name_or_path=str(base / "model"))
    generate = ["generate.py", fetched, "--prompt", "Hello", "--max_new_tokens", "2"]
    merge = ["merge.py", fetched, tmp_path / "merged", *FEW]
    assert call(generate).returncode == 0
    edit_tensors(
        base / "model" / "model.safetensors", lambda tensors: tensors["lm_head.weight"].add_(1)
    )
    for words in (generate, merge):
        done = call(words)
        assert done.returncode == 65, done.output
        assert "are not those that the adapters were trained on" in done.output.splitlines()[-1]


def change(tensors):
    for tensor in tensors.values():
        tensor.add_(1)


def call(words):
    return run(sys.executable, REPO / "scripts" / words[0], *words[1:])
