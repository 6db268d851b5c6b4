# SPDX-License-Identifier: Apache-2.0
"""The arguments that recipes share, in groups; names and meanings are transformers' and TRL's.

A recipe's own dataclass inherits from CommonArguments and from the groups that it supports. No
group inherits from another one or has a flag of another one; other defaults are set in the recipe
alone. Flags made by `free` may have another value when a run is continued. Where a default is None,
the help has in [ ] what is used then.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from core.cli import NOT_NEGATIVE, POSITIVE, SHARE, arg, free, read_json_object

Optimizer = Literal[
    "adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"
]
Schedule = Literal[
    "linear", "cosine", "cosine_with_min_lr", "constant", "constant_with_warmup", "inverse_sqrt"
]
ACCELERATE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


# ---- The model ----
@dataclass(kw_only=True)
class ModelArguments:
    """Which model is trained, and what it computes with."""

    model_name_or_path: str = arg("", "hub id or folder of the model")
    model_revision: str = arg("main", "branch, tag or commit of a model on the hub")
    dtype: Literal["float32", "bfloat16", "float16"] = arg(
        "float32",
        "type of the weights, also as fp32, bf16 or fp16; bfloat16 halves a frozen base",
        type=lambda name: ACCELERATE_DTYPES.get(name, name),
    )
    no_master_weights: bool = free(
        False, "train bfloat16 weights without an fp32 copy, which loses updates below 1/256 of one"
    )
    attn_implementation: str | None = free(
        None, "eager, sdpa, flex_attention, varlen, flash_attention_2, _3, _4, or a kernel's hub id"
    )
    gradient_checkpointing: Literal["no", "selective", "full"] = free(
        "no",
        "recompute activations in the backward pass: full, also without a value, needs the least "
        "memory and a third more compute; selective keeps the results of products and attention",
        type=lambda text: {"true": "full", "false": "no"}.get(text.lower(), text),
        nargs="?",
        const="full",
    )
    tf32: bool = arg(False, "multiply fp32 matrices in TF32: faster and less exact")

    def conflicts(self) -> Iterator[str]:
        if self.dtype == "float16" and not getattr(self, "use_peft", False):
            yield (
                "--dtype float16 loses small updates without an fp32 copy of the weights: use "
                "float32, with mixed_precision: fp16 in the YAML"
            )


@dataclass(kw_only=True)
class DenseModelArguments:
    """What models without experts can do: compiled layers, a quantized base, variants of LoRA."""

    # Whether all batches to train on have one shape, in a recipe without --packing
    FIXED_SHAPES: ClassVar[bool] = False
    torch_compile: Literal["off", "auto", "on"] = free(
        "auto",
        "compile each kind of layer once, and the loss: on, also without a value, or auto, on GPUs "
        "where it is known to pay: packed lines in one process, under DDP and FSDP2",
        type=lambda text: {"true": "on", "false": "off"}.get(text.lower(), text),
        nargs="?",
        const="on",
    )
    load_in_8bit: bool = arg(False, "load the base in int8 (LLM.int8, bitsandbytes)")
    load_in_4bit: bool = arg(False, "load the base in 4 bits (QLoRA, bitsandbytes)")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = arg("nf4", "4-bit number format")
    bnb_4bit_use_double_quant: bool = arg(False, "quantize the scales of 4-bit weights too")
    use_rslora: bool = arg(False, "multiply adapters by alpha / sqrt(r) (rsLoRA)")
    use_dora: bool = arg(False, "train magnitude and direction of weights apart (DoRA)")

    def conflicts(self) -> Iterator[str]:
        if self.load_in_8bit and self.load_in_4bit:
            yield "--load_in_8bit and --load_in_4bit: choose one"
        for name in ("load_in_8bit", "load_in_4bit", "use_rslora", "use_dora"):
            if getattr(self, name) and not getattr(self, "use_peft", False):
                yield f"--{name} is for LoRA adapters: add --use_peft"


@dataclass(kw_only=True)
class LossInHeadArguments:
    """The loss of causal language models, computed in pieces inside the output head."""

    max_logits_mib: float | None = free(
        None, "MiB of fp32 logits held at a time [1/64 of the GPU's memory, 256 on a CPU]", POSITIVE
    )


@dataclass(kw_only=True)
class LigerArguments:
    """Liger's kernels."""

    use_liger_kernel: bool = free(False, "use Liger's kernels for norms, rotary positions and MLPs")


@dataclass(kw_only=True)
class AdapterArguments:
    """Adapters (peft)."""

    use_peft: bool = arg(False, "train LoRA adapters on a frozen base")
    lora_r: int = arg(16, "rank of the two matrices of an adapter", POSITIVE)
    lora_alpha: float = arg(32, "adapters are multiplied by alpha / r", POSITIVE)
    lora_dropout: float = arg(0.0, "dropout on the input of the adapters", SHARE)
    lora_target_modules: list[str] = arg(["all-linear"], "names of the layers that get adapters")
    modules_to_save: list[str] = arg(
        [], "modules trained whole beside the adapters: lm_head", names=["lora_modules_to_save"]
    )

    def conflicts(self) -> Iterator[str]:
        for name, default in vars(AdapterArguments()).items():
            if not self.use_peft and getattr(self, name) != default:
                yield f"--{name} is for adapters only: add --use_peft"


# ---- The data ----
@dataclass(kw_only=True)
class DataArguments:
    """Where the data come from.

    Attributes:
        COLUMN_ROLES: the roles in --columns that no other argument names.
        COLUMN_ARGUMENTS: {role in --columns: the argument that also names its column}.
    """

    COLUMN_ROLES: ClassVar[Sequence[str]] = ()
    COLUMN_ARGUMENTS: ClassVar[Mapping[str, str]] = {}
    # Each recipe narrows the type: str, or list[str] if it takes several data sets
    dataset_name: Any = arg("", "hub id, folder, or .json, .jsonl, .csv or .parquet file")
    dataset_config: str | None = arg(None, "name of the configuration of a data set on the hub")
    dataset_train_split: str = arg("train", "split to train on")
    dataset_test_split: str = free("test", "split to evaluate on, if there is one")
    eval_dataset_name: str | None = free(None, "file or data set to evaluate on, not a split")
    eval_split: float = arg(
        0, "share (below 1) or number of training rows to hold out and evaluate on", NOT_NEGATIVE
    )
    columns: list[str] = arg([], "your columns as ROLE=COLUMN, where their names are not the roles")
    skip_bad_rows: bool = arg(False, "leave out the rows that cannot be used, and count them")

    def __post_init__(self) -> None:
        """Let --columns set the arguments that name a column too: of two roles, both columns."""
        by_role = self.columns_by_role
        for name in self.COLUMN_ARGUMENTS.values():
            roles = [role for role in self.COLUMN_ARGUMENTS if self.COLUMN_ARGUMENTS[role] == name]
            columns = [by_role[role] for role in roles if role in by_role]
            if columns and len(roles) == 1:
                setattr(self, name, columns[0])
            elif columns:
                setattr(self, name, columns)

    @property
    def columns_by_role(self) -> dict[str, str]:
        """The pairs in --columns: {role: name of a column}."""
        pairs = [pair.partition("=") for pair in self.columns]
        return {role: column for role, _, column in pairs}

    def conflicts(self) -> Iterator[str]:
        roles = [*self.COLUMN_ROLES, *self.COLUMN_ARGUMENTS]
        for role, column in self.columns_by_role.items():
            if role not in roles or not column:
                known = ", ".join(roles)
                yield f"--columns {role}={column}: has to be ROLE=COLUMN; the roles are {known}"
        if self.eval_split and self.eval_dataset_name:
            yield "--eval_split and --eval_dataset_name: choose one"


@dataclass(kw_only=True)
class MixtureArguments:
    """Several data sets, which are joined."""

    dataset_weights: list[float] = arg(
        [], "shares of several data sets among the rows, for example 3 1 [each row once]"
    )

    def conflicts(self) -> Iterator[str]:
        named = getattr(self, "dataset_name", [])
        if self.dataset_weights and len(self.dataset_weights) != len(named):
            yield f"--dataset_weights: give one for each of the {len(named)} data sets"


@dataclass(kw_only=True)
class LengthArguments:
    """How long a row may be."""

    max_length: int = arg(1024, "tokens per row; longer rows lose their end", POSITIVE)


@dataclass(kw_only=True)
class RowArguments:
    """The order of the rows, and the processes that prepare and read them."""

    dataset_num_proc: int | None = free(None, "processes that prepare rows", POSITIVE)
    dataloader_num_workers: int = free(0, "processes per GPU that make batches", NOT_NEGATIVE)
    train_sampling_strategy: Literal["random", "sequential", "group_by_length"] = arg(
        "random", "order of the rows; group_by_length pads less"
    )


@dataclass(kw_only=True)
class ChatArguments:
    """How conversations become text."""

    chat_template: str | None = arg(
        None, "file with a Jinja chat template [the tokenizer's]", names=["chat_template_path"]
    )
    chat_template_kwargs: dict[str, Any] | None = arg(
        None,
        "variables of the chat template as JSON, as in '{\"enable_thinking\": false}'",
        type=read_json_object,
    )


@dataclass(kw_only=True)
class InstructionTuningArguments:
    """Which tokens of a conversation are trained on, and noise on all of them."""

    learn: Literal["all", "last"] = arg("all", "which answers of a conversation are trained on")
    completion_only_loss: bool = arg(True, "in rows with a prompt and its answer, train on that")
    assistant_only_loss: bool = arg(True, "in rows with messages, train on the assistant's only")
    neftune_noise_alpha: float | None = arg(
        None, "scale of NEFTune's noise on embeddings in training, as 5 [no noise]", POSITIVE
    )

    def conflicts(self) -> Iterator[str]:
        if self.learn == "last" and not (self.completion_only_loss and self.assistant_only_loss):
            yield (
                "--learn last trains on the last answer only, and --no_completion_only_loss "
                "and --no_assistant_only_loss on the prompts too: leave one out"
            )


# ---- Training ----
@dataclass(kw_only=True)
class TrainingArguments:
    """Batches, optimizer and schedule."""

    EXTRAS: ClassVar[tuple[str, ...]] = ()  # folders of extras/ that the recipe uses
    # In which ways ranks may share rows under the recipe, by extras/mesh: tp, cp, sp
    MESH: ClassVar[Sequence[str]] = ("tp",)
    per_device_train_batch_size: int = free(8, "rows per GPU and micro-batch", POSITIVE)
    gradient_accumulation_steps: int = free(1, "micro-batches per optimizer step", POSITIVE)
    num_train_epochs: float | None = arg(3.0, "passes over the data", POSITIVE)
    max_steps: int = arg(-1, "if positive, optimizer steps to train, instead of epochs")
    optim: Optimizer = arg("adamw_torch_fused", "AdamW of torch or of bitsandbytes")
    learning_rate: float = arg(
        2e-5, "peak of the learning rate; adapters need about ten times more", POSITIVE
    )
    adam_beta1: float = arg(0.9, "decay of AdamW's running mean of gradients", SHARE)
    adam_beta2: float = arg(0.999, "decay of AdamW's running mean of squared gradients", SHARE)
    adam_epsilon: float = arg(1e-8, "what AdamW adds to the root of squared gradients", POSITIVE)
    lr_scheduler_type: Schedule = arg("linear", "schedule after the warmup")
    lr_scheduler_kwargs: dict[str, Any] | None = arg(
        None,
        "further settings of the schedule as JSON: '{\"min_lr_rate\": 0.1}' of cosine_with_min_lr",
        type=read_json_object,
    )
    warmup_steps: float = arg(
        0, "optimizer steps of warmup; a value below 1 is a share of all steps", NOT_NEGATIVE
    )
    weight_decay: float = arg(0.0, "weight decay of AdamW, not of biases and norms", NOT_NEGATIVE)
    max_grad_norm: float = arg(
        1.0, "clip the gradient's norm to this; 0 does not clip", NOT_NEGATIVE
    )
    seed: int = arg(42, "seed of adapters, dropout and the order of the rows", NOT_NEGATIVE)


@dataclass(kw_only=True)
class EvaluationArguments:
    """Evaluations and logs."""

    # What metrics.jsonl counts the loss in, which run.json has for scripts/plot_loss.py
    LOSS_UNIT: ClassVar[str] = "nats per token"
    per_device_eval_batch_size: int = free(8, "rows per GPU", POSITIVE)
    eval_strategy: Literal["no", "steps", "epoch"] = free(
        "epoch", "when to evaluate, besides after the last step"
    )
    eval_steps: int = free(500, "optimizer steps between evaluations", POSITIVE)
    eval_on_start: bool = free(False, "also evaluate before the first step")
    load_best_model_at_end: bool = arg(False, "save the model of the best evaluation at the end")
    metric_for_best_model: str = arg("loss", "metric of an evaluation by which a model is best")
    greater_is_better: bool | None = arg(
        None, "whether more of it is better [false for loss, perplexity and mse, else true]"
    )
    logging_steps: int = free(1, "steps between logged ones, which wait for the GPU", POSITIVE)
    report_to: str = free("none", "tracker that also gets the metrics, or all that are installed")
    run_name: str | None = free(None, "name of the run in the tracker [the tracker chooses]")

    def conflicts(self) -> Iterator[str]:
        usual = type(self).metric_for_best_model
        chooses = self.metric_for_best_model != usual or self.greater_is_better is not None
        if chooses and not self.load_best_model_at_end:
            yield (
                "--metric_for_best_model and --greater_is_better have no effect without "
                "--load_best_model_at_end: add it"
            )


# ---- The run ----
@dataclass(kw_only=True)
class RunArguments:
    """The folder of the run, its checkpoints, and what happens if something fails."""

    output_dir: str = free("", "folder of checkpoints, logs and result")
    save_steps: int = free(
        500, "optimizer steps between checkpoints; 0: only when the run is stopped", NOT_NEGATIVE
    )
    async_save: bool = free(False, "write checkpoints while training continues, from host memory")
    save_total_limit: int = free(2, "newest checkpoints to keep", POSITIVE)
    resume_from_checkpoint: str = free(
        "auto", "auto (the newest that is intact), none (start over) or a checkpoint's folder"
    )
    allow_change: list[str] = free([], "arguments that may differ from those of the checkpoint")
    nonfinite: Literal["stop", "skip"] = free(
        "stop", "what to do if loss or gradient are NaN or inf"
    )
    nonfinite_budget: int = free(10, "steps that --nonfinite skip may leave out", NOT_NEGATIVE)
    ddp_timeout: int = free(
        1800, "seconds that ranks wait for one, also while it prepares the rows", POSITIVE
    )
    dry_run: bool = free(False, "check arguments, strategy and data, print the summary, and stop")

    def conflicts(self) -> Iterator[str]:
        resume = self.resume_from_checkpoint
        if resume not in ("auto", "none") and not Path(resume).is_dir():
            yield f"--resume_from_checkpoint {resume}: neither auto nor none nor a folder"


@dataclass(kw_only=True)
class CommonArguments(
    ModelArguments,
    AdapterArguments,
    DataArguments,
    TrainingArguments,
    EvaluationArguments,
    RunArguments,
):
    """The arguments of every recipe."""
