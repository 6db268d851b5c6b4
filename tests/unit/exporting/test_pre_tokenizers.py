# SPDX-License-Identifier: Apache-2.0
"""A tokenizer is given llama.cpp's name of its rules only if it has exactly these rules."""

import json

import pytest

from exporting.pre_tokenizers import (
    BYTES,
    DIGITS,
    GPT_2,
    LLAMA_3,
    QWEN_2,
    find_pre_tokenizer,
    split_by,
)


def write_tokenizer(folder, steps, ignore_merges=False, **changes):
    """Write a tokenizer.json with these steps."""
    model = {"type": "BPE", "ignore_merges": ignore_merges}
    steps = [{**step, "trim_offsets": True} for step in steps]
    content = {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": model,
        **changes,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("name", "steps", "ignore_merges"),
    [
        ("gpt-2", [GPT_2], False),
        ("smollm", [DIGITS, GPT_2], False),
        ("llama-bpe", [split_by(LLAMA_3), BYTES], True),
        ("qwen2", [split_by(QWEN_2), BYTES], False),
    ],
)
def test_known_rules_have_their_name(name, steps, ignore_merges, tmp_path):
    assert find_pre_tokenizer(write_tokenizer(tmp_path, steps, ignore_merges)) == name


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": [GPT_2, DIGITS]},
        {"steps": [DIGITS]},
        {"steps": [split_by(LLAMA_3.replace("{1,3}", "{1,2}")), BYTES], "ignore_merges": True},
        {"steps": [split_by(LLAMA_3), BYTES]},
        {"steps": [GPT_2], "normalizer": {"type": "NFC"}},
        {"steps": [GPT_2], "model": {"type": "WordPiece"}},
        {"steps": [GPT_2], "pre_tokenizer": None},
    ],
    ids=["order", "digits", "other numbers", "merges", "normalizer", "words", "nothing"],
)
def test_other_rules_have_no_name(changes, tmp_path):
    assert find_pre_tokenizer(write_tokenizer(tmp_path, **changes)) is None


def test_a_folder_without_a_tokenizer_file_has_no_name(tmp_path):
    assert find_pre_tokenizer(tmp_path) is None
