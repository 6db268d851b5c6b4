# SPDX-License-Identifier: Apache-2.0
"""Compare the planner's peaks with those of torch's MemTracker on real CPU tensors.

A cell is a random model and a batch. It runs two optimizer steps with the recipe's own loss and
optimizer, in fp32 and one process, and tracks the second. Nothing in the planner is fitted to any
cell.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from transformers import AutoConfig, PretrainedConfig

from measured.accuracy import METHODS
from planner.closed_form import closed_form
from planner.plan import Plan
from planner.recipe import RecipeArguments, parse_words
from planner.request import Batch
from planner.trace import measure, simulate

Cell = dict[str, Any]

CHECKPOINTED = ["--gradient_checkpointing"]
EAGER = ["--attn_implementation", "eager"]
PACKED = ["--packing"]
WHOLE = ["--modules_to_save", "lm_head", "embed_tokens"]
BASE = {
    "width": 256,  # features of a token
    "ratio": 3.0,  # features of the MLP relative to those
    "depth": 4,  # layers
    "heads": 8,
    "kv_heads": 4,
    "vocab": 8000,
    "lines": 2,  # sequences of a micro-batch
    "length": 512,  # tokens of each
    "family": "llama",
}
# Cells that change one thing of BASE, or two that belong together
SIZES_CHANGED = [
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
    {"supervised_share": 0.1},
]
FLAGS_CHANGED = [
    {"flags": CHECKPOINTED},
    {"flags": CHECKPOINTED, "length": 4096, "lines": 1},
    {"flags": EAGER},
    {"flags": EAGER + CHECKPOINTED, "length": 1024},
    {"flags": PACKED},
    {"flags": PACKED, "length": 4096, "lines": 1},
    {"flags": ["--use_peft"]},
    {"flags": ["--use_peft", "--gradient_checkpointing", "--lora_dropout", "0.1"]},
    {"flags": ["--max_logits_mib", "4"]},
    {"flags": ["--gradient_accumulation_steps", "2"]},
    {"flags": ["--optim", "adamw_torch"]},
]
WHOLE_CHANGED = [
    {"flags": ["--use_peft", *WHOLE]},
    {"flags": ["--use_peft", "--modules_to_save", "norm", *CHECKPOINTED]},
    {"flags": ["--max_logits_mib", "4", "--use_peft", *WHOLE]},
]
FAMILIES_CHANGED = [
    {"family": "qwen3"},
    {"family": "qwen2"},
    {"family": "mistral"},
    {"family": "gemma"},
]
ONE_THING = SIZES_CHANGED + FLAGS_CHANGED + WHOLE_CHANGED + FAMILIES_CHANGED

# Llama with 1, 8 and 70 billion parameters
LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8}
LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "tie_word_embeddings": True,
}
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
SHAPES = {"1B": LLAMA | LLAMA_1B, "8B": LLAMA | LLAMA_8B, "70B": LLAMA | LLAMA_70B}
LENGTH_OF_SHAPES = 4096  # tokens


class LargeRun(NamedTuple):
    """A run too large for this machine: a shape, the recipe's flags, and fields of the Plan."""

    model: str
    flags: Sequence[str]
    how: dict[str, Any]


BF16 = {"mixed_precision": "bf16"}
LORA = ["--use_peft", "--dtype", "bfloat16"]
QLORA = [*LORA, "--load_in_4bit", *CHECKPOINTED]


def fsdp2_in_bf16(ranks: int) -> dict[str, Any]:
    """Return the fields of a Plan on a number of ranks."""
    return BF16 | {"engine": "fsdp2", "ranks": ranks, "shards": ranks}


RUNS_OF_1B = [
    LargeRun("1B", [], BF16),
    LargeRun("1B", ["--dtype", "bfloat16", "--gradient_checkpointing"], {}),
]
RUNS_OF_8B = [
    LargeRun("8B", [], fsdp2_in_bf16(8)),
    LargeRun("8B", CHECKPOINTED, fsdp2_in_bf16(8)),
    LargeRun("8B", LORA, BF16),
    LargeRun("8B", QLORA, BF16),
    LargeRun("8B", [*QLORA, *WHOLE], BF16),
    LargeRun("8B", [*QLORA, *WHOLE], fsdp2_in_bf16(8)),
]
RUNS_OF_70B = [
    LargeRun("70B", CHECKPOINTED, fsdp2_in_bf16(64)),
    LargeRun("70B", CHECKPOINTED, fsdp2_in_bf16(1024)),
    LargeRun("70B", QLORA, fsdp2_in_bf16(8)),
]
LARGE = RUNS_OF_1B + RUNS_OF_8B + RUNS_OF_70B


def drawn(number: int, seed: int) -> Iterator[Cell]:
    """Yield cells with random sizes and flags, so that they are not hand-picked."""
    draw = random.Random(seed)
    for _ in range(number):
        heads = draw.choice([4, 8])
        length = draw.choice([64, 192, 384, 768, 1536, 3072])
        is_short = length < 1000
        flags = drawn_flags(draw, is_short)
        model = {
            "width": 64 * draw.randint(2, 12),
            "ratio": draw.choice([2.0, 2.75, 4.0]),
            "depth": draw.randint(1, 10),
            "heads": heads,
            "kv_heads": draw.choice([heads, heads // 2, 1]),
            "vocab": draw.choice([500, 4000, 16000, 50000]),
        }
        yield model | {
            "lines": draw.choice([1, 2, 4]) if is_short else 1,
            "length": length,
            "tied": draw.choice([False, True]),
            "supervised_share": draw.choice([0.2, 0.5, 1.0]),
            "flags": flags,
            "family": draw.choice(["llama", "llama", "qwen2", "qwen3", "mistral"]),
        }


def drawn_flags(draw: random.Random, is_short: bool) -> list[str]:
    """Return random flags of the recipe.

    Eager attention is only for short rows, since its memory grows with the square of their length.
    """
    flags = []
    flags += CHECKPOINTED * draw.choice([0, 1])
    flags += ["--use_peft"] * draw.choice([0, 0, 1])
    return flags + draw.choice([[], [], EAGER if is_short else [], PACKED])


def config_of(cell: Cell) -> PretrainedConfig:
    """Return the config of a cell's model."""
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


def mixture_of(cell: Cell) -> PretrainedConfig:
    """Return the config of a mixture of four experts, of which a token takes two."""
    shape = config_of(cell | {"family": "mixtral"})
    shape.num_local_experts = 4
    return shape


def training_arguments(flags: Sequence[str]) -> RecipeArguments:
    """Return the recipe's arguments for training without evaluation."""
    return parse_words(["--eval_strategy", "no", *flags])


def run(cell: Cell) -> Cell:
    """Return the cell with its measured peak in bytes, and the relative error of each method."""
    args = training_arguments(cell.get("flags", []))
    config = config_of(cell)
    tokens = cell["lines"] * cell["length"]
    supervised = max(int(tokens * cell.get("supervised_share", 1.0)), 1)
    batch = Batch(cell["lines"], cell["length"], supervised, args.packing)
    plan = Plan(args)
    measured = sum(measure(plan, config, batch).values())
    planned, _ = closed_form(plan, config, batch)
    traced = simulate(plan, config, batch)
    row = cell | {"measured": measured}
    for method, sizes in zip(METHODS, (planned, traced), strict=True):
        row[method] = sum(sizes.values()) / measured - 1
    return row


def run_large(large: LargeRun) -> dict[str, Any]:
    """Return the closed form's relative error against the trace, on a shape too large to run."""
    args = training_arguments([*large.flags, "--max_length", str(LENGTH_OF_SHAPES)])
    config = AutoConfig.for_model("llama", **SHAPES[large.model])
    plan = Plan(args, **large.how)
    batch = Batch(1, LENGTH_OF_SHAPES, LENGTH_OF_SHAPES)
    traced = sum(simulate(plan, config, batch).values())
    planned, _ = closed_form(plan, config, batch)
    row = {"model": large.model, "flags": large.flags, **large.how}
    row["traced bytes"] = traced
    row["closed form"] = sum(planned.values()) / traced - 1
    return row
