# SPDX-License-Identifier: Apache-2.0
"""What is pushed is named: what loads a result and describes it. Whatever else is there stays."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GPT2Tokenizer,
    T5Tokenizer,
    tokenization_utils_base,
    utils,
)

from launching import REPO, run

ADAPTER_CONFIG = "adapter_config.json"
# By the libraries' own names
LOADED = [
    utils.CONFIG_NAME,
    utils.GENERATION_CONFIG_NAME,
    utils.IMAGE_PROCESSOR_NAME,
    utils.VIDEO_PROCESSOR_NAME,
    utils.PROCESSOR_NAME,
    utils.SAFE_WEIGHTS_INDEX_NAME,
    utils.CHAT_TEMPLATE_FILE,
    f"{utils.CHAT_TEMPLATE_DIR}/tools.jinja",
    tokenization_utils_base.FULL_TOKENIZER_FILE,
    tokenization_utils_base.TOKENIZER_CONFIG_FILE,
    tokenization_utils_base.SPECIAL_TOKENS_MAP_FILE,
    tokenization_utils_base.ADDED_TOKENS_FILE,
    *GPT2Tokenizer.vocab_files_names.values(),
    *T5Tokenizer.vocab_files_names.values(),
    "spiece.model",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    ADAPTER_CONFIG,
    "adapter_model.safetensors",
    "custom_generate/generate.py",
    "custom_generate/requirements.txt",
    "README.md",
    "LICENSE",
    "LICENSE.txt",
]
# What runs of this and of other programs leave in their folders
KEPT = [
    "predictions.jsonl",
    "predictions-3.jsonl",
    "predictions_test.csv",
    "generated_predictions.txt",
    "eval_rows.parquet",
    "train.jsonl",
    "metrics.jsonl",
    "nonfinite_rows.jsonl",
    "all_results.json",
    "status.json",
    "run.log",
    "latest",
    "trainer_state.json",
    "training_args.bin",
    "pytorch_model.bin",
    "optimizer.pt",
    "optimizer.safetensors",
    "rng_state_0.pth",
    "deepspeed_config.json",
    "default_config.yaml",
    "reference.table",
    "loss.png",
    "id_rsa",
    ".run.lock",
    ".env",
    "checkpoint-3/model.safetensors",
    "checkpoint-3/config.json",
    "checkpoint-4/README.md",
    "runs/Jan01_host/events.out.tfevents.1.host.1.0",
    "logs/tokenizer.json",
    "wandb/config.json",
    "trackio/run.db",
    "global_step3/model.safetensors",
    "custom_generate/rows.jsonl",
]


def show(folder):
    """Return the names that push.py shows as pushed, and the line of what stays."""
    command = [sys.executable, REPO / "scripts" / "push.py", folder, "owner/name"]
    done = run(*command, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.output
    pushed = re.findall(r"^ +[\d,]+  (?!bytes in)(\S+)", done.output, re.MULTILINE)
    (stays,) = re.findall(r"^stays here: (.*)$", done.output, re.MULTILINE)
    return pushed, stays.split(", ")


def test_all_that_loads_a_result_is_pushed_and_all_else_is_named_as_staying(tmp_path):
    texts = {utils.CONFIG_NAME: "{}", "status.json": json.dumps({"state": "done"})}
    texts[ADAPTER_CONFIG] = json.dumps({"base_model_name_or_path": "owner/base"})
    for name in (*LOADED, *KEPT):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts.get(name, f"{name}\n"))
    pushed, stays = show(tmp_path)
    assert sorted(pushed) == sorted(set(LOADED))
    assert set(stays) == {Path(name).parts[0] for name in KEPT}


@pytest.fixture(scope="module")
def finished(tiny_of, once):
    """The folder of a run that writes held-out rows and the model's answers to them."""

    def fill(folder):
        tiny = tiny_of("t5")
        words = ["--model_name_or_path", tiny / "model", "--output_dir", folder / "run"]
        for flag, split in (("--dataset_name", "train"), ("--eval_dataset_name", "test")):
            lines = (tiny / "data" / f"{split}.jsonl").read_text().splitlines()[:6]
            folder.mkdir(exist_ok=True)
            (folder / f"{split}.jsonl").write_text("\n".join(lines))
            words += [flag, folder / f"{split}.jsonl"]
        words += ["--max_steps", 1, "--generation_max_length", 8]
        done = run(sys.executable, REPO / "recipes" / "t5.py", *words)
        assert done.returncode == 0, done.output[-3000:]

    return once("run_with_predictions", fill)


def test_what_is_pushed_of_a_run_loads_and_has_none_of_its_rows(finished, tmp_path):
    out = finished / "run"
    pushed, stays = show(out)
    assert (out / "predictions.jsonl").is_file() and "predictions.jsonl" in stays
    assert {"run.json", "metrics.jsonl", "status.json", "checkpoint-1"} <= set(stays)
    rows = (finished / "test.jsonl").read_text().splitlines()
    held_out = [json.loads(row)["source"] for row in rows]
    for name in pushed:
        if name in ("README.md", "run_public.json"):  # They are made for the push
            continue
        shutil.copyfile(out / name, tmp_path / name)
        content = (out / name).read_bytes()
        assert not [row for row in held_out if row.encode() in content]
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tmp_path)
