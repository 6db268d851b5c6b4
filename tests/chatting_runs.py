# SPDX-License-Identifier: Apache-2.0
"""Runs whose answers can be told apart: each has learned one sentence, in every turn."""

import os
import shutil

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from adapter_folders import SMALL
from jobs import NARROW
from launching import recipe, write_rows
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
    """Make a model that says a letter and a space by turns, until it has said enough tokens."""
    makers.make("llama", folder, [*SMALL, "--max_position_embeddings", "200000"])
    letter, space = AutoTokenizer.from_pretrained(folder / "model")("a ")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    embeddings, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data
    for layer in model.model.layers:  # They add nothing
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    embeddings.zero_()
    head.zero_()
    embeddings[:, 0] = 1
    embeddings[letter, 1] = 1
    head[letter, 0] = 1
    head[space, 1] = 2  # is behind the letter only
    model.save_pretrained(folder / "model")


def train(output_dir, words, sentence):
    """Train a model to say a sentence in each of up to three turns."""
    rows = []
    for number in range(24):
        messages = [{"role": "system", "content": "Be brief."}] * (number % 2)
        for turn in range(1 + number % 3):
            prompt = PROMPTS[(number + turn) % len(PROMPTS)]
            messages.append({"role": "user", "content": prompt})
            messages.append({"role": "assistant", "content": sentence})
        rows.append({"messages": messages})
    path = write_rows(output_dir.with_suffix(".jsonl"), rows)
    steps = ["--max_steps", 50, "--per_device_train_batch_size", 8, "--learning_rate", "5e-3"]
    options = ["--num_train_epochs", 50, "--save_steps", 0, "--output_dir", output_dir]
    recipe(*words, "--dataset_name", path, *steps, *options, code=0)


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
