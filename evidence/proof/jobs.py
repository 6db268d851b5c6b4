# SPDX-License-Identifier: Apache-2.0
"""The job on which every strategy must agree, and all runs of it that evidence/parity.py makes.

The job has rows of different lengths, accumulation, gradient clipping that takes effect, warm-up
and cosine decay, and weight decay. Its 20 steps are more than one epoch, so that one window of
accumulation has fewer rows.
"""

from dataclasses import dataclass, replace

import yaml

from components.config_strategy import strategy_of
from paths import CONFIGS, FIRST_CHOICE, OF_EXPERTS, OF_PIPELINES

# Arguments of make_tiny.py for a recipe's tiny model and rows. Its matrices have at least 320 x 320
# elements, since ZeRO-3 does not shard tensors below 100,000 elements.
WIDTH = "--hidden_size 320 --intermediate_size 640 --num_attention_heads 5".split()
ROWS = "--num_train_rows 210 --num_test_rows 21".split()
MODEL = [*WIDTH, "--num_key_value_heads", "5", *ROWS]
EXPERTS = "--num_local_experts 4 --intermediate_size 128".split()
MAKERS = {
    "llama": ["llama", *MODEL],
    "llama_dpo": ["llama_dpo", *MODEL],
    "mistral_pretrain": ["mistral_pretrain", *MODEL],
    "mixtral": ["mixtral", *MODEL, *EXPERTS],
    "t5": ["t5", *WIDTH, *ROWS],
    "bert": ["bert", *WIDTH, *ROWS],
    "bert_ner": ["bert_ner", *WIDTH, *ROWS],
    "vit": ["vit", *WIDTH, *ROWS],
}

# The same of meshes, which divide the heads by 2 or 4
EVEN_HEADS = "--num_attention_heads 4 --num_key_value_heads 4".split()
FOR_MESHES = {"mistral_pretrain": ["--full_attention"]}  # ranks that share a row know no windows

# The flags of the job. 210 rows do not divide by the global batch of 12, or by the 16 of meshes:
# the last window of an epoch has 6 rows, or 2, and some ranks have none of them.
JOB = [
    *"--max_steps 20 --num_train_epochs 2".split(),
    *"--learning_rate 1e-3 --warmup_steps 0.1 --lr_scheduler_type cosine".split(),
    *"--weight_decay 0.1 --max_grad_norm 0.5 --save_steps 0".split(),
]
# Further flags of a recipe. At the job's own learning rate, rounding errors grow from step to step
# in three of them: T5 does not scale its attention by its width, and random BERTs and ViTs
# oscillate.
FLAGS = {
    # A block holds one or two texts, and is longer than the model's window.
    "mistral_pretrain": ["--max_length", "80"],
    # Short, since under ZeRO-3 each generated token gathers all layers.
    "t5": ["--learning_rate", "3e-4", "--generation_max_length", "16"],
    "bert": ["--learning_rate", "1e-4"],
    "bert_ner": ["--learning_rate", "1e-4"],
    "vit": ["--learning_rate", "1e-4"],
}
# The same for its adapters. Those of experts must be large enough for ZeRO-3 to shard them.
ADAPTER_FLAGS = {"mixtral": ["--lora_r", "128"]}
PIECES = ("--max_logits_mib", "0.02")  # several pieces of 16 tokens per batch
LEVERS = ("--padding_free", *PIECES)
PACKING = ("--packing", "--max_length", "96")  # two or three rows per packed sequence
CHECKPOINTING = ("--gradient_checkpointing",)
SHARDED = ("--shard_stages",)
LAYERS_ONLY = ("--lora_target_parameters",)  # without a value: no adapters of experts
EAGER = ("--attn_implementation", "eager")

ENGINES = (
    "single",
    "ddp",
    "fsdp1_full_shard",
    "fsdp2_full_shard",
    "deepspeed_zero2",
    "deepspeed_zero3",
)
QUANTIZED = (
    ("single", "int8 LoRA"),
    ("deepspeed_zero2", "int8 LoRA"),
    ("single", "nf4 LoRA"),
    ("fsdp2_full_shard", "nf4 LoRA"),
)
# Splits of a global batch of 12 rows, {ranks: (rows per device, accumulation steps)}
CUT = {1: (3, 4), 2: (3, 2), 4: (3, 1)}
OTHER_CUTS = {
    1: ((1, 12), (2, 6), (4, 3), (6, 2), (12, 1)),
    2: ((1, 6), (2, 3), (6, 1)),
    4: ((1, 3),),
}
# Splits of a global batch of 16 rows in the runs of meshes, {groups of ranks that have rows of
# their own: ...}. 12 rows are not two equal batches for each of 4 groups, and too few for 8.
MESH_CUT = {1: (8, 2), 2: (4, 2), 4: (2, 2), 8: (1, 2)}
CUT_CONFIGS = ("ddp", "fsdp2_full_shard", "deepspeed_zero2")
WEIGHTS = {
    "full": [],
    "LoRA": ["--use_peft"],
    "int8 LoRA": ["--use_peft", "--load_in_8bit"],
    "nf4 LoRA": ["--use_peft", "--load_in_4bit", "--bnb_4bit_use_double_quant"],
}


@dataclass(frozen=True)
class Run:
    """One launch of the job."""

    group: str  # its table
    config: str  # name of a YAML of accelerate_configs/, without suffix
    ranks: int = 1
    batch: int = 3  # rows per device and micro-batch
    accumulation: int = 4
    weights: str = "full"  # a key of WEIGHTS
    flags: tuple[str, ...] = ()
    recipe: str = "llama"
    precision: str = "no"  # --mixed_precision
    sizes: tuple[str, ...] = ()  # those of the mesh that are not the YAML's, as in "tp_size=4"
    layers: int = 2  # in its tiny model

    @property
    def model(self) -> str:
        """The recipe whose tiny model and rows it has, and with which it is compared."""
        return self.recipe.removesuffix("_pipeline")

    @property
    def tiny(self) -> str:
        """The name of the folder of its tiny model and rows."""
        name = f"tiny_{self.model}"
        if self.group == "meshes":
            name += f"_of_meshes_{self.layers}"
        return name

    @property
    def maker(self) -> list[str]:
        """The arguments of make_tiny.py for them."""
        maker = MAKERS[self.model]
        if self.group == "meshes":
            layers = ["--num_hidden_layers", str(self.layers)]
            return [*maker, *layers, *EVEN_HEADS, *FOR_MESHES.get(self.model, [])]
        return maker

    @property
    def name(self) -> str:
        """The name of its output folder, different for every run."""
        cut = f"{self.ranks}x{self.batch}x{self.accumulation}"
        words = [self.recipe, self.weights.replace(" ", "_"), self.config, cut]
        if self.precision != "no":
            words.append(self.precision)
        words += [flag.removeprefix("--") for flag in self.flags]
        if self.group == "meshes":
            words += ["mesh", *self.sizes, f"{self.layers}_layers"]
        return "-".join(words)

    @property
    def arguments(self) -> list[str | int]:
        """The recipe's arguments, without those that name model, rows and output folder."""
        arguments = [*JOB, *FLAGS.get(self.recipe, [])]
        arguments += ["--per_device_train_batch_size", self.batch]
        arguments += ["--gradient_accumulation_steps", self.accumulation]
        if self.weights != "full":
            arguments += ADAPTER_FLAGS.get(self.recipe, [])
        return [*arguments, *WEIGHTS[self.weights], *self.flags]


def reference_of(run: Run) -> Run:
    """Return the run to compare another one with: the same job and weights in one process.

    The reference of packed rows is packed too, since packing decides which rows make a batch. Where
    experts have no adapters, they have none in the reference either.
    """
    if run.group == "meshes":
        flags = tuple(flag for flag in run.flags if flag in LAYERS_ONLY)
        if run.flags == PACKING:
            flags = PACKING
        whole = run_on_mesh("single", 1, weights=run.weights, flags=flags, recipe=run.model)
        return replace(whole, layers=run.layers)
    if run.recipe == "llama" and "--packing" not in run.flags:
        return Run("strategies", "single", weights=run.weights)
    batch, accumulation = CUT[1]
    return replace(run, config="single", ranks=1, batch=batch, accumulation=accumulation)


def configs() -> list[str]:
    """Return names of the shipped YAML files under which each rank has rows of its own.

    Those that mean the same as another one are left out.
    """
    of_others = {FIRST_CHOICE, OF_PIPELINES, *OF_EXPERTS}
    names = {path.stem for path in set(CONFIGS.glob("*.yaml")) - of_others}
    return sorted(names - set(mesh_configs()))


def mesh_configs() -> list[str]:
    """Return names of the shipped YAML files under which several ranks share rows."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml") if ranks_per_row(path.stem) > 1)


def expert_configs() -> list[str]:
    """Return names of the shipped YAML files under which several ranks share experts."""
    return sorted(path.stem for path in OF_EXPERTS)


def ranks_per_row(config: str, sizes: tuple[str, ...] = ()) -> int:
    """Return how many ranks share each row under a shipped YAML, with these sizes of its mesh."""
    requested = strategy_of(content_of(config, sizes))
    return requested.tp * requested.cp * requested.sp


def content_of(config: str, sizes: tuple[str, ...] = ()) -> dict:
    """Return the content of a shipped YAML, with these sizes of its mesh."""
    content = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())
    for size in sizes:
        key, _, number = size.partition("=")
        content["parallelism_config"][f"parallelism_config_{key}"] = int(number)
    return content


def ranks_of(config: str, wanted: int) -> int:
    """Return the number of ranks closest to `wanted` that a YAML allows.

    It is one for single.yaml and four for a mesh of 2 x 2.
    """
    if config == "single":
        return 1
    if "hybrid" in config:
        return 4
    return wanted


def run_on_ranks(
    group: str,
    config: str,
    ranks: int,
    weights: str = "full",
    flags: tuple[str, ...] = (),
    recipe: str = "llama",
    precision: str = "no",
) -> Run:
    """Return a run on this many ranks, with the global batch split among them."""
    batch, accumulation = CUT[ranks]
    return Run(group, config, ranks, batch, accumulation, weights, flags, recipe, precision)


def all_runs() -> list[Run]:
    """Return every run, those of a group in the order of its table."""
    runs = [*runs_of_strategies(2), *runs_of_strategies(4), *runs_of_cuts()]
    for config in ENGINES:
        runs += runs_of_engine(config)
    runs.append(Run("attention", "single", flags=EAGER))
    for config in (*ENGINES, "deepspeed_zero0", "deepspeed_zero1"):
        runs.append(run_on_ranks("bf16", config, ranks_of(config, 2), precision="bf16"))
    for recipe in MAKERS:
        if recipe != "llama":
            runs += runs_of_recipe(recipe)
    return [*runs, *runs_of_meshes()]


def runs_of_strategies(wanted: int) -> list[Run]:
    """Return runs of every YAML and kind of weights; on four ranks only if two are allowed too."""
    runs = []
    for config in configs():
        if wanted != 2 and ranks_of(config, 2) != 2:
            continue
        ranks = ranks_of(config, wanted)
        runs += [run_on_ranks("strategies", config, ranks, weights) for weights in WEIGHTS]
    return runs


def runs_of_cuts() -> list[Run]:
    """Return a run for every other split of the global batch."""
    runs = []
    for ranks, cuts in OTHER_CUTS.items():
        chosen = ["single"] if ranks == 1 else CUT_CONFIGS
        for batch, accumulation in cuts:
            runs += [Run("cuts", config, ranks, batch, accumulation) for config in chosen]
    return runs


def runs_of_engine(config: str) -> list[Run]:
    """Runs under one engine with flags that change memory or speed, but not numbers."""
    ranks = ranks_of(config, 2)
    return [
        run_on_ranks("checkpointing", config, ranks, flags=CHECKPOINTING),
        run_on_ranks("levers", config, ranks, flags=LEVERS),
        run_on_ranks("levers", config, ranks, "LoRA", flags=LEVERS),
        run_on_ranks("packing", config, ranks, flags=PACKING),
    ]


def runs_of_recipe(recipe: str) -> list[Run]:
    """Return every YAML with full weights, each engine with LoRA, some with a quantized base."""
    runs = []
    for config in configs():
        ranks = ranks_of(config, 2)
        runs.append(run_on_ranks(recipe, config, ranks, recipe=recipe))
        if config in ENGINES:
            runs.append(run_on_ranks(recipe, config, ranks, "LoRA", recipe=recipe))
    if recipe == "mixtral":  # bitsandbytes does not quantize experts
        return runs
    for config, weights in QUANTIZED:
        ranks = ranks_of(config, 2)
        runs.append(run_on_ranks("quantized", config, ranks, weights, recipe=recipe))
    return runs


# (YAML, ranks, sizes that are not the YAML's)
MESHES = (
    ("tp", 2, ()),
    ("tp", 4, ("tp_size=4",)),
    ("fsdp2_tp", 4, ()),
    ("fsdp2_tp", 8, ("dp_shard_size=4",)),
    ("hsdp_tp", 8, ()),
    ("fsdp2_cp", 2, ("dp_shard_size=1",)),
    ("fsdp2_cp", 4, ()),
    ("fsdp2_cp", 4, ("dp_shard_size=1", "cp_size=4")),
    ("hsdp_cp", 8, ()),
    ("deepspeed_ulysses", 2, ()),
    ("deepspeed_ulysses", 4, ("dp_shard_size=2",)),
    ("deepspeed_ulysses", 4, ("sp_size=4",)),
)
# More of them, whose memory evidence/track_ranks.py does not measure
WIDER_MESHES = (
    ("fsdp2_cp", 8, ("dp_shard_size=4",)),
    ("fsdp2_cp", 8, ("cp_size=4",)),
    ("deepspeed_ulysses", 8, ("dp_shard_size=4",)),
)
# (YAML, ranks, ranks of a group that have the experts between them)
EXPERT_GROUPS = (("ep", 2, 2), ("ep", 4, 4), ("ep", 4, 2), ("fsdp2_ep", 4, 4), ("fsdp2_ep", 4, 2))
WIDER_EXPERT_GROUPS = (("fsdp2_ep", 8, 4), ("fsdp2_ep", 8, 2))
# (ranks, ranks of a pipeline, further flags)
ONE_PIPELINE = (
    (2, 2, ()),
    (2, 2, ("--pipeline_schedule", "gpipe")),
    (2, 2, ("--pipeline_schedule", "interleaved")),
    (2, 2, ("--pipeline_schedule", "interleaved_zero_bubble")),
    (2, 2, ("--pipeline_schedule", "zbv")),
    (2, 2, CHECKPOINTING),
    (4, 4, ()),
    (4, 4, ("--pipeline_schedule", "interleaved")),
    (4, 4, ("--pipeline_schedule", "interleaved_zero_bubble")),
    (4, 4, ("--pipeline_schedule", "zbv")),
)
# The pipelines beyond one are replicas, or share the weights of each stage.
SEVERAL_PIPELINES = (
    (4, 2, ()),
    (4, 2, SHARDED),
    (8, 2, ()),
    (8, 2, SHARDED),
    (8, 4, ()),
    (8, 4, (*SHARDED, "--pipeline_schedule", "interleaved_zero_bubble")),
    (8, 4, (*SHARDED, "--pipeline_schedule", "zbv")),
)
LAYERS_OF_PIPELINES = 8  # two stages for each of four ranks
# Recipes beside llama.py whose ranks may share rows
SHARING_ROWS = ("llama_dpo", "mistral_pretrain", "mixtral")
# Meshes whose ranks share the tokens of a row
TOKEN_MESHES = (
    ("fsdp2_cp", 2, ("dp_shard_size=1",)),
    ("fsdp2_cp", 4, ()),
    ("deepspeed_ulysses", 2, ()),
    ("deepspeed_ulysses", 4, ("dp_shard_size=2",)),
)


def runs_of_meshes() -> list[Run]:
    """Return runs under each mesh, with each kind of weights, and with what changes memory."""
    runs = [run_on_mesh("single", 1)]
    for config, ranks, sizes in (*MESHES, *WIDER_MESHES):
        runs.append(run_on_mesh(config, ranks, sizes))
        if sizes:
            continue
        kinds = [kind for kind in WEIGHTS if kind != "full"]
        runs += [run_on_mesh(config, ranks, weights=kind) for kind in kinds]
        if ranks < 8:
            runs.append(run_on_mesh(config, ranks, flags=CHECKPOINTING))
            runs.append(run_on_mesh(config, ranks, flags=PIECES))
    runs += [run_on_mesh("single", 1, weights=kind) for kind in WEIGHTS if kind != "full"]
    for recipe in SHARING_ROWS:
        runs.append(run_on_mesh("single", 1, recipe=recipe))
        runs.append(run_on_mesh("tp", 2, recipe=recipe))
        runs.append(run_on_mesh("fsdp2_tp", 4, recipe=recipe))
    return [
        *runs,
        *runs_of_shared_lines(),
        *runs_of_tokens(),
        *runs_of_experts(),
        *runs_of_pipelines(),
    ]


def runs_of_shared_lines() -> list[Run]:
    """Return runs whose ranks share lines of several rows, and that of one process."""
    runs = [run_on_mesh("single", 1, flags=PACKING)]
    for config, ranks, sizes in MESHES:
        if config == "deepspeed_ulysses":
            runs.append(run_on_mesh(config, ranks, sizes, flags=PACKING))
    return runs


def runs_of_tokens() -> list[Run]:
    """Return runs of other recipes than llama.py whose ranks share the tokens of a row.

    The adapters of mixtral.py are also those of experts.
    """
    runs = []
    for recipe in SHARING_ROWS:
        for config, ranks, sizes in TOKEN_MESHES:
            runs.append(run_on_mesh(config, ranks, sizes, recipe=recipe))
            if not sizes:
                runs.append(run_on_mesh(config, ranks, sizes, "LoRA", recipe=recipe))
        runs.append(run_on_mesh("single", 1, weights="LoRA", recipe=recipe))
    return [*runs, run_on_mesh("hsdp_cp", 8, weights="LoRA", recipe="mixtral")]


def runs_of_experts() -> list[Run]:
    """Return runs of a mixture whose experts are spread over ranks."""
    runs = []
    for config, ranks, size in (*EXPERT_GROUPS, *WIDER_EXPERT_GROUPS):
        flags = ("--ep_size", str(size))
        runs.append(run_on_mesh(config, ranks, flags=flags, recipe="mixtral"))
    recomputed = ("--ep_size", "2", *CHECKPOINTING)
    runs.append(run_on_mesh("fsdp2_ep", 4, flags=recomputed, recipe="mixtral"))
    runs.append(run_on_mesh("single", 1, weights="LoRA", flags=LAYERS_ONLY, recipe="mixtral"))
    adapted = ("--ep_size", "2", *LAYERS_ONLY)
    for config, ranks in (("ep", 2), ("ep", 4), ("fsdp2_ep", 4)):
        runs.append(run_on_mesh(config, ranks, weights="LoRA", flags=adapted, recipe="mixtral"))
    return runs


def runs_of_pipelines() -> list[Run]:
    """Return runs of pipelines under each schedule, of replicas, and of sharded stages."""
    runs = [replace(run_on_mesh("single", 1), layers=LAYERS_OF_PIPELINES)]
    for ranks, size, more in (*ONE_PIPELINE, *SEVERAL_PIPELINES):
        flags = ("--pp_size", str(size), *more)
        batch, accumulation = MESH_CUT[ranks // size]
        run = Run("meshes", "pp", ranks, batch, accumulation, "full", flags, "llama_pipeline")
        runs.append(replace(run, layers=LAYERS_OF_PIPELINES))
    return runs


def run_on_mesh(
    config: str,
    ranks: int,
    sizes: tuple[str, ...] = (),
    weights: str = "full",
    flags: tuple[str, ...] = (),
    recipe: str = "llama",
) -> Run:
    """Return a run under a mesh, with the global batch split among the groups that share rows."""
    batch, accumulation = MESH_CUT[ranks // ranks_per_row(config, sizes)]
    return Run("meshes", config, ranks, batch, accumulation, weights, flags, recipe, sizes=sizes)


def is_refused(run: Run) -> bool:
    """Return whether the recipe must refuse a run, since its strategy does not take its weights."""
    if run.weights == "full":
        return False
    if run.config == "fsdp1_no_shard":
        return True
    if run.config.endswith("tp") and run.weights != "LoRA":  # A quantized base is not split.
        return True
    if run.weights == "int8 LoRA":
        return run.config.startswith(("fsdp", "hsdp"))
    if run.weights == "nf4 LoRA" and run.config == "fsdp1_shard_grad_op":
        return True
    return run.recipe == "mixtral" and run.config.startswith("fsdp1")
