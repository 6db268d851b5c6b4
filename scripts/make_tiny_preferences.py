#!/usr/bin/env python
"""Write a tiny random Llama, its tokenizer and pairs of a right and a wrong answer, from nothing and offline.

OUTPUT_DIR/model is that of scripts/make_tiny_model.py. OUTPUT_DIR/data holds

    train.jsonl, test.jsonl   rows of {"prompt", "chosen", "rejected", "completion"}, all lists of messages; each skill
                              has one mistake: a word as it is instead of in capitals, the number before, not after
    demonstrations.jsonl      rows of {"prompt", "completion"}; every second completion is the mistake

A model that learned from the demonstrations errs by chance; preferences then teach it not to. What a prompt of
test.jsonl asks about stands in no other file; its completion is the chosen answer, for scripts/generate.py.

    python scripts/make_tiny_preferences.py runs/tiny_preferences

Exit codes: 0 done, 64 usage, 73 cannot write.
"""

import argparse
import itertools
import random
from pathlib import Path

import make_tiny_model
from make_tiny_model import NUMBERS, make_tokenizer, make_word, stop, write_rows
from safetensors import SafetensorError
from transformers.utils import logging

# skill: what it is about, the prompt, the right answer, the mistake
SKILLS = {
    "capitals": ("word", "Write {} in capitals.", str.upper, str),
    "spell": ("word", "Spell the word {}.", "-".join, " ".join),
    "last_letter": (
        "word",
        "What is the last letter of {}?",
        lambda word: word[-1],
        lambda word: word[0],
    ),
    "next_number": (
        "number",
        "What comes after {}?",
        lambda number: str(number + 1),
        lambda number: str(number - 1),
    ),
}
NUM_WORDS = 4000


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda message: stop(64, message)
    parser.add_argument(
        "output_dir", type=Path, help="OUTPUT_DIR/model and OUTPUT_DIR/data are written"
    )
    parser.add_argument("--hidden_size", type=int, default=128, help="a multiple of 64")
    parser.add_argument("--num_hidden_layers", type=int, default=2)
    parser.add_argument("--num_attention_heads", type=int, default=4)
    parser.add_argument(
        "--num_key_value_heads", type=int, help="default: as many as --num_attention_heads"
    )
    parser.add_argument("--intermediate_size", type=int, default=384, help="a multiple of 64")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_train_rows", type=int, default=4000)
    parser.add_argument("--num_test_rows", type=int, default=400, help="at most 800")
    parser.add_argument("--num_demonstrations", type=int, default=12000)
    fixed = {
        "text": None,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    parser.set_defaults(**fixed, num_local_experts=None, dtype="float32", device="cpu")
    args = parser.parse_args()
    args.num_key_value_heads = args.num_key_value_heads or args.num_attention_heads
    return args


def validate_args(args):
    """Report what the command line has of problems; those of the model's shape all at once."""
    if args.num_test_rows > 800:  # leaves most of the numbers to train on
        stop(64, "--num_test_rows must be at most 800")
    make_tiny_model.validate_args(args)


def make_pair(skill, items):
    """Return one row of a skill about the word or the number in `items`."""
    kind, prompt, right, wrong = SKILLS[skill]
    said = [{"role": "assistant", "content": answer(items[kind])} for answer in (right, wrong)]
    asked = [{"role": "user", "content": prompt.format(items[kind])}]
    return {
        "prompt": asked,
        "chosen": said[:1],
        "rejected": said[1:],
        "completion": said[:1],
        "skill": skill,
    }


def make_rows(args):
    """Return {file: its rows}; skills take turns, and no word or number of the test rows is in another file."""
    rng, words = random.Random(args.seed), {}
    while len(words) < NUM_WORDS:
        word = make_word(rng)
        words |= (
            {word: None} if word[0] != word[-1] else {}
        )  # else right and wrong are one; a dict keeps the order
    pools = {"word": list(words), "number": rng.sample(NUMBERS, len(NUMBERS))}

    def rows(count, pick):
        skills = itertools.islice(itertools.cycle(SKILLS), count)
        return [
            make_pair(skill, {kind: pick(pool) for kind, pool in pools.items()}) for skill in skills
        ]

    test = rows(args.num_test_rows, list.pop)
    train, demonstrations = (
        rows(args.num_train_rows, rng.choice),
        rows(args.num_demonstrations, rng.choice),
    )
    for i, row in enumerate(demonstrations):
        mistake = i // len(SKILLS) % 2
        row["completion"] = row.pop("rejected") if mistake else row["chosen"]
        demonstrations[i] = {name: row[name] for name in ("prompt", "completion", "skill")}
    return {"train": train, "test": test, "demonstrations": demonstrations}


def main():
    args = parse_args()
    validate_args(args)
    logging.disable_progress_bar()
    model_dir, data_dir = args.output_dir / "model", args.output_dir / "data"
    tokenizer = make_tokenizer([], args)
    model = make_tiny_model.make_model(tokenizer, args)
    try:
        for folder in (model_dir, data_dir):
            folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(model_dir)
        tokenizer.save_pretrained(model_dir)
        print(f"{model_dir}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")
        for name, rows in make_rows(args).items():
            write_rows(data_dir / f"{name}.jsonl", rows)
    except (OSError, SafetensorError) as error:
        stop(73, f"cannot write to {args.output_dir}: {error}")
    print(f"""Train it with:
  accelerate launch --config_file accelerate_configs/single.yaml recipes/llama.py \\
    --model_name_or_path {model_dir} --dataset_name {data_dir}/demonstrations.jsonl \\
    --per_device_train_batch_size 64 --learning_rate 3e-3 --warmup_steps 0.05 --output_dir {args.output_dir}/base
  accelerate launch --config_file accelerate_configs/single.yaml recipes/llama_dpo.py \\
    --model_name_or_path {args.output_dir}/base --dataset_name {data_dir}/train.jsonl \\
    --eval_dataset_name {data_dir}/test.jsonl --per_device_train_batch_size 32 --num_train_epochs 1 \\
    --learning_rate 1e-4 --beta 1 --output_dir {args.output_dir}/run""")


if __name__ == "__main__":
    main()
