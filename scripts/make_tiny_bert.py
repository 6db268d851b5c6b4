#!/usr/bin/env python
"""Write a tiny random BERT, its tokenizer and a small set of labelled texts, from nothing and offline.

OUTPUT_DIR/model is a random BertModel with a WordPiece tokenizer. OUTPUT_DIR/data holds train.jsonl and test.jsonl,
rows of {"text", "label", "stars"}: made-up reviews such as "the soup was not very good but the waiter was kind", whose
label (negative, mixed or positive, a class) and stars (a number) follow from their words. "not" turns the word behind
it round and "very" doubles it, so a model has to read words together. No text of test.jsonl is in train.jsonl.

    python scripts/make_tiny_bert.py runs/tiny_bert

Exit codes: 0 done, 64 usage, 73 cannot write.
"""

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path

import torch
from safetensors import SafetensorError
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
from transformers.utils import logging

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
THINGS = "soup bread cake fish tea salad waiter room garden table music window price kitchen view chair".split()
GOOD = "good kind warm fresh clean lovely fine bright tasty quick".split()
BAD = "bad rude cold stale dirty ugly poor dark bland slow".split()
LABELS = ("negative", "mixed", "positive")


def stop(code, message):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda message: stop(64, message)
    parser.add_argument(
        "output_dir", type=Path, help="OUTPUT_DIR/model and OUTPUT_DIR/data are written"
    )
    parser.add_argument(
        "--hidden_size", type=int, default=128, help="a multiple of --num_attention_heads"
    )
    parser.add_argument("--num_hidden_layers", type=int, default=2)
    parser.add_argument("--num_attention_heads", type=int, default=4)
    parser.add_argument("--intermediate_size", type=int, default=256)
    parser.add_argument(
        "--vocab_size", type=int, default=320, help="rows of the embedding, at least 160"
    )
    parser.add_argument(
        "--max_position_embeddings", type=int, default=128, help="longest sequence, in tokens"
    )
    parser.add_argument("--dropout", type=float, default=0.0, help="of hidden states and attention")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_train_rows", type=int, default=6000)
    parser.add_argument("--num_test_rows", type=int, default=501)
    return parser.parse_args()


def validate_args(args):
    """Report every problem of the command line at once."""
    sizes = [name for name, value in vars(args).items() if type(value) is int and name != "seed"]
    problems = [f"--{name} must be at least 1" for name in sizes if getattr(args, name) < 1]
    if not problems and args.hidden_size % args.num_attention_heads:
        problems.append("--hidden_size must be a multiple of --num_attention_heads")
    if args.vocab_size < 160:
        problems.append(
            "--vocab_size must be at least 160 (words of the reviews, letters, special tokens)"
        )
    if not 0 <= args.dropout < 1:
        problems.append("--dropout must be at least 0 and below 1")
    if problems:
        stop(64, "; ".join(problems))


def make_row(rng):
    """Return one review of one to three clauses. The sum of their scores, each from -2 to 2, gives label and stars."""
    clauses, score = [], 0
    for thing in rng.sample(THINGS, rng.randint(1, 3)):
        sign, words = rng.choice([(1, GOOD), (-1, BAD)])
        negated, doubled = rng.random() < 0.3, rng.random() < 0.3
        clauses.append(f"the {thing} was {'not ' * negated}{'very ' * doubled}{rng.choice(words)}")
        score += sign * (-1 if negated else 1) * (2 if doubled else 1)
    label = LABELS[(score >= 0) + (score > 0)]
    return {"text": " and ".join(clauses), "label": label, "stars": 3.0 + score / 4}


def make_rows(args):
    """Return training and test rows; no text comes twice."""
    rng, rows = random.Random(args.seed), {}
    while len(rows) < args.num_train_rows + args.num_test_rows:
        row = make_row(rng)
        rows.setdefault(row["text"], row)
    rows = list(rows.values())
    rng.shuffle(rows)  # short texts are soon all there, and would come first
    return rows[args.num_test_rows :], rows[: args.num_test_rows]


def make_tokenizer(texts, args):
    """Return a WordPiece tokenizer that knows the words of the texts, and any other by its letters."""
    backend = Tokenizer(models.WordPiece(unk_token=UNK))
    backend.normalizer, backend.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    backend.decoder = decoders.WordPiece()
    letters = [chr(number) for number in range(33, 127)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=args.vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=letters,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    ends = [(token, backend.token_to_id(token)) for token in (CLS, SEP)]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}", pair=f"{CLS} $A {SEP} $B:1 {SEP}:1", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=UNK,
        cls_token=CLS,
        sep_token=SEP,
        pad_token=PAD,
        mask_token=MASK,
        model_max_length=args.max_position_embeddings,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def make_model(tokenizer, args):
    """Return a random BERT with its pooler and without a head."""
    torch.manual_seed(args.seed)
    names = [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
    ]
    # The default of 0.02 suits widths in the hundreds; a narrow model learns much faster from larger weights
    config = BertConfig(
        initializer_range=0.7 * args.hidden_size**-0.5,
        pad_token_id=tokenizer.pad_token_id,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.dropout,
        **{name: getattr(args, name) for name in names},
    )
    return BertModel(config)


def main():
    args = parse_args()
    validate_args(args)
    logging.disable_progress_bar()
    model_dir, data_dir = args.output_dir / "model", args.output_dir / "data"
    train, test = make_rows(args)
    tokenizer = make_tokenizer([row["text"] for row in train], args)
    model = make_model(tokenizer, args)
    try:
        for folder in (model_dir, data_dir):
            folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(model_dir)
        tokenizer.save_pretrained(model_dir)
        print(f"{model_dir}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")
        for name, rows in (("train", train), ("test", test)):
            path, found = data_dir / f"{name}.jsonl", Counter(row["label"] for row in rows)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            print(
                f"{path}: {len(rows)} rows ("
                + ", ".join(f"{label} {found[label]}" for label in LABELS)
                + ")"
            )
    except (OSError, SafetensorError) as error:
        stop(73, f"cannot write to {args.output_dir}: {error}")
    print(f"""Train it with:
  accelerate launch --config_file accelerate_configs/single.yaml recipes/bert.py \\
    --model_name_or_path {model_dir} --dataset_name {data_dir}/train.jsonl --eval_dataset_name {data_dir}/test.jsonl \\
    --per_device_train_batch_size 32 --learning_rate 1e-3 --warmup_steps 0.05 --output_dir {args.output_dir}/run""")


if __name__ == "__main__":
    main()
