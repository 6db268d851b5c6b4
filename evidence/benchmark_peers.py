# SPDX-License-Identifier: Apache-2.0
"""The other contestants of evidence/benchmark.py, each in its own process.

    python evidence/benchmark_peers.py floor --model_name_or_path M --data D --output_dir O
    python evidence/benchmark_peers.py lean --model_name_or_path M --data D --output_dir O
    python evidence/benchmark_peers.py trainer --model_name_or_path M --data D --output_dir O
    python evidence/benchmark_peers.py trl --packing --model_name_or_path M --data D --output_dir O

The flags are those of recipes/llama.py, with the same meaning. D is a folder that
evidence/benchmark.py prepares: rows.jsonl (text), tokens.jsonl (the recipe's input_ids and labels),
padded.pt (the recipe's batches in its order, with a padding mask, as most loops have them) and
own.pt (the same batches as the recipe's own tensors).

There are two bare loops, which read batches that were prepared in advance and do nothing but
compute. `floor` is the usual one: it reads padded.pt and computes the logits of all tokens. `lean`
reads own.pt and computes the logits of supervised tokens only, like the recipe. With --matched,
Trainer and SFTTrainer are configured to do what the floor does; without it they keep their own
defaults, except for the precision, which is fp32, or autocast with --mixed_precision bf16.

Each writes O/metrics.jsonl as the recipe does (step, loss where it was logged, and
num_input_tokens_seen, without padding) and the model.
"""

import argparse
from pathlib import Path

import rooms  # noqa: F401  before what it makes importable
from bench.bare_loops import run_floor, run_lean
from bench.trainers import run_trainer, run_trl
from exits import run_command
from usage import Parser

CONTESTANTS = {"floor": run_floor, "lean": run_lean, "trainer": run_trainer, "trl": run_trl}


def add_files(parser: argparse.ArgumentParser) -> None:
    """Add the files that are read and written, and whether a tool keeps its own defaults."""
    parser.add_argument("--model_name_or_path", required=True, help="folder of the model")
    parser.add_argument("--data", type=Path, required=True, help="folder of the prepared rows")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the result")
    parser.add_argument(
        "--matched", action="store_true", help="use the settings of the floor, not the tool's"
    )
    parser.add_argument("--text", action="store_true", help="tokenize rows.jsonl itself")
    parser.add_argument("--skip_save", action="store_true", help="write no weights at the end")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the precision of the model, its quantization, attention and adapters."""
    parser.add_argument("--dtype", default="float32", help="type of the weights")
    parser.add_argument(
        "--mixed_precision", default="no", choices=["no", "bf16"], help="bf16: autocast"
    )
    parser.add_argument(
        "--no_master_weights", action="store_true", help="a flag of the recipe; has no effect here"
    )
    parser.add_argument("--load_in_4bit", action="store_true")
    parser.add_argument("--bnb_4bit_use_double_quant", action="store_true")
    parser.add_argument("--attn_implementation", default="sdpa")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--use_peft", action="store_true")
    parser.add_argument("--lora_r", type=int, default=16)
    parser.add_argument("--lora_alpha", type=float, default=32)


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add the batches, the optimizer and the length of the run."""
    parser.add_argument("--packing", action="store_true", help="lines of --max_length (trl)")
    parser.add_argument("--max_length", type=int, default=1024)
    parser.add_argument("--train_sampling_strategy", default="sequential")
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--num_train_epochs", type=float, default=1.0)
    parser.add_argument("--max_steps", type=int, default=-1)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--lr_scheduler_type", default="linear", choices=["linear"])
    parser.add_argument("--weight_decay", type=float, default=0.0)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--logging_steps", type=int, default=1)


def parse_args() -> tuple[Parser, argparse.Namespace]:
    """Return the parser and the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestant", choices=CONTESTANTS)
    add_files(parser)
    add_model(parser)
    add_training(parser)
    return parser, parser.parse_args()


def main() -> None:
    """Train as one contestant."""
    parser, args = parse_args()
    if not (args.data / "tokens.jsonl").is_file():
        parser.error(f"--data {args.data}: has no tokens.jsonl; evidence/benchmark.py writes it")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    CONTESTANTS[args.contestant](args)


if __name__ == "__main__":
    run_command(main)
