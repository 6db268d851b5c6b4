#!/usr/bin/env python
"""Write a tiny random Mistral with a sliding window, its tokenizer and some texts, from nothing and offline.

OUTPUT_DIR/model is a random MistralForCausalLM whose window is shorter than a block of text. OUTPUT_DIR/data holds
train.jsonl and test.jsonl, rows of {"text"}, and with --txt a folder of train*.txt and test*.txt as well. A text is
some sentences about a person with a made-up name: "Toble is a baker in Frim. Every morning Toble goes to the mill and
buys flour." What a baker buys, makes and dreams of is always the same, who it is and where changes, so a model has
facts to learn and names to look up. The people of test.jsonl are in no training text.

    python scripts/make_tiny_text.py runs/tiny_text

Exit codes: 0 done, 64 usage, 73 cannot write.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from make_tiny_model import SMALLEST_VOCAB, make_tokenizer, make_word, stop
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, MistralConfig
from transformers.utils import logging

# trade: where it buys, what it buys, what it makes, what it dreams of
TRADES = {
    "baker": ("mill", "flour", "bread", "a bigger oven"),
    "smith": ("mine", "iron", "nails", "a golden hammer"),
    "weaver": ("farm", "wool", "blankets", "a silver loom"),
    "potter": ("river", "clay", "bowls", "a warmer kiln"),
    "painter": ("market", "colours", "pictures", "a house by the sea"),
    "carpenter": ("forest", "wood", "tables", "a sharper saw"),
    "cook": ("garden", "onions", "soup", "a copper kettle"),
    "tailor": ("harbour", "silk", "coats", "a visit of the queen"),
}
SENTENCES = [
    "Every morning {name} goes to the {place} and buys {goods}.",
    "In the afternoon {name} makes {ware} of the {goods}.",
    "In the evening {name} sells {ware} to the people of {town}.",
    "At night {name} dreams of {dream}.",
    "Everybody in {town} likes the {ware} of {name}.",
    "Without {goods} there is no work for a {trade}.",
]


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda message: stop(64, message)
    parser.add_argument(
        "output_dir", type=Path, help="OUTPUT_DIR/model and OUTPUT_DIR/data are written"
    )
    parser.add_argument(
        "--txt", action="store_true", help="write each text to a file of its own too, in data/txt"
    )
    parser.add_argument("--hidden_size", type=int, default=128, help="a multiple of 64")
    parser.add_argument("--num_hidden_layers", type=int, default=2)
    parser.add_argument("--num_attention_heads", type=int, default=4)
    parser.add_argument(
        "--num_key_value_heads", type=int, help="default: as many as --num_attention_heads"
    )
    parser.add_argument("--intermediate_size", type=int, default=384, help="a multiple of 64")
    parser.add_argument(
        "--vocab_size", type=int, default=512, help=f"rows of the embedding, >= {SMALLEST_VOCAB}"
    )
    parser.add_argument(
        "--max_position_embeddings", type=int, default=512, help="longest sequence, in tokens"
    )
    parser.add_argument(
        "--sliding_window", type=int, default=48, help="tokens that a token sees, itself included"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_train_rows", type=int, default=6000)
    parser.add_argument("--num_test_rows", type=int, default=200)
    args = parser.parse_args()
    if args.num_key_value_heads is None:
        args.num_key_value_heads = args.num_attention_heads
    return args


def validate_args(args):
    """Report every problem of the command line at once."""
    sizes = [name for name, value in vars(args).items() if type(value) is int and name != "seed"]
    problems = [f"--{name} must be at least 1" for name in sizes if getattr(args, name) < 1]
    if not problems:
        head_size, rest = divmod(args.hidden_size, args.num_attention_heads)
        if rest or head_size % 2:
            problems.append("--hidden_size / --num_attention_heads must be a whole, even number")
        if args.num_attention_heads % args.num_key_value_heads:
            problems.append("--num_attention_heads must be a multiple of --num_key_value_heads")
        # 4-bit quantization works on blocks of 64 weights.
        widths = {"--hidden_size": args.hidden_size, "--intermediate_size": args.intermediate_size}
        problems += [
            f"{name} must be a multiple of 64, not {width}"
            for name, width in widths.items()
            if width % 64
        ]
        if args.vocab_size < SMALLEST_VOCAB:
            problems.append(
                f"--vocab_size must be at least {SMALLEST_VOCAB} (256 bytes and the special tokens)"
            )
    if problems:
        stop(64, "; ".join(problems))


def make_text(name, rng):
    """Return three to seven sentences about a person, the first one of which says who it is."""
    trade = rng.choice(list(TRADES))
    place, goods, ware, dream = TRADES[trade]
    facts = {
        "name": name,
        "trade": trade,
        "place": place,
        "goods": goods,
        "ware": ware,
        "dream": dream,
    }
    facts["town"] = make_word(rng).capitalize()
    chosen = sorted(rng.sample(range(len(SENTENCES)), rng.randint(2, len(SENTENCES))))
    story = [
        f"{name} is a {trade} in {facts['town']}.",
        *(SENTENCES[i].format(**facts) for i in chosen),
    ]
    return " ".join(story)


def make_rows(args):
    """Return training and test rows. No name comes twice, so the two have no person in common."""
    rng, names = random.Random(args.seed), {}  # a dict keeps the order, a set does not
    while len(names) < args.num_train_rows + args.num_test_rows:
        name = make_word(rng)
        names[(name if name not in names else f"{name} {make_word(rng)}").title()] = None
    rows = [{"text": make_text(name, rng)} for name in names]
    rng.shuffle(rows)
    return rows[args.num_test_rows :], rows[: args.num_test_rows]


def make_model(tokenizer, args):
    """Return a random Mistral."""
    torch.manual_seed(args.seed)
    special = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    names = [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ]
    names += ["intermediate_size", "max_position_embeddings", "sliding_window"]
    # The default of 0.02 suits widths in the thousands; a narrow model learns much faster from larger weights.
    initializer_range = 0.7 * args.hidden_size**-0.5
    shape = {name: getattr(args, name) for name in names}
    return AutoModelForCausalLM.from_config(
        MistralConfig(initializer_range=initializer_range, **shape, **special)
    )


def main():
    args = parse_args()
    validate_args(args)
    logging.disable_progress_bar()
    model_dir, data_dir = args.output_dir / "model", args.output_dir / "data"
    train, test = make_rows(args)
    tokenizer = make_tokenizer([row["text"] for row in train], args)
    tokenizer.chat_template = None  # it reads text, not conversations
    model = make_model(tokenizer, args)
    try:
        for folder in (model_dir, data_dir / "txt" if args.txt else data_dir):
            folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(model_dir)
        tokenizer.save_pretrained(model_dir)
        print(
            f"{model_dir}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens, a window of "
            f"{args.sliding_window}"
        )
        for name, rows in (("train", train), ("test", test)):
            path = data_dir / f"{name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            tokens = sum(len(tokenizer(row["text"])["input_ids"]) + 1 for row in rows)
            print(
                f"{path}: {len(rows)} texts, {tokens:,} tokens, an end of sequence behind each included"
            )
            for i, row in enumerate(rows if args.txt else []):
                (data_dir / "txt" / f"{name}{i:05}.txt").write_text(
                    row["text"] + "\n", encoding="utf-8"
                )
    except (OSError, SafetensorError) as error:
        stop(73, f"cannot write to {args.output_dir}: {error}")
    print(f"""Train it with:
  accelerate launch --config_file accelerate_configs/single.yaml recipes/mistral_pretrain.py \\
    --model_name_or_path {model_dir} --dataset_name {data_dir}/train.jsonl --eval_dataset_name {data_dir}/test.jsonl \\
    --max_length 128 --num_train_epochs 2 --learning_rate 3e-3 --warmup_steps 0.05 \\
    --output_dir {args.output_dir}/run""")


if __name__ == "__main__":
    main()
