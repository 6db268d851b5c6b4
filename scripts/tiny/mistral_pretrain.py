# SPDX-License-Identifier: Apache-2.0
"""A tiny Mistral with a sliding window, and short stories about people with made-up names."""

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tiny import output, settings, tokenizers
from tiny.options import MistralPretrainOptions
from tiny.words import different_words, make_word

Row = dict[str, str]


@dataclass(frozen=True)
class Trade:
    """What a person of a trade does, which is the same in every story."""

    name: str
    place: str  # where goods are bought
    goods: str
    ware: str  # what is made of them
    dream: str


BAKER = Trade("baker", "mill", "flour", "bread", "a bigger oven")
SMITH = Trade("smith", "mine", "iron", "nails", "a golden hammer")
WEAVER = Trade("weaver", "farm", "wool", "blankets", "a silver loom")
POTTER = Trade("potter", "river", "clay", "bowls", "a warmer kiln")
PAINTER = Trade("painter", "market", "colours", "pictures", "a house by the sea")
CARPENTER = Trade("carpenter", "forest", "wood", "tables", "a sharper saw")
COOK = Trade("cook", "garden", "onions", "soup", "a copper kettle")
TAILOR = Trade("tailor", "harbour", "silk", "coats", "a visit of the queen")
TRADES = (BAKER, SMITH, WEAVER, POTTER, PAINTER, CARPENTER, COOK, TAILOR)

SENTENCES = (
    "Every morning {name} goes to the {trade.place} and buys {trade.goods}.",
    "In the afternoon {name} makes {trade.ware} of the {trade.goods}.",
    "In the evening {name} sells {trade.ware} to the people of {town}.",
    "At night {name} dreams of {trade.dream}.",
    "Everybody in {town} likes the {trade.ware} of {name}.",
    "Without {trade.goods} there is no work for a {trade.name}.",
)
FLAGS = "--max_length 128 --num_train_epochs 2 --learning_rate 3e-3 --warmup_steps 0.05"


def make(folder: Path, options: MistralPretrainOptions) -> None:
    """Write the model and the texts; print how to train on them unless quiet."""
    files = make_rows(options.num_train_rows, options.num_test_rows, options.seed)
    train = [row["text"] for row in files["train"]]
    max_length = options.max_position_embeddings
    tokenizer = tokenizers.byte_level_bpe(train, options.vocab_size, max_length)
    tokenizer.chat_template = None  # The model reads text, not conversations.
    model = make_model(tokenizer, options)
    with output.writing_to(folder):
        window = "no window" if options.full_attention else f"a window of {options.sliding_window}"
        size = f"{len(tokenizer)} tokens, {window}"
        output.save_model(folder / "model", model, tokenizer, size)
        output.write_files(folder / "data", files)
    if not options.quiet:
        output.print_launch("mistral_pretrain", folder, FLAGS)


def make_model(
    tokenizer: PreTrainedTokenizerFast, options: MistralPretrainOptions
) -> PreTrainedModel:
    """Return a random Mistral."""
    torch.manual_seed(options.seed)
    shared = settings.decoder_settings(tokenizer, options)
    window = None if options.full_attention else options.sliding_window
    config = MistralConfig(sliding_window=window, **shared)
    return AutoModelForCausalLM.from_config(config)


def make_rows(num_train_rows: int, num_test_rows: int, seed: int) -> dict[str, list[Row]]:
    """Return the rows of the files train and test, which have no person in common."""
    rng = random.Random(seed)
    names = list(itertools.islice(different_words(rng), num_train_rows + num_test_rows))
    rows = [{"text": make_text(name.title(), rng)} for name in names]
    rng.shuffle(rows)
    return {"train": rows[num_test_rows:], "test": rows[:num_test_rows]}


def make_text(name: str, rng: random.Random) -> str:
    """Return three to seven sentences about a person; the first one says who it is."""
    trade = rng.choice(TRADES)
    town = make_word(rng).capitalize()
    chosen = sorted(rng.sample(range(len(SENTENCES)), rng.randint(2, len(SENTENCES))))
    story = [f"{name} is a {trade.name} in {town}."]
    for i in chosen:
        story.append(SENTENCES[i].format(name=name, town=town, trade=trade))
    return " ".join(story)
