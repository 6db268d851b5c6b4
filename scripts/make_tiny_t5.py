#!/usr/bin/env python
"""Write a tiny random T5, its tokenizer and a small translation set, from nothing and offline.

OUTPUT_DIR/model is a random T5ForConditionalGeneration with a BPE tokenizer. OUTPUT_DIR/data holds train.jsonl and
test.jsonl, rows of {"source", "target"}: English sentences such as "the small dog sees a red ship" and what they are
in a made-up language, "nuka keva zovo rozi fida bipo pizu". Each word has its counterpart there, and the order
differs: adjectives follow their noun, articles come last, the verb ends the sentence. So a model has to translate and
to move words. No sentence of test.jsonl is in train.jsonl.

    python scripts/make_tiny_t5.py runs/tiny_t5

Exit codes: 0 done, 64 usage, 73 cannot write.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration
from transformers.utils import logging

PAD, EOS, UNK = SPECIAL_TOKENS = ["<pad>", "</s>", "<unk>"]
ARTICLES = "the a this every".split()
ADJECTIVES = "small big red new quick quiet".split()
NOUNS = "dog cat horse ship child king river tree house bird".split()
VERBS = "sees finds likes follows draws hears".split()
SMALLEST_VOCAB = 256  # letters, special tokens and room for every word of both languages


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
    parser.add_argument(
        "--num_hidden_layers", type=int, default=2, help="of the encoder, and of the decoder"
    )
    parser.add_argument("--num_attention_heads", type=int, default=8)
    parser.add_argument("--intermediate_size", type=int, default=256)
    parser.add_argument(
        "--vocab_size", type=int, default=320, help=f"rows of the embedding, >= {SMALLEST_VOCAB}"
    )
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument(
        "--untied", action="store_true", help="an output head of its own, as Flan-T5 has"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_train_rows", type=int, default=4000)
    parser.add_argument("--num_test_rows", type=int, default=200)
    return parser.parse_args()


def validate_args(args):
    """Report every problem of the command line at once."""
    sizes = [
        name
        for name, value in vars(args).items()
        if type(value) is int and name not in ("seed", "untied")
    ]
    problems = [f"--{name} must be at least 1" for name in sizes if getattr(args, name) < 1]
    if not problems and args.hidden_size % args.num_attention_heads:
        problems.append("--hidden_size must be a multiple of --num_attention_heads")
    if args.vocab_size < SMALLEST_VOCAB:
        problems.append(
            f"--vocab_size must be at least {SMALLEST_VOCAB} (letters, special tokens, words)"
        )
    if args.num_train_rows + args.num_test_rows > 200_000:  # of 470,400 sentences
        problems.append("--num_train_rows and --num_test_rows must be at most 200,000 together")
    if not 0 <= args.dropout < 1:
        problems.append("--dropout must be at least 0 and below 1")
    if problems:
        stop(64, "; ".join(problems))


def make_dictionary(seed):
    """Return {English word: its counterpart}, made-up words of four letters, all different."""
    rng, taken = random.Random(seed), {}
    for word in [*ARTICLES, *ADJECTIVES, *NOUNS, *VERBS]:
        while True:
            new = "".join(rng.choice(letters) for letters in ("bdfgklmnprstvz", "aeiou") * 2)
            if new not in taken.values():
                taken[word] = new
                break
    return taken


def make_row(rng, dictionary):
    """Return a sentence and its translation: subject, object, verb; each thing as noun, adjective, article."""
    verb, english, foreign = rng.choice(VERBS), [], []
    for _ in ("subject", "object"):
        article, noun = rng.choice(ARTICLES), rng.choice(NOUNS)
        adjectives = rng.sample(ADJECTIVES, rng.randint(0, 1))
        english.append([article, *adjectives, noun])
        foreign += [noun, *adjectives, article]
    source = [*english[0], verb, *english[1]]
    return {
        "source": " ".join(source),
        "target": " ".join(dictionary[word] for word in [*foreign, verb]),
    }


def make_rows(args):
    """Return training and test rows; no sentence comes twice."""
    rng, rows, dictionary = random.Random(args.seed), {}, make_dictionary(args.seed)
    while len(rows) < args.num_train_rows + args.num_test_rows:
        row = make_row(rng, dictionary)
        rows[row["source"]] = row
    rows = list(rows.values())
    return rows[args.num_test_rows :], rows[: args.num_test_rows]


def make_tokenizer(texts, args):
    """Return a BPE that knows the words of the texts and spells others; every text ends with </s>."""
    backend = Tokenizer(models.BPE(unk_token=UNK))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    letters = ["▁", *(chr(number) for number in range(33, 127))]
    trainer = trainers.BpeTrainer(
        vocab_size=args.vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=letters,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}",
        pair=f"$A {EOS} $B {EOS}",
        special_tokens=[(EOS, backend.token_to_id(EOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        model_input_names=["input_ids", "attention_mask"],
    )


def make_model(tokenizer, args):
    """Return a random T5 whose texts begin with the padding token, as those of every T5."""
    torch.manual_seed(args.seed)
    ids = {"pad_token_id": tokenizer.pad_token_id, "decoder_start_token_id": tokenizer.pad_token_id}
    config = T5Config(
        vocab_size=args.vocab_size,
        d_model=args.hidden_size,
        d_ff=args.intermediate_size,
        dropout_rate=args.dropout,
        d_kv=args.hidden_size // args.num_attention_heads,
        num_heads=args.num_attention_heads,
        num_layers=args.num_hidden_layers,
        num_decoder_layers=args.num_hidden_layers,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=not args.untied,
        eos_token_id=tokenizer.eos_token_id,
        **ids,
    )
    model = T5ForConditionalGeneration(config)
    # T5's own 0.1 or less lets all places look alike, and it takes thousands of steps until a narrow model parts them
    for name, weight in model.named_parameters():
        if "relative_attention_bias" in name:
            torch.nn.init.normal_(weight, std=3.0)
    return model


def main():
    args = parse_args()
    validate_args(args)
    logging.disable_progress_bar()
    model_dir, data_dir = args.output_dir / "model", args.output_dir / "data"
    train, test = make_rows(args)
    tokenizer = make_tokenizer([text for row in train for text in row.values()], args)
    model = make_model(tokenizer, args)
    try:
        for folder in (model_dir, data_dir):
            folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(model_dir)
        tokenizer.save_pretrained(model_dir)
        print(f"{model_dir}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")
        for name, rows in (("train", train), ("test", test)):
            path = data_dir / f"{name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            print(f"{path}: {len(rows)} rows")
    except (OSError, SafetensorError) as error:
        stop(73, f"cannot write to {args.output_dir}: {error}")
    print(f"""Train it with:
  accelerate launch --config_file accelerate_configs/single.yaml recipes/t5.py \\
    --model_name_or_path {model_dir} --dataset_name {data_dir}/train.jsonl --eval_dataset_name {data_dir}/test.jsonl \\
    --per_device_train_batch_size 32 --learning_rate 2e-3 --warmup_steps 0.05 --max_target_length 16 --eval_on_start \\
    --output_dir {args.output_dir}/run""")


if __name__ == "__main__":
    main()
