# SPDX-License-Identifier: Apache-2.0
"""A push sends what it shows, byte for byte, and every refusal is one line."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import net
from hub_stand_in import CUT, CUT_WITHIN, Hub, Planted
from launching import REPO, run

pytestmark = pytest.mark.cold("the libraries read the address of the hub when they are imported")
HF = Path(sys.executable).with_name("hf")
CARD = "---\nlibrary_name: peft\n---\n\n# A card\n"
PUSHED = ("README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json")
ARGUMENTS = {
    "output_dir": "/home/alice/run",
    "model_name_or_path": "/home/alice/base",
    "dataset_name": ["/home/alice/rows.jsonl"],
    "load_in_4bit": True,
}
RUN = {"arguments": ARGUMENTS, "base_weights": "a" * 64, "launch": {"ACCELERATE_X": "alice"}}


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
    """A function from words to the finished process of push.py on the result, or another folder."""

    def call(*words, token="hf_stand_in", repo="owner/name", folder=result):
        environment = environment_of(hub, tmp_path) | ({"HF_TOKEN": token} if token else {})
        command = [sys.executable, REPO / "scripts" / "push.py", folder, repo, *words]
        pipes = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        return subprocess.run(command, env=environment, **pipes)

    return call


def environment_of(hub, folder):
    """Return the environment of a process for which the stand-in is the hub."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    environment |= {"HF_HOME": str(folder / "home"), "NO_PROXY": "127.0.0.1"}
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        environment.pop(name, None)
    return environment


def assert_whole(hub, result, *more):
    """The hub has the folder byte for byte, and beside it what is pushed of run.json."""
    expected = {name: (result / name).read_bytes() for name in (*PUSHED, *more)}
    assert hub.files == expected | {"run_public.json": hub.files["run_public.json"]}


def refused(process, code, word):
    """Assert that a process ended with a code after one line that has this word."""
    assert process.returncode == code and word in process.stderr, process.stderr
    assert "Traceback" not in process.stderr and len(process.stderr.splitlines()) == 1


def test_what_arrives_is_what_was_shown_in_a_private_repository(hub, result, push):
    shown = push()
    assert shown.returncode == 0 and hub.requests == []  # Without --yes
    for words in (*PUSHED, "stays here: checkpoint-3, ", "private", "# A card", "--yes"):
        assert words in shown.stdout
    process = push("--yes", "--commit_message", "First")
    assert process.returncode == 0, process.stderr
    assert_whole(hub, result)
    assert hub.created[0]["visibility"] == "private" and hub.commits[0]["summary"] == "First"
    public = json.loads(hub.files["run_public.json"])  # It has no path and no name
    assert public == {"arguments": {"load_in_4bit": True}, "base_weights": "a" * 64}


def test_a_repository_is_public_only_on_request(hub, push):
    assert push("--yes", "--public").returncode == 0
    assert hub.created[0]["visibility"] == "public"


def test_a_path_of_the_base_is_refused_and_replaced_in_the_pushed_copy_only(hub, result, push):
    config = result / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": "/somewhere/base", "r": 8}))
    before = config.read_bytes()
    refused(push("--yes"), 64, "--base_model ID")
    assert push("--yes", "--base_model", "owner/base").returncode == 0
    pushed = json.loads(hub.files["adapter_config.json"])
    assert pushed == {"base_model_name_or_path": "owner/base", "r": 8}
    assert config.read_bytes() == before and (result / "README.md").read_text() == CARD


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("status.json", '{"state": "stopped"}', "stopped"),
        ("README.md", "hf_" + "a" * 30, "secret"),
        ("tokenizer.json", "-----BEGIN PRIVATE KEY-----", "secret"),
    ],
)
def test_what_must_not_be_published_is_refused(name, text, word, hub, result, push):
    (result / name).write_text(text)
    refused(push("--yes"), 65, word)
    assert hub.requests == []


def test_a_wrong_call_is_refused(hub, push):
    refused(push("--yes", token=""), 69, "hf auth login")
    refused(push("--yes", repo="a/b/c"), 64, "a/b/c")
    assert hub.requests == []


@pytest.mark.parametrize(("error", "word"), [(403, "403"), (CUT, "again")])
def test_an_error_of_the_hub_is_one_line_and_a_second_call_goes_through(
    error, word, hub, result, push
):
    hub.errors["/commit/"] = error
    refused(push("--yes"), 69, word)
    assert hub.files == {}
    hub.errors.clear()
    assert push("--yes").returncode == 0
    assert_whole(hub, result)


def test_an_upload_that_fails_once_is_tried_again(hub, result, push):
    oid = hashlib.sha256((result / "adapter_model.safetensors").read_bytes()).hexdigest()
    hub.errors[oid] = Planted(503, 1)
    process = push("--yes")
    assert process.returncode == 0, process.stderr
    assert_whole(hub, result)
    assert hub.requests.count(f"PUT /lfs/{oid}") == 2


def test_a_push_cut_within_an_upload_goes_on_with_what_is_missing(hub, result, push):
    second = result / "model-00002-of-00002.safetensors"
    second.write_bytes(b"more weights" * 999)
    oid = hashlib.sha256(second.read_bytes()).hexdigest()
    hub.errors[oid] = CUT_WITHIN
    process = push("--yes")
    assert process.returncode == 69 and hub.files == {} and len(hub.stored) == 1
    hub.errors.clear()
    hub.requests.clear()
    assert push("--yes").returncode == 0
    assert [request for request in hub.requests if "PUT" in request] == [f"PUT /lfs/{oid}"]
    assert_whole(hub, result, second.name)


def test_adapters_that_were_pushed_and_fetched_refuse_another_base(hub, push, net_tiny, tmp_path):
    tiny = shutil.copytree(net_tiny("llama"), tmp_path / "tiny")
    trained = net.launch(net.Cell(weights="LoRA"), tiny, tmp_path / "trained").expect(0)
    process = push("--yes", "--base_model", "owner/base", folder=trained.folder)
    assert process.returncode == 0, process.stderr
    assert not [name for name, content in hub.files.items() if bytes(tmp_path) in content]
    fetched = tmp_path / "fetched"
    words = ["download", "owner/name", "--local-dir", fetched]
    assert run(HF, *words, env=environment_of(hub, tmp_path)).returncode == 0
    config = json.loads((fetched / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tiny / "model")
    (fetched / "adapter_config.json").write_text(json.dumps(config))
    generate = [sys.executable, REPO / "scripts" / "generate.py", fetched, "--prompt", "Hello"]
    done = run(*generate, "--max_new_tokens", 2)
    assert done.returncode == 0, done.output
    weights = load_file(tiny / "model" / "model.safetensors")
    weights["lm_head.weight"].add_(1)
    save_file(weights, tiny / "model" / "model.safetensors", {"format": "pt"})
    merge = [sys.executable, REPO / "scripts" / "merge.py", fetched, tmp_path / "merged"]
    for command in (generate, [*merge, "--device", "cpu"]):
        done = run(*command)
        assert done.returncode == 65 and "trained on" in done.output, done.output
