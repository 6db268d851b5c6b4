"""How far the planner is off: its peaks against those of torch's MemTracker on real CPU tensors.

    python scripts/validate_planner.py --json results/planner.json
    python scripts/readme_tables.py

Each cell runs two optimizer steps of a random model with the recipe's own loss and optimizer, in fp32 and one
process, and tracks the second. The first cells change one thing at a time; the next are drawn at random from --seed,
so that nobody chose them. Nothing in the planner is fitted to any of them. The last compare its two ways with each
other on the shapes of Llama with 1, 8 and 70 billion parameters, which no CPU could run. About ten minutes.
"""

import argparse
import json
import random
import sys
from pathlib import Path

from usage import Parser

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "recipes"))
METHODS = ("closed form", "traced")
BASE = {
    "width": 256,
    "ratio": 3.0,
    "depth": 4,
    "heads": 8,
    "kv_heads": 4,
    "vocab": 8000,
    "lines": 2,
    "length": 512,
    "family": "llama",
}
ONE_THING = [
    {},
    {"width": 512},
    {"width": 1024, "depth": 2},
    {"depth": 12},
    {"vocab": 64000},
    {"length": 2048, "lines": 1},
    {"length": 4096, "lines": 1},
    {"kv_heads": 8},
    {"ratio": 1.5},
    {"tied": True},
    {"learnt": 0.1},
    {"flags": ["--gradient_checkpointing"]},
    {"flags": ["--gradient_checkpointing"], "length": 4096, "lines": 1},
    {"flags": ["--attn_implementation", "eager"]},
    {"flags": ["--attn_implementation", "eager", "--gradient_checkpointing"], "length": 1024},
    {"flags": ["--packing"]},
    {"flags": ["--packing"], "length": 4096, "lines": 1},
    {"flags": ["--use_peft"]},
    {"flags": ["--use_peft", "--gradient_checkpointing", "--lora_dropout", "0.1"]},
    {"flags": ["--max_logits_mib", "4"]},
    {"flags": ["--gradient_accumulation_steps", "2"]},
    {"flags": ["--optim", "adamw_torch"]},
    {"family": "qwen3"},
    {"family": "qwen2"},
    {"family": "mistral"},
    {"family": "gemma"},
]

LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8}
SHAPES = {
    "1B": LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "8B": LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "70B": LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
BF16, CHECKPOINTED = {"mixed_precision": "bf16"}, ["--gradient_checkpointing"]
LORA = ["--use_peft", "--dtype", "bfloat16"]
LARGE = [
    ("1B", [], BF16),
    ("1B", ["--dtype", "bfloat16", *CHECKPOINTED], {}),
    ("8B", [], BF16 | {"engine": "fsdp2", "ranks": 8, "shards": 8}),
    ("8B", CHECKPOINTED, BF16 | {"engine": "fsdp2", "ranks": 8, "shards": 8}),
    ("8B", LORA, BF16),
    ("8B", [*LORA, "--load_in_4bit", *CHECKPOINTED], BF16),
    ("70B", CHECKPOINTED, BF16 | {"engine": "fsdp2", "ranks": 64, "shards": 64}),
    ("70B", CHECKPOINTED, BF16 | {"engine": "fsdp2", "ranks": 1024, "shards": 1024}),
    (
        "70B",
        [*LORA, "--load_in_4bit", *CHECKPOINTED],
        BF16 | {"engine": "fsdp2", "ranks": 8, "shards": 8},
    ),
]


def drawn(number, seed):
    """Cells of which each thing is drawn at random."""
    draw = random.Random(seed)
    for _ in range(number):
        heads, length = draw.choice([4, 8]), draw.choice([64, 192, 384, 768, 1536, 3072])
        flags = ["--gradient_checkpointing"] * draw.choice([0, 1]) + ["--use_peft"] * draw.choice(
            [0, 0, 1]
        )
        flags += draw.choice(
            [[], [], ["--attn_implementation", "eager"] if length < 1000 else [], ["--packing"]]
        )
        yield {
            "width": 64 * draw.randint(2, 12),
            "ratio": draw.choice([2.0, 2.75, 4.0]),
            "depth": draw.randint(1, 10),
            "heads": heads,
            "kv_heads": draw.choice([heads, heads // 2, 1]),
            "vocab": draw.choice([500, 4000, 16000, 50000]),
            "lines": max(1, draw.choice([1, 2, 4]) if length < 1000 else 1),
            "length": length,
            "tied": draw.choice([False, True]),
            "learnt": draw.choice([0.2, 0.5, 1.0]),
            "flags": flags,
            "family": draw.choice(["llama", "llama", "qwen2", "qwen3", "mistral"]),
        }


def config_of(cell):
    from transformers import AutoConfig

    width = cell["width"]
    return AutoConfig.for_model(
        cell["family"],
        hidden_size=width,
        intermediate_size=int(width * cell["ratio"]),
        num_hidden_layers=cell["depth"],
        num_attention_heads=cell["heads"],
        num_key_value_heads=cell["kv_heads"],
        head_dim=width // cell["heads"],
        vocab_size=cell["vocab"],
        tie_word_embeddings=cell.get("tied", False),
        pad_token_id=0,
        max_position_embeddings=8192,
    )


def recipe_arguments(flags):
    import llama

    sys.argv = [
        "llama.py",
        "--eval_strategy",
        "no",
        *flags,
    ]  # it is steps of training that are measured
    return llama.parse_args()


def run(cell, traces=False):
    """Return the cell with its measured and planned peaks, in bytes, and the relative errors."""
    from memory_plan import Batch, Plan, closed_form
    from memory_trace import measure, simulate

    args, config = recipe_arguments(cell.get("flags", [])), config_of(cell)
    tokens = cell["lines"] * cell["length"]
    batch = Batch(
        cell["lines"], cell["length"], max(int(tokens * cell.get("learnt", 1.0)), 1), args.packing
    )
    measured = sum(measure(Plan(args), config, batch).values())
    found = {"closed form": sum(closed_form(Plan(args), config, batch)[0].values())}
    if traces:
        found["traced"] = sum(simulate(Plan(args), config, batch).values())
    return (
        cell | {"measured": measured} | {name: size / measured - 1 for name, size in found.items()}
    )


def run_shape(name, flags, how):
    """Return the closed form's relative error against the trace, on a shape that nothing here could run."""
    from transformers import AutoConfig

    from memory_plan import Batch, Plan, closed_form
    from memory_trace import simulate

    args, config = (
        recipe_arguments([*flags, "--max_length", "4096"]),
        AutoConfig.for_model("llama", **SHAPES[name]),
    )
    plan, batch = Plan(args, **how), Batch(1, 4096, 4096)
    traced = sum(simulate(plan, config, batch).values())
    row = {"model": name, "flags": flags, **how, "traced bytes": traced}
    return row | {"closed form": sum(closed_form(plan, config, batch)[0].values()) / traced - 1}


def summary(rows, method):
    """(number of cells, mean of the absolute errors, the worst above, the worst below) of one of METHODS."""
    errors = [row[method] for row in rows if method in row]
    return len(errors), sum(map(abs, errors)) / len(errors), max(errors), min(errors)


def parse_args():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", type=int, default=24, help="cells drawn at random [%(default)s]")
    parser.add_argument("--seed", type=int, default=6, help="of the drawn cells [%(default)s]")
    parser.add_argument("--json", metavar="PATH.json", help="write all cells here")
    return parser.parse_args()


def main():
    args = parse_args()
    import torch
    import transformers

    rows = []
    for kind, cells in (
        ("one thing", [BASE | cell for cell in ONE_THING]),
        ("drawn", drawn(args.drawn, args.seed)),
    ):
        for cell in cells:
            row = run(cell, traces=True) | {"kind": kind}
            what = {
                name: value
                for name, value in cell.items()
                if kind == "drawn" or value != BASE.get(name)
            }
            errors = ", ".join(f"{method} {row[method]:+.2%}" for method in METHODS)
            print(f"{row['measured'] / 2**20:9.1f} MiB, {errors}: {what}", flush=True)
            rows.append(row)
    for name, flags, how in LARGE:
        row = run_shape(name, flags, how) | {"kind": "shapes"}
        gib = row["traced bytes"] / 2**30
        print(
            f"{gib:9.1f} GiB traced, closed form {row['closed form']:+.2%}: {name} {flags} {how}",
            flush=True,
        )
        rows.append(row)
    versions = {module.__name__: module.__version__ for module in (torch, transformers)}
    if args.json:
        results = {"versions": versions, "seed": args.seed, "cells": rows}
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
