# SPDX-License-Identifier: Apache-2.0
"""The job on which every strategy must agree, and all runs of it that scripts/parity.py makes.

The job has rows of different lengths, accumulation, gradient clipping that takes effect, warm-up
and cosine decay, and weight decay. Its 20 steps are more than one epoch, so that one window of
accumulation has fewer rows.
"""

from dataclasses import dataclass, replace

from paths import CONFIGS, FIRST_CHOICE, OF_PIPELINES

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

# The flags of the job. 210 rows do not divide by the global batch of 12: the last window of an
# epoch has 6 rows, and some ranks have none of them.
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
LEVERS = ("--padding_free", "--max_logits_mib", "0.02")  # pieces of 16 tokens, several per batch
PACKING = ("--packing", "--max_length", "96")  # two or three rows per packed sequence
CHECKPOINTING = ("--gradient_checkpointing",)
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

    @property
    def name(self) -> str:
        """The name of its output folder, different for every run."""
        cut = f"{self.ranks}x{self.batch}x{self.accumulation}"
        words = [self.recipe, self.weights.replace(" ", "_"), self.config, cut]
        if self.precision != "no":
            words.append(self.precision)
        words += [flag.removeprefix("--") for flag in self.flags]
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

    The reference of packed rows is packed too, since packing decides which rows make a batch.
    """
    if run.recipe == "llama" and "--packing" not in run.flags:
        return Run("strategies", "single", weights=run.weights)
    batch, accumulation = CUT[1]
    return replace(run, config="single", ranks=1, batch=batch, accumulation=accumulation)


def configs() -> list[str]:
    """Return names of the shipped YAML files, those that mean the same as another one left out."""
    return sorted(path.stem for path in set(CONFIGS.glob("*.yaml")) - {FIRST_CHOICE, OF_PIPELINES})


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
    return runs


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


def is_refused(run: Run) -> bool:
    """Return whether the recipe must refuse a run, since FSDP does not support its weights."""
    if run.weights == "full":
        return False
    if run.config == "fsdp1_no_shard":
        return True
    if run.weights == "int8 LoRA":
        return run.config.startswith("fsdp")
    if run.weights == "nf4 LoRA" and run.config == "fsdp1_shard_grad_op":
        return True
    return run.recipe == "mixtral" and run.config.startswith("fsdp1")
