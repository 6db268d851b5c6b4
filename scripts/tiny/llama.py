# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama or Mixtral, and rows of skills."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from common import Exit, stop
from tiny import chat, output, settings, skills, tokenizers
from tiny.options import LlamaOptions, MixtralOptions

FLAGS = "--per_device_train_batch_size 64 --learning_rate 2e-3 --warmup_steps 0.05"


def make(folder: Path, options: LlamaOptions) -> None:
    """Write the model, and without --text the rows; print how to train on them unless quiet."""
    model, tokenizer = make_model(options)
    with output.writing_to(folder):
        output.save_model(folder / "model", model, tokenizer, f"{len(tokenizer)} tokens")
        if options.text is None:
            rows = skills.make_rows(options.num_train_rows, options.num_test_rows, options.seed)
            output.write_files(folder / "data", rows, "skill")
    if not options.quiet:
        print_launch(folder, options)


def make_model(options: LlamaOptions) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return a random model whose generation ends at the end of a turn, and its tokenizer."""
    texts = []
    if options.text is not None:
        texts = read_texts(options.text)
    max_length = options.max_position_embeddings
    tokenizer = tokenizers.byte_level_bpe(texts, options.vocab_size, max_length)

    torch.manual_seed(options.seed)
    with torch.device(options.device):
        config = make_config(tokenizer, options)
        model = AutoModelForCausalLM.from_config(config, dtype=options.dtype)
    end_of_turn = tokenizer.convert_tokens_to_ids(chat.END_OF_TURN)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[end_of_turn, tokenizer.eos_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    return model, tokenizer


def make_config(
    tokenizer: PreTrainedTokenizerFast, options: LlamaOptions
) -> LlamaConfig | MixtralConfig:
    """Return the configuration of a Mixtral if the options are a Mixtral's, else of a Llama."""
    shared = settings.decoder_settings(tokenizer, options)
    shared["tie_word_embeddings"] = options.tie_word_embeddings
    if isinstance(options, MixtralOptions):
        return MixtralConfig(num_local_experts=options.num_local_experts, **shared)
    return LlamaConfig(**shared)


def read_texts(path: Path) -> list[str]:
    """Return the lines of a .txt file, or all strings of a .jsonl file."""
    texts = []
    line = ""
    try:
        for line in path.read_text(encoding="utf-8").split("\n"):
            if line.strip():
                texts += [line] if path.suffix == ".txt" else strings_in(json.loads(line))
    except (OSError, ValueError) as error:
        stop(Exit.DATA, f"cannot read {path}: {error}: {line[:80]}")
    return texts


def strings_in(value: Any) -> list[str]:
    """Return every string inside a JSON value, keys excepted."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return []
    return [text for item in value for text in strings_in(item)]


def print_launch(folder: Path, options: LlamaOptions) -> None:
    """Print a command that trains the model, with rates that reach 97 % exact match or more."""
    recipe = "mixtral" if isinstance(options, MixtralOptions) else "llama"
    rows = output.ROWS if options.text is None else f"--dataset_name {options.text}"
    output.print_launch(recipe, folder, FLAGS, rows)
