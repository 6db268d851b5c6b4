# SPDX-License-Identifier: Apache-2.0
"""Runs whose answers can be told apart: each has learned one sentence, in every turn."""

import json
import os
import shutil

import pytest

from adapter_folders import SMALL
from launching import recipe
from net import data_of
from tiny import makers

OF_BASE = "I am the base."
OF_ADAPTERS = ("I am the first.", "Here is the second.")
PROMPTS = ("Who are you?", "And now?", "Spell the word lamp.", "What comes after 41?")


def train_runs(tiny, folder):
    """Train folder/base, and folder/first and folder/second, which are adapters on it."""
    on_base = ["--model_name_or_path", folder / "base"]
    train(folder / "base", data_of(tiny), OF_BASE, "3e-3")
    for name, sentence in zip(("first", "second"), OF_ADAPTERS, strict=True):
        words = [*data_of(tiny), *on_base, "--use_peft", "--lora_r", 16]
        train(folder / name, words, sentence, "1e-2")


def make_endless(folder):
    """Make an untrained model, whose answers only end at a number of tokens."""
    makers.make("llama", folder, [*SMALL, "--max_position_embeddings", "200000"])


def train(output_dir, words, sentence, learning_rate):
    """Train a model to say a sentence in each of up to three turns."""
    rows = output_dir.with_suffix(".jsonl")
    rows.parent.mkdir(exist_ok=True)
    lines = []
    for number in range(64):
        messages = []
        for turn in range(1 + number % 3):
            prompt = PROMPTS[(number + turn) % len(PROMPTS)]
            messages.append({"role": "user", "content": prompt})
            messages.append({"role": "assistant", "content": sentence})
        lines.append(json.dumps({"messages": messages}) + "\n")
    rows.write_text("".join(lines))
    steps = ["--max_steps", 250, "--per_device_train_batch_size", 8, "--warmup_steps", 0]
    options = ["--dataset_name", rows, "--output_dir", output_dir, *steps]
    done = recipe(*words, *options, "--learning_rate", learning_rate)
    assert done.returncode == 0, done.output[-3000:]


def find_browser():
    """The path of a Chromium, or a skip that says that there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        found = shutil.which(name)
        if found:
            return found
    pytest.skip("no Chromium on the PATH (apt-get install chromium)")


def environment():
    """The environment of a chat: no hub, and no colors or widths of the terminal around."""
    return {**os.environ, "TERM": "dumb", "COLUMNS": "80"}
