# SPDX-License-Identifier: Apache-2.0
"""A push sends what it shows, byte for byte: what loads a result and describes it, and no more."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars
from safetensors.torch import save_file
from transformers import GPT2Tokenizer, T5Tokenizer, tokenization_utils_base, utils

import net
import push as command
from hub_stand_in import CUT, Hub
from launching import edit_json, read_rows, script, tensors_of

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
def push(hub, result, tmp_path, monkeypatch, in_process):
    """A function from words to how push.py ended on the result or another folder, in process."""
    # For the libraries, which read them when they are imported, the stand-in is the hub
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    disable_progress_bars()

    def call(*words, token="hf_stand_in", repo="owner/name", folder=result):
        with monkeypatch.context() as patch:
            patch.setenv("HF_TOKEN", token)
            return in_process(command, folder, repo, *words)

    return call


def assert_whole(hub, result):
    """The hub has the folder byte for byte, and beside it what is pushed of run.json."""
    expected = {name: (result / name).read_bytes() for name in PUSHED}
    assert hub.files == expected | {"run_public.json": hub.files["run_public.json"]}


def refused(process, code, word):
    """Assert that a process ended with a code after one line that has this word."""
    assert process.code == code and word in process.err, process.err
    assert "Traceback" not in process.err and len(process.err.splitlines()) == 1


def test_what_arrives_is_what_was_shown_in_a_private_repository(hub, result, push):
    shown = push()
    assert shown.code == 0 and hub.requests == []  # Without --yes
    for words in (*PUSHED, "stays here: checkpoint-3, ", "private", "--yes"):
        assert words in shown.out
    process = push("--yes")
    assert process.code == 0, process.err
    assert_whole(hub, result)
    assert hub.created[0]["visibility"] == "private"
    public = json.loads(hub.files["run_public.json"])  # It has no path and no name
    assert public == {"arguments": {"load_in_4bit": True}, "base_weights": "a" * 64}


def test_a_path_of_the_base_is_refused_and_replaced_in_the_pushed_copy_only(hub, result, push):
    config = result / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": "/somewhere/base", "r": 8}))
    before = config.read_bytes()
    refused(push("--yes"), 64, "--base_model ID")
    assert push("--yes", "--base_model", "owner/base", "--public").code == 0
    assert hub.created[0]["visibility"] == "public"
    pushed = json.loads(hub.files["adapter_config.json"])
    assert pushed == {"base_model_name_or_path": "owner/base", "r": 8}
    assert config.read_bytes() == before and (result / "README.md").read_text() == CARD


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("status.json", '{"state": "stopped"}', "not done"),
        ("status.json", "", "not done"),
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
    refused(push("--yes", repo="a/b/c"), 69, "a/b/c")
    assert hub.requests == []


def test_an_error_of_the_hub_is_one_line_and_a_second_call_goes_through(hub, result, push):
    for error, word in ((403, "403"), (CUT, "again")):
        hub.errors["/commit/"] = error
        refused(push("--yes"), 69, word)
    assert hub.files == {}
    hub.errors.clear()
    assert push("--yes").code == 0
    assert_whole(hub, result)


ANSWERS = ("--predict_with_generate", "--num_predictions", "2", "--generation_max_new_tokens", "4")


def test_adapters_that_were_pushed_and_fetched_refuse_another_base(hub, push, net_tiny, tmp_path):
    tiny = shutil.copytree(net_tiny("llama"), tmp_path / "tiny")
    cell = net.Cell(weights="LoRA", riding=ANSWERS)
    trained = net.launch(cell, tiny, tmp_path / "trained").expect(0)
    assert list(trained.folder.glob("predictions-*"))
    process = push("--yes", "--base_model", "owner/base", folder=trained.folder)
    assert process.code == 0, process.err
    # Nothing of this machine and no row: what is pushed is named
    row = read_rows(tiny / "data" / "test.jsonl")[0]["messages"][0]["content"]
    for name, content in hub.files.items():
        assert bytes(tmp_path) not in content and row.encode() not in content, name
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    for name, content in hub.files.items():
        (fetched / name).write_bytes(content)
    edit_json(fetched / "adapter_config.json", base_model_name_or_path=str(tiny / "model"))
    words = [fetched, "--prompt", "Hello", "--max_new_tokens", 2]
    script("generate", *words, code=0)
    weights = tensors_of(tiny / "model")
    weights["lm_head.weight"].add_(1)
    save_file(weights, tiny / "model" / "model.safetensors", {"format": "pt"})
    assert "trained on" in script("generate", *words, code=65).output
    merged = script("merge", fetched, tmp_path / "merged", "--device", "cpu", code=65)
    assert "trained on" in merged.output


# What loads a result, by the libraries' own names
LOADED = {
    utils.CONFIG_NAME,
    utils.GENERATION_CONFIG_NAME,
    utils.IMAGE_PROCESSOR_NAME,
    utils.PROCESSOR_NAME,
    utils.SAFE_WEIGHTS_INDEX_NAME,
    utils.CHAT_TEMPLATE_FILE,
    f"{utils.CHAT_TEMPLATE_DIR}/tools.jinja",
    tokenization_utils_base.FULL_TOKENIZER_FILE,
    tokenization_utils_base.TOKENIZER_CONFIG_FILE,
    tokenization_utils_base.SPECIAL_TOKENS_MAP_FILE,
    *GPT2Tokenizer.vocab_files_names.values(),
    *T5Tokenizer.vocab_files_names.values(),
    "model-00001-of-00002.safetensors",
    "adapter_config.json",
    "adapter_model.safetensors",
    "custom_generate/generate.py",
    "modules.json",
    "1_Pooling/config.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "README.md",
    "LICENSE.txt",
}
# What runs of this and of other programs leave in their folders
KEPT = """
    predictions.jsonl eval_rows.parquet train.jsonl metrics.jsonl status.json run.log loss.png
    trainer_state.json training_args.bin pytorch_model.bin rng_state_0.pth optimizer.safetensors
    default_config.yaml reference.table id_rsa .run.lock .env checkpoint-3/model.safetensors
    runs/host/events.out.tfevents.1 logs/tokenizer.json custom_generate/rows.jsonl
""".split()


def test_all_that_loads_a_result_is_pushed_and_all_else_is_named_as_staying(push, tmp_path):
    folder = tmp_path / "full"
    texts = {utils.CONFIG_NAME: "{}", "status.json": '{"state": "done"}'}
    texts["adapter_config.json"] = '{"base_model_name_or_path": "owner/base"}'
    for name in (*LOADED, *KEPT):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts.get(name, f"{name}\n"))
    shown = push(folder=folder).out
    pushed = re.findall(r"^ +[\d,]+  (?!bytes in)(\S+)", shown, re.MULTILINE)
    (stays,) = re.findall(r"^stays here: (.*)$", shown, re.MULTILINE)
    assert sorted(pushed) == sorted(LOADED)
    assert set(stays.split(", ")) == {Path(name).parts[0] for name in KEPT}
