# SPDX-License-Identifier: Apache-2.0
"""The arguments that recipes share, in groups; names and meanings are transformers' and TRL's.

A recipe's own dataclass inherits from CommonArguments and from the groups that it supports. Checks
and components take the group that they need, so a type checker knows which arguments exist.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from components.cli import MAY_CHANGE, Above, AlsoNamed, AnyNumber, AtLeast, Below, ReadBy, arg

Optimizer = Literal[
    "adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"
]
LearningRateSchedule = Literal[
    "linear",
    "cosine",
    "cosine_with_min_lr",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
]
SamplingStrategy = Literal["random", "sequential", "group_by_length"]
PipelineSchedule = Literal["1f1b", "gpipe", "interleaved", "interleaved_zero_bubble", "zbv"]
Tracker = Literal[
    "none",
    "all",
    "tensorboard",
    "wandb",
    "trackio",
    "comet_ml",
    "mlflow",
    "clearml",
    "dvclive",
    "swanlab",
    "aim",
]


def full_name_of_dtype(name: str) -> str:
    """Return torch's name of a dtype; accelerate's names bf16, fp16 and fp32 are understood too."""
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, name)


def read_json_object(text: str) -> dict[str, Any]:
    """Return the object of a JSON text; an ArgumentTypeError refuses anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if not isinstance(value, dict):
        example = '{"min_lr": 1e-6}'
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object, as {example} is")
    return value


def without_dashes(name: str) -> str:
    """Return the name of an argument that may have been written as a flag."""
    return name.lstrip("-")


@dataclass(kw_only=True)
class ModelArguments:
    """Which model is trained, and what it computes with."""

    GROUP: ClassVar[str] = "Model"
    model_name_or_path: str = arg("", "hub id or folder of the model")
    model_revision: str = arg("main", "branch, tag or commit of a model on the hub")
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], ReadBy(full_name_of_dtype)] = arg(
        "float32",
        "type of the weights, also as fp32, bf16 or fp16; bfloat16 halves the memory of a frozen "
        "base",
    )
    no_master_weights: Annotated[bool, MAY_CHANGE] = arg(
        False,
        "allow --dtype bfloat16 without --use_peft where the strategy keeps no fp32 copy of the "
        "weights, as under single.yaml and ddp.yaml; this halves their memory and loses updates "
        "below 1/256 of a weight",
    )
    attn_implementation: Annotated[str | None, MAY_CHANGE] = arg(
        None,
        "eager, sdpa, flex_attention, varlen (torch's own FlashAttention), flash_attention_2, "
        "_3, _4, or the hub id of a kernel [transformers chooses: sdpa if the model supports it, "
        "otherwise eager]",
    )
    gradient_checkpointing: Annotated[bool, MAY_CHANGE] = arg(
        False, "recompute activations in the backward pass: much less memory, a third more compute"
    )
    tf32: bool = arg(False, "multiply fp32 matrices in TF32: faster and less exact")


@dataclass(kw_only=True)
class CompileArguments:
    """Compiling the model's layers."""

    GROUP: ClassVar[str] = "Model"
    torch_compile: Annotated[bool, MAY_CHANGE] = arg(
        False, "compile each kind of layer once, which takes a minute at the start"
    )


@dataclass(kw_only=True)
class LossInHeadArguments:
    """The loss of causal language models, computed in pieces inside the output head."""

    GROUP: ClassVar[str] = "Model"
    max_logits_mib: Annotated[float | None, Above(0), MAY_CHANGE] = arg(
        None,
        "most MiB of fp32 logits to hold at a time; a larger loss is computed in pieces "
        "[1/64 of the GPU's memory, 256 on a CPU]",
    )


@dataclass(kw_only=True)
class LigerArguments:
    """Liger's kernels."""

    GROUP: ClassVar[str] = "Model"
    use_liger_kernel: Annotated[bool, MAY_CHANGE] = arg(
        False, "use Liger's Triton kernels for norms, rotary positions and MLPs"
    )


@dataclass(kw_only=True)
class QuantizationArguments:
    """The quantized base under adapters."""

    GROUP: ClassVar[str] = "Quantized base (bitsandbytes)"
    load_in_8bit: bool = arg(False, "load the base in int8 (LLM.int8)")
    load_in_4bit: bool = arg(False, "load the base in 4 bits (QLoRA)")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = arg("nf4", "4-bit number format")
    bnb_4bit_use_double_quant: bool = arg(
        False, "quantize the scales too, which saves 0.37 bits per parameter"
    )


@dataclass(kw_only=True)
class AdapterArguments:
    """LoRA adapters."""

    GROUP: ClassVar[str] = "Adapters (peft)"
    use_peft: bool = arg(False, "train LoRA adapters on a frozen base")
    lora_r: Annotated[int, Above(0)] = arg(16, "rank of the two matrices of an adapter")
    lora_alpha: Annotated[float, Above(0)] = arg(
        32, "adapters are multiplied by alpha / r, or by alpha / sqrt(r) with --use_rslora"
    )
    lora_dropout: Annotated[float, AtLeast(0), Below(1)] = arg(
        0.0, "dropout on the input of the adapters"
    )
    lora_target_modules: list[str] = arg(
        ["all-linear"],
        "names of the layers that get adapters; all-linear stands for all linear layers",
    )
    modules_to_save: Annotated[list[str], AlsoNamed("lora_modules_to_save")] = arg(
        [],
        "names of modules that are trained whole beside the adapters and saved with them, for "
        "example lm_head; memory holds the original and the copy that is trained, and "
        "scripts/plan_memory.py counts both; also as --lora_modules_to_save",
    )


@dataclass(kw_only=True)
class LoraVariantArguments:
    """Variants of LoRA for linear layers."""

    GROUP: ClassVar[str] = "Adapters (peft)"
    use_rslora: bool = arg(False, "multiply adapters by alpha / sqrt(r) (rsLoRA)")
    use_dora: bool = arg(False, "train magnitude and direction of weights apart (DoRA)")


@dataclass(kw_only=True)
class PipelineArguments:
    """The stages of a pipeline, and what goes through them."""

    GROUP: ClassVar[str] = "Pipeline"
    pp_size: Annotated[int, AtLeast(2), MAY_CHANGE] = arg(
        2,
        "ranks per pipeline, each with a part of the layers; all ranks divided by it are the "
        "pipelines, each with rows of its own",
    )
    pipeline_schedule: Annotated[PipelineSchedule, MAY_CHANGE] = arg(
        "1f1b",
        "order of forward and backward passes; interleaved, interleaved_zero_bubble and zbv have "
        "two stages per rank and idle less, the last two by computing gradients of weights later",
    )
    num_microbatches: Annotated[int | None, Above(0), MAY_CHANGE] = arg(
        None,
        "parts of a batch of --per_device_train_batch_size rows that are under way at a time; the "
        "more, the less the ranks wait [one for each row]",
    )
    shard_stages: Annotated[bool, MAY_CHANGE] = arg(
        False,
        "split the weights, gradients and optimizer state of each stage over the pipelines with "
        "FSDP2 [each pipeline has whole stages]",
    )


@dataclass(kw_only=True)
class ExpertAdapterArguments:
    """LoRA of experts, which are parameters of a mixture and not layers."""

    GROUP: ClassVar[str] = "Adapters (peft)"
    lora_target_parameters: Annotated[list[str], AnyNumber()] = arg(
        ["experts.gate_up_proj", "experts.down_proj"],
        "ends of the names of parameters that get adapters, such as those of experts; gate.weight "
        "also trains most routers; without a value, no parameters do",
    )


@dataclass(kw_only=True)
class ExpertParallelArguments:
    """How experts are spread over ranks."""

    GROUP: ClassVar[str] = "Mixture of experts"
    ep_size: Annotated[int, AtLeast(1), MAY_CHANGE] = arg(
        1,
        "ranks that share the experts of each layer, each with some of them whole, and with rows "
        "of its own (ep.yaml, fsdp2_ep.yaml); 1 leaves all experts on each rank",
    )


@dataclass(kw_only=True)
class DataArguments:
    """Where the data come from.

    Attributes:
        COLUMN_ROLES: the roles in --columns that no other argument names.
        COLUMN_ARGUMENTS: {role in --columns: the argument that also names its column}.
    """

    GROUP: ClassVar[str] = "Data"
    COLUMN_ROLES: ClassVar[Sequence[str]] = ()
    COLUMN_ARGUMENTS: ClassVar[Mapping[str, str]] = {}
    # Each recipe narrows the type: str, or list[str] if it takes several data sets
    dataset_name: Any = arg("", "hub id, folder, or .json, .jsonl, .csv or .parquet file")
    dataset_config: str | None = arg(None, "name of the configuration of a data set on the hub")
    dataset_train_split: str = arg("train", "split to train on")
    dataset_test_split: Annotated[str, MAY_CHANGE] = arg(
        "test", "split to evaluate on, if there is one"
    )
    eval_dataset_name: Annotated[str | None, MAY_CHANGE] = arg(
        None, "evaluate on this file or data set instead of a split"
    )
    eval_split: Annotated[float, AtLeast(0)] = arg(
        0,
        "hold out this share (below 1) or number of the training rows, drawn by --seed, and "
        "evaluate on them instead",
    )
    columns: list[str] = arg(
        [], "names of your columns as ROLE=COLUMN, where they differ from those of the recipe"
    )
    skip_bad_rows: bool = arg(False, "leave out the rows that cannot be used, and count them")

    def __post_init__(self) -> None:
        """Let --columns set the arguments that name a column too, where these have defaults."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, value in self.columns_by_argument.items():
            if getattr(self, name) == defaults[name]:
                setattr(self, name, value)

    @property
    def columns_by_role(self) -> dict[str, str]:
        """The pairs in --columns: {role: name of a column}."""
        pairs = [pair.partition("=") for pair in self.columns]
        return {role: column for role, _, column in pairs}

    @property
    def columns_by_argument(self) -> dict[str, Any]:
        """The same for roles whose column another argument names too: {argument: its value}.

        The value of an argument of several roles is the list of their columns.
        """
        values: dict[str, Any] = {}
        arguments = list(self.COLUMN_ARGUMENTS.values())
        for role, name in self.COLUMN_ARGUMENTS.items():
            column = self.columns_by_role.get(role)
            if column is None:
                continue
            if arguments.count(name) > 1:
                values.setdefault(name, []).append(column)
            else:
                values[name] = column
        return values


@dataclass(kw_only=True)
class MixtureArguments:
    """The data sets of a recipe that takes several."""

    GROUP: ClassVar[str] = "Data"
    dataset_name: list[str] = arg(
        [], "hub id, folder, or .json, .jsonl, .csv or .parquet file; several are joined"
    )
    dataset_weights: list[float] = arg(
        [],
        "shares of several data sets among the rows, for example 3 1; a small data set is repeated "
        "and a large one is cut, and the number of rows stays that of all [each row once]",
    )


@dataclass(kw_only=True)
class LengthArguments:
    """How long a row may be."""

    GROUP: ClassVar[str] = "Data"
    max_length: Annotated[int, Above(0)] = arg(1024, "tokens per row; longer rows lose their end")


@dataclass(kw_only=True)
class PreparationArguments:
    """Data sets whose rows are prepared before training."""

    GROUP: ClassVar[str] = "Data"
    dataset_num_proc: Annotated[int | None, Above(0), MAY_CHANGE] = arg(
        None, "processes that prepare rows"
    )


@dataclass(kw_only=True)
class RowArguments(PreparationArguments):
    """Data sets whose rows are prepared before training, so that batches only read them."""

    GROUP: ClassVar[str] = "Data"
    dataloader_num_workers: Annotated[int, AtLeast(0), MAY_CHANGE] = arg(
        0, "processes per GPU that make batches"
    )


@dataclass(kw_only=True)
class SamplingArguments:
    """The order of the rows."""

    GROUP: ClassVar[str] = "Data"
    train_sampling_strategy: SamplingStrategy = arg(
        "random", "order of the rows; group_by_length pads less"
    )


@dataclass(kw_only=True)
class LabelArguments:
    """What the labels are, and how much each row weighs."""

    GROUP: ClassVar[str] = "Data"
    problem_type: Literal["single_label_classification", "regression"] | None = arg(
        None, "what the labels are [inferred from the labels]"
    )
    class_weights: Literal["none", "balanced"] = arg(
        "none", "weights of rows in the loss; balanced gives all classes the same total weight"
    )


@dataclass(kw_only=True)
class TrainingArguments:
    """Batches, optimizer and schedule."""

    GROUP: ClassVar[str] = "Training"
    EXTRAS: ClassVar[tuple[str, ...]] = ()  # folders of extras/ that the recipe uses
    # Dimensions of a mesh in which several ranks may share a row under a recipe: tp, cp, sp
    MESH: ClassVar[Sequence[str]] = ("tp",)
    per_device_train_batch_size: Annotated[int, Above(0), MAY_CHANGE] = arg(
        8, "rows per GPU and micro-batch"
    )
    gradient_accumulation_steps: Annotated[int, Above(0), MAY_CHANGE] = arg(
        1, "micro-batches per optimizer step"
    )
    num_train_epochs: Annotated[float | None, Above(0)] = arg(3.0, "passes over the data")
    max_steps: int = arg(-1, "if positive, optimizer steps to train, instead of epochs")
    optim: Optimizer = arg("adamw_torch_fused", "AdamW of torch or of bitsandbytes")
    learning_rate: Annotated[float, Above(0)] = arg(
        2e-5, "peak of the learning rate; adapters need about ten times more"
    )
    adam_beta1: Annotated[float, AtLeast(0), Below(1)] = arg(
        0.9, "decay of AdamW's running mean of gradients, per step"
    )
    adam_beta2: Annotated[float, AtLeast(0), Below(1)] = arg(
        0.999, "decay of AdamW's running mean of squared gradients, per step"
    )
    adam_epsilon: Annotated[float, Above(0)] = arg(
        1e-8, "number that AdamW adds to the root of the squared gradients, against division by 0"
    )
    lr_scheduler_type: LearningRateSchedule = arg("linear", "schedule after the warmup")
    lr_scheduler_kwargs: Annotated[dict[str, Any] | None, ReadBy(read_json_object)] = arg(
        None,
        "further settings of the schedule as JSON: cosine_with_min_lr needs min_lr or min_lr_rate, "
        "the share of the peak that is left at the end, as in '{\"min_lr_rate\": 0.1}'",
    )
    warmup_steps: Annotated[float, AtLeast(0)] = arg(
        0, "optimizer steps of warmup; a value below 1 is a share of all steps"
    )
    weight_decay: Annotated[float, AtLeast(0)] = arg(
        0.0, "weight decay of AdamW, which spares biases and norms"
    )
    max_grad_norm: Annotated[float, AtLeast(0)] = arg(
        1.0, "clip the global norm of the gradient to this; 0 does not clip"
    )
    seed: Annotated[int, AtLeast(0)] = arg(
        42, "seed of adapters, dropout and the order of the rows"
    )


@dataclass(kw_only=True)
class ChatArguments:
    """How conversations become text."""

    GROUP: ClassVar[str] = "Data"
    chat_template: Annotated[str | None, AlsoNamed("chat_template_path")] = arg(
        None,
        "file with a Jinja chat template to use, and to save with the model, in place of the "
        "tokenizer's own",
    )
    chat_template_kwargs: Annotated[dict[str, Any] | None, ReadBy(read_json_object)] = arg(
        None,
        "variables of the chat template as JSON, as in '{\"enable_thinking\": false}'",
    )


@dataclass(kw_only=True)
class InstructionTuningArguments(ChatArguments):
    """Which tokens of a conversation are trained on, and noise on all of them."""

    GROUP: ClassVar[str] = "Training"
    learn: Literal["all", "last"] = arg(
        "all", "which answers of a conversation are trained on: all of them, or only the last"
    )
    completion_only_loss: bool = arg(
        True,
        "in rows with a prompt and its answer, train only on the answer and not on the prompt",
    )
    assistant_only_loss: bool = arg(
        True, "in rows with messages, train only on what the assistant says"
    )
    neftune_noise_alpha: Annotated[float | None, Above(0)] = arg(
        None,
        "scale of the uniform noise that NEFTune adds to embeddings in training, for example 5 "
        "[no noise]",
    )


@dataclass(kw_only=True)
class EvaluationArguments:
    """When to evaluate."""

    GROUP: ClassVar[str] = "Evaluation and logs"
    # What metrics.jsonl counts the loss in, which run.json has for scripts/plot_loss.py
    LOSS_UNIT: ClassVar[str] = "nats per token"
    per_device_eval_batch_size: Annotated[int, Above(0), MAY_CHANGE] = arg(8, "rows per GPU")
    eval_strategy: Annotated[Literal["no", "steps", "epoch"], MAY_CHANGE] = arg(
        "epoch", "when to evaluate, besides after the last step"
    )
    eval_steps: Annotated[int, Above(0), MAY_CHANGE] = arg(
        500, "optimizer steps between evaluations"
    )
    load_best_model_at_end: bool = arg(
        False,
        "save the model of the best evaluation at the end, in place of that of the last step; its "
        "checkpoint is kept beside the newest",
    )
    metric_for_best_model: str = arg(
        "loss", "metric of an evaluation that says which model is best, with or without eval_"
    )
    greater_is_better: bool | None = arg(
        None,
        "whether a larger value of that metric is better [false for loss, perplexity and mse, "
        "otherwise true]",
    )
    logging_steps: Annotated[int, Above(0), MAY_CHANGE] = arg(
        1,
        "optimizer steps between logged steps; only a logged step waits for the GPU",
    )
    report_to: Annotated[Tracker, MAY_CHANGE] = arg("none", "tracker that also gets the metrics")
    run_name: Annotated[str | None, MAY_CHANGE] = arg(
        None, "name of the run in the tracker [the tracker chooses]"
    )


@dataclass(kw_only=True)
class PredictionArguments:
    """Answers that a language model generates in evaluations."""

    GROUP: ClassVar[str] = "Evaluation and logs"
    predict_with_generate: Annotated[bool, MAY_CHANGE] = arg(
        False,
        "in each evaluation, generate answers to held-out rows: they are written to "
        "predictions-STEP.jsonl, and exact match is reported for rows with a short answer",
    )
    num_predictions: Annotated[int, Above(0), MAY_CHANGE] = arg(
        64, "rows that --predict_with_generate answers, spread over the rows to evaluate on"
    )
    generation_max_new_tokens: Annotated[int, Above(0), MAY_CHANGE] = arg(
        128, "most tokens to generate per answer"
    )


@dataclass(kw_only=True)
class EvalOnStartArguments:
    """An evaluation before the first step."""

    GROUP: ClassVar[str] = "Evaluation and logs"
    eval_on_start: Annotated[bool, MAY_CHANGE] = arg(False, "also evaluate before the first step")


@dataclass(kw_only=True)
class RunArguments:
    """The folder of the run, its checkpoints, and what happens if something fails."""

    GROUP: ClassVar[str] = "Run and checkpoints"
    output_dir: Annotated[str, MAY_CHANGE] = arg("", "folder of checkpoints, logs and result")
    output_url: Annotated[str | None, MAY_CHANGE] = arg(
        None,
        "copy of --output_dir in an object store, as s3://BUCKET/RUN or gs://BUCKET/RUN: each "
        "checkpoint and the result are uploaded, and a run whose folder is lost continues from "
        "there [no copy]",
    )
    save_steps: Annotated[int, AtLeast(0), MAY_CHANGE] = arg(
        500, "optimizer steps between checkpoints; 0: only when the run is stopped"
    )
    save_only_model: Annotated[bool, MAY_CHANGE] = arg(
        False,
        "leave optimizer state out of checkpoints, which takes a third of the space; a run cannot "
        "be continued from these, only from the one that is written when it is stopped",
    )
    async_save: Annotated[bool, MAY_CHANGE] = arg(
        False,
        "write checkpoints in the background while training continues; until one is written, each "
        "rank needs host memory for a copy of its share, which is 12 bytes per trained parameter "
        "divided by the number of ranks",
    )
    save_total_limit: Annotated[int, Above(0), MAY_CHANGE] = arg(2, "newest checkpoints to keep")
    resume_from_checkpoint: Annotated[str, MAY_CHANGE] = arg(
        "auto", "auto (the newest that is intact), none (start over) or a checkpoint's folder"
    )
    allow_change: Annotated[list[str], ReadBy(without_dashes), MAY_CHANGE] = arg(
        [],
        "arguments that are allowed to differ from the checkpoint's, even though they affect "
        "training",
    )
    nonfinite: Annotated[Literal["stop", "skip"], MAY_CHANGE] = arg(
        "stop",
        "what to do if loss or gradient are not finite; such a step never changes the weights",
    )
    nonfinite_budget: Annotated[int, AtLeast(0), MAY_CHANGE] = arg(
        10, "steps that --nonfinite skip may leave out"
    )
    ddp_timeout: Annotated[int, Above(0), MAY_CHANGE] = arg(
        1800,
        "seconds that ranks wait for each other, including while one prepares the rows; after "
        "that, each prints its stacks and ends. A checkpoint may take longer, as its size allows. "
        "If preparing the rows takes longer, first run the same command with --num_processes 1 and "
        "--dry_run to fill the cache",
    )
    dry_run: Annotated[bool, MAY_CHANGE] = arg(
        False,
        "check arguments, strategy, data and disk without loading weights, print the start summary "
        "and how to plan the memory, and stop",
    )


@dataclass(kw_only=True)
class CommonArguments(
    RunArguments,
    EvaluationArguments,
    TrainingArguments,
    DataArguments,
    AdapterArguments,
    ModelArguments,
):
    """The arguments of every recipe."""

    def find_own_conflicts(self) -> Iterable[str]:
        """Return a line with the fix for each conflict between a recipe's own arguments."""
        return ()


@dataclass(kw_only=True)
class PipelineTrainingArguments(PipelineArguments, LossInHeadArguments, CommonArguments):
    """The arguments of the recipes that train a causal language model over a pipeline."""


@dataclass(kw_only=True)
class DenseModelArguments(
    LoraVariantArguments, QuantizationArguments, CompileArguments, CommonArguments
):
    """The arguments of every recipe except that of mixtures of experts."""


@dataclass(kw_only=True)
class CausalLMArguments(LengthArguments, LigerArguments, LossInHeadArguments, DenseModelArguments):
    """The arguments of the recipes for dense causal language models."""
