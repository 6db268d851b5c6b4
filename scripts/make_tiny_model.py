#!/usr/bin/env python
"""Write a tiny random Llama, or Mixtral, its tokenizer and a small instruction set, from nothing and offline.

OUTPUT_DIR/model is a random LlamaForCausalLM, with --num_local_experts a MixtralForCausalLM whose tokens take two of
so many experts each, with a tokenizer and a chat template. OUTPUT_DIR/data holds train.jsonl
and test.jsonl, rows of {"prompt", "completion", "skill"}. The skills work on made-up words and on numbers, and the
split is by word and by number: what a test prompt asks about stands in no training prompt of any skill, so a model
that does well on test.jsonl has learned the skills and not the rows.

    python scripts/make_tiny_model.py runs/tiny
    python scripts/make_tiny_model.py runs/tiny_mixtral --num_local_experts 4 --intermediate_size 192

With --text only the model is written, and its tokenizer is a BPE of --vocab_size trained on every string in a file:

    python scripts/make_tiny_model.py runs/gsm8k --text train.jsonl --vocab_size 4096 --hidden_size 384 \
        --num_hidden_layers 6 --num_attention_heads 6 --intermediate_size 1024 --max_position_embeddings 1024

Exit codes: 0 done, 64 usage, 65 data, 73 cannot write.
"""

import argparse
import itertools
import json
import random
import sys
from collections import Counter
from pathlib import Path

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

PAD, BOS, EOS, END_OF_TURN = "<|pad|>", "<|begin_of_text|>", "<|end_of_text|>", "<|end_of_turn|>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
SPECIAL_TOKENS = [PAD, BOS, EOS, END_OF_TURN, *ROLES]
SMALLEST_VOCAB = 256 + len(SPECIAL_TOKENS)  # one token per byte, so that every text can be encoded

# One role token, the text, one end-of-turn token; `generation` marks what the assistant says.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end_of_turn|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end_of_turn|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# skill: what it is about, the prompt, the answer
SKILLS = {
    "spell": ("word", "Spell the word {}.", "-".join),
    "capitals": ("word", "Write {} in capitals.", str.upper),
    "backwards": ("word", "Write {} backwards.", lambda word: word[::-1]),
    "repeat": ("word", "Say {} twice.", lambda word: f"{word} {word}"),
    "last_letter": ("word", "What is the last letter of {}?", lambda word: word[-1]),
    "count": ("word", "How many letters are in {}?", lambda word: str(len(word))),
    "next_number": ("number", "What comes after {}?", lambda number: str(int(number) + 1)),
}
NUMBERS = range(1, 1000)
MOST_TEST_ROWS = len(SKILLS) * (
    len(NUMBERS) // 4
)  # leaves three quarters of the numbers to train on

NUM_WORDS = 8000
ONSETS = "b c d f g h j k l m n p qu r s t v w y z bl br ch cl dr fl fr gr pl sh st th tr".split()
VOWELS = "a e i o u".split()
CODAS = "b ck d f g k l ll lk lp m mp n nd nt p r rk rm s sh st t w x z".split()


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
        "--text", type=Path, help=".txt or .jsonl file to train the tokenizer on; writes no data"
    )
    parser.add_argument("--hidden_size", type=int, default=128, help="a multiple of 64")
    parser.add_argument("--num_hidden_layers", type=int, default=2)
    parser.add_argument("--num_attention_heads", type=int, default=4)
    parser.add_argument(
        "--num_key_value_heads", type=int, help="default: as many as --num_attention_heads"
    )
    parser.add_argument(
        "--intermediate_size", type=int, default=384, help="a multiple of 64; of each expert"
    )
    parser.add_argument(
        "--num_local_experts", type=int, help="makes a Mixtral with so many experts in each layer"
    )
    parser.add_argument(
        "--vocab_size", type=int, default=320, help=f"rows of the embedding, >= {SMALLEST_VOCAB}"
    )
    parser.add_argument(
        "--max_position_embeddings", type=int, default=512, help="longest sequence, in tokens"
    )
    parser.add_argument(
        "--tie_word_embeddings", action="store_true", help="one matrix for embedding and output"
    )
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="of the weights"
    )
    parser.add_argument(
        "--device", default="cpu", choices=["cpu", "cuda"], help="where the weights are drawn"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_train_rows", type=int, default=18200)
    parser.add_argument("--num_test_rows", type=int, default=700, help=f"at most {MOST_TEST_ROWS}")
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
        widths["--num_key_value_heads x head size"] = args.num_key_value_heads * head_size
        problems += [
            f"{name} must be a multiple of 64, not {width}"
            for name, width in widths.items()
            if width % 64
        ]
        if args.num_local_experts == 1:
            problems.append("--num_local_experts must be at least 2: a token takes two of them")
        if args.vocab_size < SMALLEST_VOCAB:
            problems.append(
                f"--vocab_size must be at least {SMALLEST_VOCAB} (256 bytes and the special tokens)"
            )
        if args.num_test_rows > MOST_TEST_ROWS:
            problems.append(f"--num_test_rows must be at most {MOST_TEST_ROWS}")
    if args.text and args.text.suffix not in (".txt", ".jsonl"):
        problems.append(f"--text must be a .txt or .jsonl file, not {args.text}")
    if problems:
        stop(64, "; ".join(problems))


def strings_in(value):
    """Return every string inside a JSON value."""
    if isinstance(value, str):
        return [value]
    items = (
        list(value.values())
        if isinstance(value, dict)
        else value
        if isinstance(value, list)
        else []
    )
    return [string for item in items for string in strings_in(item)]


def read_text(path):
    """Return the strings of a .txt (its lines) or .jsonl file."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        stop(65, f"cannot read {path}: {error}")
    texts = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                texts += strings_in(line if path.suffix == ".txt" else json.loads(line))
        except json.JSONDecodeError as error:
            stop(65, f"{path}, line {number}: not JSON: {error.msg} at column {error.colno}")
    return texts or stop(65, f"{path}: holds no text")


def make_word(rng):
    """Return a made-up word of 3 to 6 letters, such as lamp, toble or frimas."""
    first, second = (rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(2))
    coda = rng.choice(CODAS)
    word = rng.choice([first + coda, first + second, first + second + coda])
    return word if len(word) <= 6 and "uu" not in word else make_word(rng)


def make_row(skill, pick):
    """Return one row of a skill; `pick` gives a word or a number when asked for either."""
    kind, prompt, answer = SKILLS[skill]
    item = str(pick(kind))
    return {"prompt": prompt.format(item), "completion": answer(item), "skill": skill}


def make_rows(args):
    """Return training and test rows; skills take turns, and no word or number is in both sets."""
    rng = random.Random(args.seed)
    words = {}  # a dict keeps the order, a set does not
    while len(words) < NUM_WORDS:
        words[make_word(rng)] = None
    pools = {"word": list(words), "number": rng.sample(NUMBERS, len(NUMBERS))}
    test = []
    while (
        len(test) < args.num_test_rows
    ):  # all skills with one word and one number, which leave the pools
        held_out = {kind: pool.pop() for kind, pool in pools.items()}
        test += [make_row(skill, held_out.get) for skill in SKILLS]
    skills = itertools.islice(itertools.cycle(SKILLS), args.num_train_rows)
    train = [make_row(skill, lambda kind: rng.choice(pools[kind])) for skill in skills]
    return train, test[: args.num_test_rows]


def make_tokenizer(texts, args):
    """Return a byte-level BPE; without texts it has no merges, so a token is a letter. Digits are never merged."""
    backend = Tokenizer(models.BPE())
    digits, byte_level = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(False),
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=args.vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=[END_OF_TURN, *ROLES],
        chat_template=CHAT_TEMPLATE,
        model_max_length=args.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer, args):
    """Return a random Llama, or Mixtral, whose generation ends at the end of a turn."""
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
    names += ["intermediate_size", "max_position_embeddings", "tie_word_embeddings"]
    # The default of 0.02 suits widths in the thousands; a narrow model learns much faster from larger weights.
    initializer_range = 0.7 * args.hidden_size**-0.5
    kind = LlamaConfig
    if args.num_local_experts:
        kind, names = MixtralConfig, [*names, "num_local_experts"]
    shape = {name: getattr(args, name) for name in names}
    config = kind(initializer_range=initializer_range, **shape, **special)
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=args.dtype)
    special["eos_token_id"] = [tokenizer.convert_tokens_to_ids(END_OF_TURN), tokenizer.eos_token_id]
    model.generation_config = GenerationConfig(**special)
    return model


def write_rows(path, rows):
    """Write one JSON object a line and print how many there are of each skill."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    skills = Counter(row["skill"] for row in rows)
    print(
        f"{path}: {len(rows)} rows ("
        + ", ".join(f"{skill} {n}" for skill, n in skills.items())
        + ")"
    )


def main():
    args = parse_args()
    validate_args(args)
    logging.disable_progress_bar()
    model_dir, data_dir = args.output_dir / "model", args.output_dir / "data"
    tokenizer = make_tokenizer(read_text(args.text) if args.text else [], args)
    model = make_model(tokenizer, args)
    try:
        model_dir.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(model_dir)
        tokenizer.save_pretrained(model_dir)
        print(f"{model_dir}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")
        if not args.text:
            data_dir.mkdir(exist_ok=True)
            for name, rows in zip(("train", "test"), make_rows(args), strict=True):
                write_rows(data_dir / f"{name}.jsonl", rows)
    except (OSError, SafetensorError) as error:
        stop(73, f"cannot write to {args.output_dir}: {error}")
    train_file, more = args.text or data_dir / "train.jsonl", ""
    if not args.text:  # rates that take the built-in set to 97 % or more
        more = (
            f"--eval_dataset_name {data_dir}/test.jsonl \\\n    --per_device_train_batch_size 64 "
        )
        more += "--learning_rate 2e-3 --warmup_steps 0.05 "
    recipe = "recipes/mixtral.py" if args.num_local_experts else "recipes/llama.py"
    print(f"""Train it with:
  accelerate launch --config_file accelerate_configs/single.yaml {recipe} \\
    --model_name_or_path {model_dir} --dataset_name {train_file} {more}--output_dir {args.output_dir}/run""")


if __name__ == "__main__":
    main()
