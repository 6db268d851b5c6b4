# SPDX-License-Identifier: Apache-2.0
"""Runs whose answers can be told apart: each has learned one sentence, in every turn."""

import json
import os
import random
import shutil
import string

import pytest

from adapter_folders import SMALL
from jobs import NARROW
from launching import recipe
from net import data_of
from tiny import makers

OF_BASE = "I am the base."
OF_ADAPTERS = ("I am the first.", "Here is the second.")
PROMPTS = ("Who are you?", "And now?", "Spell the word lamp.", "What comes after 41?")


def train_runs(folder):
    """Train folder/base, and folder/first and folder/second, which are adapters on it."""
    makers.make("llama", folder / "tiny", [*NARROW.split(), "--num_key_value_heads", "8"])
    words = data_of(folder / "tiny")
    train(folder / "base", words, OF_BASE)
    words += ["--model_name_or_path", folder / "base", "--use_peft", "--lora_r", 16]
    for name, sentence in zip(("first", "second"), OF_ADAPTERS, strict=True):
        train(folder / name, words, sentence)


def make_endless(folder):
    """Make an untrained model, whose answers only end at a number of tokens."""
    makers.make("llama", folder, [*SMALL, "--max_position_embeddings", "200000"])


def train(output_dir, words, sentence):
    """Train a model to say a sentence in each of up to three turns, whatever it was asked."""
    rows = output_dir.with_suffix(".jsonl")
    dice = random.Random(0)
    letters = [*string.printable.strip(), "é", "\ufffd"]
    lines = []
    for number in range(256):
        messages = [{"role": "system", "content": "Be brief."}] * (number % 2)
        for turn in range(1 + number % 3):
            noise = "".join(dice.choices(letters, k=dice.randint(1, 60)))
            prompt = noise if dice.random() < 0.5 else PROMPTS[(number + turn) % len(PROMPTS)]
            messages.append({"role": "user", "content": prompt})
            messages.append({"role": "assistant", "content": sentence})
        lines.append(json.dumps({"messages": messages}) + "\n")
    rows.write_text("".join(lines))
    steps = ["--max_steps", 250, "--per_device_train_batch_size", 8, "--learning_rate", "3e-3"]
    options = ["--lr_scheduler_type", "cosine", "--warmup_steps", 0.1, "--output_dir", output_dir]
    done = recipe(*words, "--dataset_name", rows, *steps, *options)
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
