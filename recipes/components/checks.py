# SPDX-License-Identifier: Apache-2.0
"""Find what makes a run impossible before anything is loaded: all problems at once, with fixes.

This module checks arguments by themselves; strategy_checks.py and device_checks.py check them
together with the launch and the machine. model_checks.py follows once the model is there.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

from accelerate import Accelerator

from components.arguments import (
    ChatArguments,
    CommonArguments,
    DataArguments,
    ExpertAdapterArguments,
    InstructionTuningArguments,
    MixtureArguments,
    PredictionArguments,
    QuantizationArguments,
)
from components.best import find_best_model_conflicts
from components.cli import find_out_of_bounds
from components.device_checks import find_device_problems
from components.expert_checks import find_expert_problems
from components.hub_ids import find_missing
from components.model_folder import find_folder_problems, find_missing_weights
from components.pipeline_checks import find_pipeline_problems, layers_of_model
from components.strategy_checks import find_missing_device, find_strategy_problems
from components.trackers import NAMED_AS_PROJECT, find_missing_tracker
from core import extras
from core.config_names import find_launch_faults
from core.data import FILE_TYPES
from core.exits import Exit, fail

# Arguments of apply_chat_template that --chat_template_kwargs cannot set
RESERVED_VARIABLES = frozenset(
    ("messages", "conversation", "tools", "tokenize", "add_generation_prompt", "chat_template")
)


def check_launch(args: CommonArguments) -> None:
    """End with 64 if the launcher's config file has faults, or a GPU or an extra is missing.

    Faults are keys that accelerate would ignore, or under which the recipes do not run. Every rank
    calls this before it makes its Accelerator, and finds the same faults.
    """
    errors = [*extras.find_missing(args.EXTRAS), *find_launch_faults()]
    if not errors:
        for before_accelerator in extras.hooks(args.EXTRAS, "before_accelerator"):
            errors.extend(before_accelerator(args))
    errors.extend(find_missing_device())
    if errors:
        fail(Exit.USAGE, *errors, *find_conflicts(args))


def find_problems(args: CommonArguments, accelerator: Accelerator) -> list[str]:
    """Return a line for the user for each problem that makes the run impossible."""
    if find_out_of_bounds(args):  # The other checks divide by sizes, which may be 0 then
        return list(find_conflicts(args))
    return [
        *find_conflicts(args),
        *find_missing_weights(args),
        *find_strategy_problems(args, accelerator),
        *find_device_problems(args, accelerator),
        *find_pipeline_problems(args, accelerator, layers_of_model(args)),
        *find_expert_problems(args, accelerator),
        *find_missing_tracker(args),
    ]


def find_conflicts(args: CommonArguments) -> Iterator[str]:
    """Yield a line with the fix for each conflict, whatever the launch and the machine are."""
    yield from find_out_of_bounds(args)
    yield from find_quantization_conflicts(args)
    yield from find_adapter_conflicts(args)
    if args.dtype == "float16" and not args.use_peft:
        yield (
            "float16 weights cannot be trained without an fp32 master copy: use --dtype float32 "
            "with mixed_precision: fp16 in the YAML"
        )
    yield from find_best_model_conflicts(args)
    if args.save_only_model and args.load_best_model_at_end:
        yield (
            "--save_only_model leaves out what --load_best_model_at_end restores at the end: "
            "choose one"
        )
    yield from find_path_problems(args)
    yield from find_eval_split_problems(args)
    yield from find_chat_conflicts(args)
    yield from find_weight_conflicts(args)
    yield from find_prediction_conflicts(args)
    unknown = set(args.allow_change) - set(vars(args)) - {"data"}
    if unknown:
        yield f"--allow_change {' '.join(sorted(unknown))}: not the name of an argument"
    yield from args.find_own_conflicts()


def find_quantization_conflicts(args: CommonArguments) -> Iterator[str]:
    """Yield a line for each conflict about a quantized base."""
    if not isinstance(args, QuantizationArguments):
        return
    if args.load_in_8bit and args.load_in_4bit:
        yield "--load_in_8bit and --load_in_4bit: choose one"
    given = flags_given(args, "load_in_8bit", "load_in_4bit")
    if given and not args.use_peft:
        yield (
            f"{given}: a quantized base can only be trained through LoRA adapters: add --use_peft"
        )


def find_adapter_conflicts(args: CommonArguments) -> Iterator[str]:
    """Yield a line for each option of adapters that cannot take effect."""
    if not args.use_peft:
        given = changed_adapter_flags(args)
        if given:
            yield f"{given}: for adapters only: add --use_peft"
    if args.modules_to_save and not args.use_peft:
        yield (
            "--modules_to_save: without adapters all modules are trained and saved: add --use_peft"
        )
    if isinstance(args, ExpertAdapterArguments) and args.use_peft:
        if args.lora_target_parameters and args.lora_dropout > 0:
            yield (
                "--lora_dropout is for adapters of linear layers (peft): leave it out, or pass "
                "--lora_target_parameters without a value, which leaves the others out"
            )


def changed_adapter_flags(args: CommonArguments) -> str:
    """Return the flags of adapters whose value is not their default, joined by "and".

    --use_peft and --modules_to_save are not among them.
    """
    changed = []
    for field in dataclasses.fields(args):
        name = field.name
        if not name.startswith("lora_") and name not in ("use_rslora", "use_dora"):
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if getattr(args, name) != default:
            changed.append(f"--{name}")
    return " and ".join(changed)


def find_eval_split_problems(args: DataArguments) -> Iterator[str]:
    """Yield a line for each reason why --eval_split cannot be meant."""
    if args.eval_split > 1 and args.eval_split % 1:
        yield f"--eval_split {args.eval_split}: use a share below 1, or a whole number of rows"
    if args.eval_split and args.eval_dataset_name:
        yield "--eval_split and --eval_dataset_name: choose one"


def find_weight_conflicts(args: CommonArguments) -> Iterator[str]:
    """Yield a line for each reason why --dataset_weights cannot be meant."""
    if not isinstance(args, MixtureArguments) or not args.dataset_weights:
        return
    written = " ".join(f"{weight:g}" for weight in args.dataset_weights)
    if len(args.dataset_weights) != len(args.dataset_name):
        yield (
            f"--dataset_weights {written}: give one for each of the {len(args.dataset_name)} data "
            "sets in --dataset_name"
        )
    if not all(0 < weight < math.inf for weight in args.dataset_weights):
        yield f"--dataset_weights {written}: each must be above 0"


def find_chat_conflicts(args: CommonArguments) -> Iterator[str]:
    """Yield a line for each thing that is wrong with how conversations become text."""
    if isinstance(args, ChatArguments) and args.chat_template is not None:
        if not Path(args.chat_template).is_file():
            yield f"--chat_template {args.chat_template}: no such file"
    if isinstance(args, ChatArguments):
        for name in RESERVED_VARIABLES.intersection(args.chat_template_kwargs or ()):
            yield f"--chat_template_kwargs: {name} is set by the recipe itself: leave it out"
    if isinstance(args, InstructionTuningArguments) and args.learn == "last":
        if not (args.completion_only_loss and args.assistant_only_loss):
            yield (
                "--learn last trains on the last answer only, and --no_completion_only_loss "
                "and --no_assistant_only_loss on the prompts too: leave one out"
            )


def find_prediction_conflicts(args: CommonArguments) -> Iterator[str]:
    """Yield a line for each reason why no answers can be generated, or none are asked for."""
    if not isinstance(args, PredictionArguments):
        return
    if args.predict_with_generate:
        if args.eval_strategy == "no":
            yield (
                "--predict_with_generate generates answers in evaluations, and --eval_strategy no "
                "makes none: use steps or epoch"
            )
        return
    for name in ("num_predictions", "generation_max_new_tokens"):
        if getattr(args, name) != getattr(PredictionArguments, name):
            yield f"--{name} has no effect without --predict_with_generate: add it"
    if args.metric_for_best_model.removeprefix("eval_") == "exact_match":
        yield "--metric_for_best_model exact_match needs --predict_with_generate: add it"


def flags_given(args: CommonArguments, *names: str) -> str:
    """Return those of the named flags that are on, joined by "and"."""
    return " and ".join(f"--{name}" for name in names if getattr(args, name))


def find_missing_data(args: CommonArguments) -> Iterator[str]:
    """Yield a line for each file or folder of data that does not exist.

    A run would find that too, but only after it has looked for the model on the hub.
    """
    names = [args.dataset_name]
    if isinstance(args, MixtureArguments):
        names = list(args.dataset_name)
    if args.eval_dataset_name and args.eval_strategy != "no":
        names.append(args.eval_dataset_name)
    for name in names:
        if Path(name).suffix in FILE_TYPES and not Path(name).exists():
            yield f"{name}: no such file"
        elif missing := find_missing(name, "dataset"):
            yield missing


def find_path_problems(args: CommonArguments) -> Iterator[str]:
    """Yield a line for each path in the arguments that is not what it should be."""
    missing = find_missing(args.model_name_or_path)
    if missing is not None:
        yield f"--model_name_or_path {missing}"
    yield from find_folder_problems(args)
    if Path(args.output_dir).is_file():
        yield f"--output_dir {args.output_dir}: is a file"
    if args.run_name and args.report_to in NAMED_AS_PROJECT:
        events = Path(args.output_dir, args.run_name).resolve()
        if not events.is_relative_to(Path(args.output_dir).resolve()):
            yield f"--run_name {args.run_name}: has to be a folder inside --output_dir"
    resume = args.resume_from_checkpoint
    if resume not in ("auto", "none") and not Path(resume).is_dir():
        yield f"--resume_from_checkpoint {resume}: neither auto nor none nor a folder"
