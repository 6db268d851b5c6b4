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


def make(folder: Path, options: LlamaOptions) -> None:
    """Write the model, and without --text the rows; print how to train on them unless quiet."""
    model, tokenizer = make_model(options)
    with output.writing_to(folder):
        output.save_model(folder / "model", model, tokenizer, f"{len(tokenizer)} tokens")
        if options.text is None:
            rows = skills.make_rows(options.num_train_rows, options.num_test_rows, options.seed)
            output.write_skills(folder / "data", rows)
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
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        stop(Exit.DATA, f"cannot read {path}: {error}")
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix == ".txt":
            texts.append(line)
            continue
        try:
            texts += strings_in(json.loads(line))
        except json.JSONDecodeError as error:
            place = f"{path}, line {number}"
            stop(Exit.DATA, f"{place}: not JSON: {error.msg} at column {error.colno}")
    if not texts:
        stop(Exit.DATA, f"{path}: contains no text")
    return texts


def strings_in(value: Any) -> list[str]:
    """Return every string inside a JSON value, keys excepted."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    strings = []
    if isinstance(value, list):
        for item in value:
            strings += strings_in(item)
    return strings


def print_launch(folder: Path, options: LlamaOptions) -> None:
    """Print a command that trains the model, with rates that reach 97 % exact match or more."""
    recipe = "mixtral" if isinstance(options, MixtralOptions) else "llama"
    data = folder / "data"
    print("Train it with:")
    if options.text is None:
        lines = [
            f"--model_name_or_path {folder}/model --dataset_name {data}/train.jsonl "
            f"--eval_dataset_name {data}/test.jsonl",
            "--per_device_train_batch_size 64 --learning_rate 2e-3 --warmup_steps 0.05 "
            f"--output_dir {folder}/run",
        ]
    else:
        lines = [
            f"--model_name_or_path {folder}/model --dataset_name {options.text} "
            f"--output_dir {folder}/run"
        ]
    output.print_launch(recipe, lines)
