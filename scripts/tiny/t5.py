# SPDX-License-Identifier: Apache-2.0
"""A tiny T5, and English sentences with their translation into a made-up language."""

import random
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from tiny import output, tokenizers
from tiny.options import T5Options

ARTICLES = "the a this every".split()
ADJECTIVES = "small big red new quick quiet".split()
NOUNS = "dog cat horse ship child king river tree house bird".split()
VERBS = "sees finds likes follows draws hears".split()
CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"
FLAGS = """--per_device_train_batch_size 32 --learning_rate 2e-3 --warmup_steps 0.05 \\
    --max_target_length 16 --eval_on_start"""

Row = dict[str, str]


def make(folder: Path, options: T5Options) -> None:
    """Write the model and the sentences; print how to train on them unless quiet."""
    files = make_rows(options.num_train_rows, options.num_test_rows, options.seed)
    texts = []
    for row in files["train"]:
        texts += [row["source"], row["target"]]
    tokenizer = tokenizers.sentence_bpe(texts, options.vocab_size)
    model = make_model(tokenizer, options)
    with output.writing_to(folder):
        output.save_model(folder / "model", model, tokenizer, f"{len(tokenizer)} tokens")
        output.write_files(folder / "data", files)
    if not options.quiet:
        output.print_launch("t5", folder, FLAGS)


def make_model(
    tokenizer: PreTrainedTokenizerFast, options: T5Options
) -> T5ForConditionalGeneration:
    """Return a random T5, whose decoder starts with the padding token, as in every T5."""
    torch.manual_seed(options.seed)
    shared: dict[str, Any] = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "decoder_start_token_id": tokenizer.pad_token_id,
    }
    config = T5Config(
        vocab_size=options.vocab_size,
        d_model=options.hidden_size,
        d_ff=options.intermediate_size,
        d_kv=options.hidden_size // options.num_attention_heads,
        num_heads=options.num_attention_heads,
        num_layers=options.num_hidden_layers,
        num_decoder_layers=options.num_hidden_layers,
        dropout_rate=options.dropout,
        feed_forward_proj="gated-gelu",
        **shared,
    )
    model = T5ForConditionalGeneration(config)
    # With T5's own 0.1 or less all positions look alike, and a narrow model needs thousands of
    # steps to learn to distinguish them.
    for name, weight in model.named_parameters():
        if "relative_attention_bias" in name:
            torch.nn.init.normal_(weight, std=3.0)
    return model


def make_rows(num_train_rows: int, num_test_rows: int, seed: int) -> dict[str, list[Row]]:
    """Return the rows of the files train and test; no sentence is repeated."""
    rng = random.Random(seed)
    dictionary = make_dictionary(seed)
    row_of = {}
    while len(row_of) < num_train_rows + num_test_rows:
        row = make_row(rng, dictionary)
        row_of[row["source"]] = row
    rows = list(row_of.values())
    return {"train": rows[num_test_rows:], "test": rows[:num_test_rows]}


def make_dictionary(seed: int) -> dict[str, str]:
    """Return a made-up word of four letters for each English word, all different."""
    rng = random.Random(seed)
    dictionary: dict[str, str] = {}
    for word in [*ARTICLES, *ADJECTIVES, *NOUNS, *VERBS]:
        foreign = make_foreign_word(rng)
        while foreign in dictionary.values():
            foreign = make_foreign_word(rng)
        dictionary[word] = foreign
    return dictionary


def make_foreign_word(rng: random.Random) -> str:
    """Return a word such as keva or bipo."""
    letters = [rng.choice(group) for group in (CONSONANTS, VOWELS, CONSONANTS, VOWELS)]
    return "".join(letters)


def make_row(rng: random.Random, dictionary: dict[str, str]) -> Row:
    """Return a sentence of subject, verb and object, and its translation.

    The translation has subject, object and verb, and each noun stands before its adjective and its
    article.
    """
    verb = rng.choice(VERBS)
    subject, foreign_subject = make_phrase(rng)
    thing, foreign_thing = make_phrase(rng)
    source = [*subject, verb, *thing]
    target = [dictionary[word] for word in (*foreign_subject, *foreign_thing, verb)]
    return {"source": " ".join(source), "target": " ".join(target)}


def make_phrase(rng: random.Random) -> tuple[list[str], list[str]]:
    """Return a noun phrase of English words, in English order and in that of the language."""
    article = rng.choice(ARTICLES)
    noun = rng.choice(NOUNS)
    adjectives = rng.sample(ADJECTIVES, rng.randint(0, 1))
    return [article, *adjectives, noun], [noun, *adjectives, article]
