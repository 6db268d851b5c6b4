# SPDX-License-Identifier: Apache-2.0
"""A random model of a family, the tokenizer that all families share, and the rows."""

from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from components import upstream
from tiny import chat, output, settings, skills, tokenizers

from .catalog import FAMILIES, NUM_ROWS, SHARED

VOCABULARY = 320  # rows of the embedding; the tokenizer has fewer tokens
SEED = 0
# A parameter of Gemma 3n: 0 in an untrained model, so that whole layers would have no effect
ZERO_AT_START = "correct_output_scale"


def write_rows(folder: Path) -> Path:
    """Write the rows of all families, and return their file."""
    path = folder / "rows.jsonl"
    output.write_rows(path, skills.make_rows(NUM_ROWS, 0, SEED)["train"])
    return path


def write_model(family: str, folder: Path) -> None:
    """Write a random model of a family with its tokenizer.

    Raises what transformers raises for settings that it does not take.
    """
    upstream.ask_for_deepspeed_without_importing_it()  # it warns that it found no accelerator
    tokenizer = tokenizers.byte_level_bpe([], VOCABULARY, SHARED["max_position_embeddings"])
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(make_config(family, tokenizer))
    for name, weight in model.named_parameters():
        if name.endswith(ZERO_AT_START):
            torch.nn.init.normal_(weight)
    model.generation_config.eos_token_id = [
        tokenizer.convert_tokens_to_ids(chat.END_OF_TURN),
        tokenizer.eos_token_id,
    ]
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_config(family: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """Return a family's tiny configuration, with random weights that are large enough to matter."""
    known = {
        **SHARED,
        "vocab_size": VOCABULARY,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": settings.initializer_range(SHARED["hidden_size"]),
    }
    return AutoConfig.for_model(family, **{**known, **FAMILIES[family]})
