# SPDX-License-Identifier: Apache-2.0
"""Models and batches whose memory is planned, and the plan of a row of results/planner.json.

evidence/test_planner.py measures them; tests hold the planner of today to what it measured.
"""

import copy
import functools
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import yaml
from transformers import AutoConfig

from planner import yaml_files
from planner.autograd import FP32
from planner.closed_form import closed_form
from planner.ledger import both
from planner.pipeline import peaks_of_ranks
from planner.plan import plan_of
from planner.recipe import parse_words
from planner.request import Batch
from planner.shapes import MemoizedBuild
from planner.zero import BUCKET

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


def training_arguments(flags):
    """Return the recipe's arguments for training without evaluation."""
    return parse_words(["--eval_strategy", "no", *flags])


# ---- On ranks ----


class Mesh(NamedTuple):
    """A shipped YAML on a number of ranks."""

    config: str
    ranks: int
    sizes: tuple[str, ...] = ()  # those of its mesh that are not the YAML's, as in "cp_size=4"
    ep: int = 1  # ranks that share the experts of a mixture
    pp: int = 1  # ranks of a pipeline
    schedule: str = "1f1b"  # --pipeline_schedule
    shards_stages: bool = False  # whether pipelines share the weights of their stages

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
            words = ["--pp_size", str(self.pp), "--pipeline_schedule", self.schedule]
            return [*words, "--shard_stages"] if self.shards_stages else words
        return [] if self.ep == 1 else ["--ep_size", str(self.ep)]


SEQUENCES = 2  # sequences per micro-batch
LONGEST = 256  # tokens of rows that do not share a sequence
LONG = 1024  # tokens of a sequence of several rows, whose masks are then much of a layer


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

    def words_under(self, mesh):
        """The flags of the recipe that runs under a mesh, with the sizes of the batch.

        Spread experts have no adapters.
        """
        words = [*mesh.words, *self.flags, "--max_length", str(self.length)]
        words += ["--per_device_train_batch_size", str(sequences_under(mesh))]
        if mesh.ep > 1 and "--use_peft" in words:
            words.append("--lora_target_parameters")
        return words


ACCUMULATION = ("--gradient_accumulation_steps", "3")
PACKING = ("--packing",)
CHECKPOINTING = ("--gradient_checkpointing",)
LORA = ("--use_peft",)
LORA_AND_HEAD = (*LORA, "--modules_to_save", "lm_head", "embed_tokens")
LORA_AND_NORMS = (*LORA, "--modules_to_save", "norm")  # Every name of a norm ends with this.
UNPACKED = {
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
}
PACKED_JOBS = {
    "packed": Job(PACKING, LONG, rows=16),
    "together": Job((*PACKING, *ACCUMULATION), precision="bf16", rows=4),
    "together checkpointed": Job(
        (*PACKING, *ACCUMULATION, *CHECKPOINTING), precision="bf16", rows=4
    ),
}
JOBS = UNPACKED | PACKED_JOBS


def sequences_under(mesh):
    """Return the sequences of a batch: in a pipeline as many for each rank, each by itself."""
    return SEQUENCES * mesh.pp


MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
    "max_position_embeddings": LONG,
}
# The mixture whose experts are spread over ranks: an expert is an MLP as in MODEL, but narrower
MIXTURE = MODEL | {"intermediate_size": 512, "num_hidden_layers": 2, "num_local_experts": 8}
SHARED = (AutoConfig.for_model("llama", **MODEL), AutoConfig.for_model("mixtral", **MIXTURE))
BUILD = MemoizedBuild()  # of hundreds of plans, which share two models


def tracked_rows():
    """The rows of results/planner.json that were measured on ranks."""
    rows = json.loads((REPO / "results" / "planner.json").read_text())
    return [row for name, row in rows.items() if name.startswith("test_peak_of_ranks")]


def planned(row):
    """Return {category: bytes} of the fullest rank of a measured row, device and host together.

    Ranks that share experts differ by the lines that arrived at them.
    """
    batch = batch_of_row(row)
    batches = [replace(batch, arrived=tuple(lines)) for lines in row.get("arrived", [()])]
    ranks = [planned_rank(row, batch) for batch in batches]
    return max(ranks, key=lambda sizes: sum(sizes.values()))


def planned_rank(row, batch):
    """Return {category: bytes} of a rank of a measured row that has this batch."""
    return both(*closed_form(plan_of_row(row), shared_model(row), batch, BUILD))


def planned_places(row):
    """Return {category: bytes} of each place in a pipeline of a measured row."""
    peaks = peaks_of_ranks(plan_of_row(row), shared_model(row), batch_of_row(row), BUILD)
    return [both(peak.device, peak.host) for peak in peaks]


def batch_of_row(row):
    """Return the micro-batch of a measured row, or all that goes through a pipeline at a time."""
    job = JOBS[row["job"]]
    sequences = sequences_under(mesh_of_row(row))
    return Batch(sequences, job.length, row["supervised"], job.is_packed)


def shared_model(row):
    """Return the config of the model of a measured row, which nobody may change."""
    return SHARED["ep" in row]


def model_of_row(row):
    """Return a config of the model of a measured row."""
    return copy.deepcopy(shared_model(row))


def mesh_of_row(row):
    """Return the mesh of a measured row."""
    pipeline = {name: row[name] for name in ("pp", "schedule", "shards_stages") if name in row}
    sizes = tuple(row.get("sizes", ()))
    return Mesh(row["config"], row["ranks"], sizes, row.get("ep", 1), **pipeline)


def plan_of_row(row):
    """Return the plan of a measured row, as it runs on CPU ranks."""
    job = JOBS[row["job"]]
    mesh = mesh_of_row(row)
    args = parsed(("--eval_strategy", "no", *job.words_under(mesh)), mesh.recipe)
    config = yaml_files.read(CONFIGS / f"{row['config']}.yaml")
    if mesh.sizes:
        config = content_of(mesh.config, mesh.sizes)
    machines = 1
    if row["config"] == "fsdp1_hybrid_shard":
        machines = 2  # The rehearsal simulates them.
    plan = plan_of(args, config, row["ranks"], machines, job.precision)
    if plan.engine == "fsdp2":  # On CPU ranks the shards on the host are those of the device.
        return replace(plan, offloads_parameters=False, offloads_optimizer=False)
    return plan


@functools.cache
def parsed(words, recipe):
    """The arguments of a recipe, which hundreds of plans share."""
    return parse_words(words, recipe)


def content_of(config, sizes):
    """The content of a shipped YAML, with these sizes of its mesh."""
    content = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())
    for size in sizes:
        key, _, number = size.partition("=")
        content["parallelism_config"][f"parallelism_config_{key}"] = int(number)
    return content


def compare(row):
    """Return a measured row with its planned peak and the relative error.

    ZeRO's bucket of 2 GB (in fp32) is the same for every model and would hide all other errors. The
    second error, `beside_bucket`, leaves it out. The error of ranks that share experts is that of
    the plan for the lines that arrived; `even` is that of the plan for equally many on each rank,
    which plan_memory.py makes.
    """
    if "pp" in row:
        return compare_places(row)
    size = sum(planned(row).values())
    measured = max(row["measured"])
    bucket = 0 if "deepspeed" not in row["config"] else bucket_of(plan_of_row(row))
    if min(size, measured) < bucket:
        bucket = 0
    compared = row | {
        "planned": size,
        "error": size / measured - 1,
        "beside_bucket": (size - bucket) / (measured - bucket) - 1,
    }
    if "arrived" in row:
        even = planned_rank(row, batch_of_row(row))
        compared["even"] = sum(even.values()) / measured - 1
    return compared


def compare_places(row):
    """Return a measured row of a pipeline with the planned peak of each of its places.

    The error is that of the place which is furthest off.
    """
    sizes = [sum(place.values()) for place in planned_places(row)]
    per_place = row["ranks"] // row["pp"]
    errors = []
    for place, size in enumerate(sizes):
        ranks = row["measured"][place * per_place :][:per_place]
        errors.append(size / max(ranks) - 1)
    error = max(errors, key=abs)
    return row | {"planned": sizes, "error": error, "beside_bucket": error}


def bucket_of(plan):
    """Return the bytes of ZeRO's bucket; stage 3 has it in the precision of reductions, fp32."""
    if plan.stage == 0:
        return 0
    if plan.stage == 3 or plan.low_itemsize is None:
        return BUCKET * FP32
    return BUCKET * plan.low_itemsize
