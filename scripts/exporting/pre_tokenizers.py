# SPDX-License-Identifier: Apache-2.0
"""How a tokenizer cuts a text into words before it makes tokens of them, by llama.cpp's names.

llama.cpp has these rules in its code, by name (src/llama-vocab.cpp, llm_tokenizer_bpe, in
llama-cpp-python 0.3.36). A file that names another rule is read without an error, and the model
sees other tokens than in training.
"""

import json
from pathlib import Path
from typing import Any

LLAMA_3 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
QWEN_2 = LLAMA_3.replace("\\p{N}{1,3}", "\\p{N}")
DIGITS = {"type": "Digits", "individual_digits": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
GPT_2 = {**BYTES, "use_regex": True}


def split_by(pattern: str) -> dict[str, Any]:
    """Return the step of a tokenizer that cuts a text by a regular expression."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# (the steps of the tokenizer, whether it takes whole words from the vocabulary before merges)
STEPS = {
    "gpt-2": ([GPT_2], False),
    "smollm": ([DIGITS, GPT_2], False),
    "llama-bpe": ([split_by(LLAMA_3), BYTES], True),
    "qwen2": ([split_by(QWEN_2), BYTES], False),
}


def find_pre_tokenizer(folder: Path) -> str | None:
    """Return llama.cpp's name for the way in which a folder's tokenizer cuts words, if known."""
    try:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        model = content["model"]
        steps = steps_of(content["pre_tokenizer"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    if model.get("type") != "BPE" or content.get("normalizer") is not None:
        return None
    takes_words = bool(model.get("ignore_merges"))
    for name, known in STEPS.items():
        if known == (steps, takes_words):
            return name
    return None


def steps_of(pre_tokenizer: Any) -> list[dict[str, Any]]:
    """Return the steps of a tokenizer, without what does not change the words."""
    steps = [pre_tokenizer]
    if pre_tokenizer["type"] == "Sequence":
        steps = pre_tokenizer["pretokenizers"]
    found = []
    for step in steps:
        found.append({key: value for key, value in step.items() if key != "trim_offsets"})
    return found
