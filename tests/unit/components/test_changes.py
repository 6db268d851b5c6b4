# SPDX-License-Identifier: Apache-2.0
"""A run continues only with the arguments that it began with, if they change what it does."""

import dataclasses
import json

import pytest

from components import arguments
from components.changes import find_changes
from components.cli import markers_of, may_change
from example_arguments import language_model_arguments

# Arguments that change what is trained on, or how: a resumed run may have other values only where
# --allow_change names them
CHANGES_THE_RUN = {
    "ModelArguments": "model_name_or_path model_revision dtype tf32",
    "CompileArguments": "",
    "LossInHeadArguments": "",
    "LigerArguments": "",
    "QuantizationArguments": (
        "load_in_8bit load_in_4bit bnb_4bit_quant_type bnb_4bit_use_double_quant"
    ),
    "AdapterArguments": (
        "use_peft lora_r lora_alpha lora_dropout lora_target_modules modules_to_save"
    ),
    "LoraVariantArguments": "use_rslora use_dora",
    "PipelineArguments": "",
    "ExpertParallelArguments": "",
    "ExpertAdapterArguments": "lora_target_parameters",
    "DataArguments": (
        "dataset_name dataset_config dataset_train_split eval_split columns skip_bad_rows"
    ),
    "MixtureArguments": "dataset_name dataset_weights",
    "ChatArguments": "chat_template chat_template_kwargs",
    "InstructionTuningArguments": (
        "chat_template chat_template_kwargs learn completion_only_loss assistant_only_loss "
        "neftune_noise_alpha"
    ),
    "LengthArguments": "max_length",
    "PreparationArguments": "",
    "RowArguments": "",
    "LabelArguments": "problem_type class_weights",
    "SamplingArguments": "train_sampling_strategy",
    "TrainingArguments": (
        "num_train_epochs max_steps optim adam_beta1 adam_beta2 adam_epsilon learning_rate "
        "lr_scheduler_type lr_scheduler_kwargs warmup_steps weight_decay max_grad_norm seed"
    ),
    "EvaluationArguments": "load_best_model_at_end metric_for_best_model greater_is_better",
    "EvalOnStartArguments": "",
    "PredictionArguments": "",
    "RunArguments": "",
}
UNSAFE = {"data", "packing", *" ".join(CHANGES_THE_RUN.values()).split()}
IDENTITY = {"rows_per_step": 8, "data": "abc"}


@pytest.mark.parametrize("group", CHANGES_THE_RUN)
def test_each_argument_is_in_one_class(group):
    kind = getattr(arguments, group)
    names = {field.name for field in dataclasses.fields(kind)}
    assert names - may_change(kind) == set(CHANGES_THE_RUN[group].split())


def test_no_group_is_left_out():
    kinds = [kind for kind in vars(arguments).values() if hasattr(kind, "GROUP")]
    # Groups that only combine others, like CausalLMArguments, have no arguments to classify
    with_own_arguments = {kind.__name__ for kind in kinds if kind.__annotations__}
    assert with_own_arguments == set(CHANGES_THE_RUN)


@pytest.fixture
def args():
    return language_model_arguments()


def before(args, **changed):
    """What the checkpoint says of a run that differs only in this."""
    return json.loads(json.dumps(vars(args) | IDENTITY | changed))


def test_the_same_call_has_not_changed(args):
    changes = find_changes(args, before(args), IDENTITY, 1)
    assert changes.lines == [] and changes.refusal == ""


OF_THE_EXAMPLE = {"data", *vars(language_model_arguments())}


@pytest.mark.parametrize("name", sorted(OF_THE_EXAMPLE & UNSAFE))
def test_what_changes_the_run_is_refused(name, args):
    saved = before(args, **{name: "another"})
    changes = find_changes(args, saved, IDENTITY, 1)
    now = (vars(args) | IDENTITY)[name]
    assert changes.lines == [f"{name} another -> {now}"]
    assert f"other values of {name}, listed above" in changes.refusal
    assert f"--allow_change {name}," in changes.refusal
    args.allow_change = [name]
    changes = find_changes(args, saved, IDENTITY, 1)
    assert f"{name} another -> {now}" in changes.lines and changes.refusal == ""


def test_the_rest_may_change_and_is_told(args):
    free = may_change(type(args))
    changes = find_changes(args, before(args, **dict.fromkeys(free, "another")), IDENTITY, 1)
    told = {line.split()[0] for line in changes.lines}
    assert told == free - {"allow_change"} and changes.refusal == ""


def test_arguments_that_an_older_recipe_had_not_are_no_change(args):
    saved = before(args)
    del saved["use_dora"]
    assert find_changes(args, saved, IDENTITY, 1).lines == []


def test_bounds_and_classes_do_not_get_in_each_others_way(args):
    """A field's markers are those of one class: a bound must not hide that it may change."""
    markers = markers_of(type(args))
    assert len(markers["per_device_train_batch_size"]) == 2
    assert "per_device_train_batch_size" in may_change(type(args))


@pytest.mark.parametrize(
    ("ranks", "fix"),
    [
        (1, "_size 8 --gradient_accumulation_steps 3"),
        (5, "divides 24"),
        (3, "_size 8 --gradient_accumulation_steps 1"),
    ],
)
def test_other_rows_per_step_are_refused_with_what_fits(ranks, fix, args):
    identity = {"rows_per_step": 7, "data": "abc"}
    changes = find_changes(args, before(args, rows_per_step=24), identity, ranks)
    assert changes.lines == ["rows_per_step 24 -> 7"]
    assert "has 24 rows, but here it would have 7: use" in changes.refusal
    assert changes.refusal.endswith(fix)
