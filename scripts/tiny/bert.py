# SPDX-License-Identifier: Apache-2.0
"""A tiny BERT, and made-up reviews whose class and stars follow from their words."""

import random
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from tiny import output, settings, tokenizers
from tiny.options import BertOptions

THINGS = (
    "soup bread cake fish tea salad waiter room garden table music window price kitchen view chair"
).split()
GOOD = "good kind warm fresh clean lovely fine bright tasty quick".split()
BAD = "bad rude cold stale dirty ugly poor dark bland slow".split()
LABELS = ("negative", "mixed", "positive")
FLAGS = "--per_device_train_batch_size 32 --learning_rate 1e-3 --warmup_steps 0.05"

Row = dict[str, Any]


def make(folder: Path, options: BertOptions) -> None:
    """Write the model and the reviews; print how to train on them unless quiet."""
    files = make_rows(options.num_train_rows, options.num_test_rows, options.seed)
    texts = [row["text"] for row in files["train"]]
    max_length = options.max_position_embeddings
    tokenizer = tokenizers.word_piece(texts, options.vocab_size, max_length)
    model = make_model(tokenizer, options)
    with output.writing_to(folder):
        output.save_model(folder / "model", model, tokenizer, f"{len(tokenizer)} tokens")
        output.write_files(folder / "data", files, "label")
    if not options.quiet:
        output.print_launch("bert", folder, FLAGS)


def make_model(tokenizer: PreTrainedTokenizerFast, options: BertOptions) -> BertModel:
    """Return a random BERT with its pooler and without a head."""
    torch.manual_seed(options.seed)
    config = BertConfig(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        num_hidden_layers=options.num_hidden_layers,
        num_attention_heads=options.num_attention_heads,
        intermediate_size=options.intermediate_size,
        max_position_embeddings=options.max_position_embeddings,
        hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.dropout,
        initializer_range=settings.initializer_range(options.hidden_size),
        pad_token_id=tokenizer.pad_token_id,
    )
    return BertModel(config)


def make_rows(num_train_rows: int, num_test_rows: int, seed: int) -> dict[str, list[Row]]:
    """Return the rows of the files train and test; no text is repeated."""
    rng = random.Random(seed)
    row_of = {}
    while len(row_of) < num_train_rows + num_test_rows:
        row = make_row(rng)
        row_of.setdefault(row["text"], row)
    rows = list(row_of.values())
    rng.shuffle(rows)  # Short texts are soon used up, so that they would all come first.
    return {"train": rows[num_test_rows:], "test": rows[:num_test_rows]}


def make_row(rng: random.Random) -> Row:
    """Return a review of one to three clauses; the sum of their scores gives label and stars."""
    clauses = []
    score = 0
    for thing in rng.sample(THINGS, rng.randint(1, 3)):
        clause, points = make_clause(thing, rng)
        clauses.append(clause)
        score += points
    return {"text": " and ".join(clauses), "label": label_of(score), "stars": 3.0 + score / 4}


def make_clause(thing: str, rng: random.Random) -> tuple[str, int]:
    """Return a clause about a thing, and its score from -2 to 2."""
    score, adjectives = rng.choice([(1, GOOD), (-1, BAD)])
    is_negated = rng.random() < 0.3
    is_doubled = rng.random() < 0.3
    words = ["the", thing, "was"]
    if is_negated:
        words.append("not")
        score = -score
    if is_doubled:
        words.append("very")
        score = 2 * score
    words.append(rng.choice(adjectives))
    return " ".join(words), score


def label_of(score: int) -> str:
    """Return the class of a review."""
    if score < 0:
        return "negative"
    if score == 0:
        return "mixed"
    return "positive"
