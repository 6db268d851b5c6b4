# SPDX-License-Identifier: Apache-2.0
"""Models and batches whose memory is planned, and the plan of a row of results/planner.json.

evidence/test_planner.py measures them; tests hold the planner of today to what it measured.
"""

import functools
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import yaml
from transformers import AutoConfig

import config_strategy
import llama
from core.cli import parse
from planner.plan import Batch, plan_of

REPO = Path(__file__).resolve().parents[1]
CONFIGS = REPO / "accelerate_configs"

# ---- In one process ----
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


def drawn(number, seed):
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


def drawn_flags(draw, is_short):
    """Return random flags of the recipe.

    Eager attention is only for short rows, since its memory grows with the square of their length.
    """
    flags = []
    flags += CHECKPOINTED * draw.choice([0, 1])
    flags += ["--use_peft"] * draw.choice([0, 0, 1])
    return flags + draw.choice([[], [], EAGER if is_short else [], PACKED])


def config_of(cell):
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


def mixture_of(cell):
    """Return the config of a mixture of four experts, of which a token takes two."""
    shape = config_of(cell | {"family": "mixtral"})
    shape.num_local_experts = 4
    return shape


def training_arguments(model, flags=()):
    """Return the arguments of recipes/llama.py for training without evaluation.

    The loss is computed in pieces as on a CPU, where jobs were measured.

    Args:
        model: the folder of its config.
    """
    words = ["--eval_strategy", "no", "--model_name_or_path", str(model)]
    if "--max_logits_mib" not in flags:
        words += ["--max_logits_mib", "256"]
    return parse(llama.Arguments, words=[*words, *flags])


# ---- On ranks ----
class Mesh(NamedTuple):
    """A shipped YAML on a number of ranks."""

    config: str
    ranks: int
    sizes: tuple[str, ...] = ()  # those of its mesh that are not the YAML's, as in "cp_size=4"
    ep: int = 1  # ranks that share the experts of a mixture
    pp: int = 1  # ranks of a pipeline

    @property
    def recipe(self):
        """The recipe that runs under it."""
        if self.pp > 1:
            return "llama_pipeline.py"
        return "llama.py" if self.ep == 1 else "mixtral.py"

    @property
    def words(self):
        """The flags of the recipe that belong to it."""
        if self.pp > 1:
            return ["--pp_size", str(self.pp)]
        return [] if self.ep == 1 else ["--ep_size", str(self.ep)]


SEQUENCES = 2  # sequences per micro-batch
LONGEST = 256  # tokens of rows that do not share a sequence
LONG = 1024  # tokens of a sequence that several rows share


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        flags: of the recipe.
        length: tokens of a sequence.
        precision: of mixed precision.
        rows: that share a sequence, all of one length; they fill it.
    """

    flags: tuple[str, ...] = ()
    length: int = LONGEST
    precision: str = "no"
    rows: int = 1

    @property
    def is_packed(self):
        """Whether rows share a sequence."""
        return self.rows > 1

    @property
    def words(self):
        """The flags of the recipe, with the sizes of the batch."""
        sizes = ["--max_length", str(self.length), "--per_device_train_batch_size", str(SEQUENCES)]
        return [*self.flags, *sizes]


ACCUMULATION = ("--gradient_accumulation_steps", "3")
CHECKPOINTING = ("--gradient_checkpointing",)
LORA = ("--use_peft",)
LORA_AND_HEAD = (*LORA, "--modules_to_save", "lm_head", "embed_tokens")
LORA_AND_NORMS = (*LORA, "--modules_to_save", "norm")  # Every name of a norm ends with this.
JOBS = {
    "plain": Job(),
    "short": Job(length=16),  # few activations: most bytes are held by the engines
    "checkpointed": Job(CHECKPOINTING),
    "LoRA": Job(LORA),
    "accumulation": Job(ACCUMULATION, length=16),
    "bf16": Job(precision="bf16"),
    "short bf16": Job(length=16, precision="bf16"),
    "LoRA bf16": Job(LORA, precision="bf16"),
    "LoRA head": Job(LORA_AND_HEAD),
    "LoRA head bf16": Job(LORA_AND_HEAD, precision="bf16"),
    "LoRA norms": Job(LORA_AND_NORMS),
    "packed": Job(("--packing",), LONG, rows=16),
}

MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
    "max_position_embeddings": LONG,
}


def tracked_rows():
    """The rows of results/planner.json that were measured on ranks."""
    rows = json.loads((REPO / "results" / "planner.json").read_text())
    return [row for name, row in rows.items() if name.startswith("test_peak_of_ranks")]


def plan_of_row(row, model):
    """Return the plan of a measured row, as it runs on CPU ranks. model: the folder of MODEL."""
    job = JOBS[row["job"]]
    config = config_of_row(row["config"], row.get("sizes") or ())
    # A rehearsal of FSDP1's hybrid sharding simulates two machines
    machines = 2 if row["config"] == "fsdp1_hybrid_shard" else 1
    args = parsed(str(model), *job.words)
    plan = plan_of(args, config, row["ranks"], machines, job.precision)
    if plan.engine == "fsdp2":  # On CPU ranks the shards on the host are those of the device.
        return replace(plan, offloads_parameters=False, offloads_optimizer=False)
    return plan


@functools.cache
def parsed(model, *words):
    """The arguments of the recipe, which hundreds of plans share."""
    return training_arguments(model, words)


def config_of_row(config, sizes):
    """A shipped YAML as it is read, with these sizes of its mesh."""
    found = config_strategy.read(CONFIGS / f"{config}.yaml")
    found.values.update(content_of(config, sizes).get("parallelism_config") or {})
    return found


def content_of(config, sizes):
    """The content of a shipped YAML, with these sizes of its mesh."""
    content = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())
    for size in sizes:
        key, _, number = size.partition("=")
        content["parallelism_config"][f"parallelism_config_{key}"] = int(number)
    return content


def compare(row, model, profiles):
    """Return a measured row with its planned peak, device and host together, and the error."""
    job = JOBS[row["job"]]
    batch = Batch(SEQUENCES, job.length, row["supervised"], job.is_packed)
    held = profiles.held(plan_of_row(row, model), batch)
    size = held.peak + sum(held.host.values())
    return row | {"planned": size, "error": size / max(row["measured"]) - 1}


def bound_of(row):
    """The largest error of a measured row that is accepted, relative to the whole peak."""
    if row["config"] in ("deepspeed_zero3", "deepspeed_zero3_offload", "deepspeed_ulysses"):
        return 0.03
    return 0.02 if row.get("sizes") is not None else 0.005
