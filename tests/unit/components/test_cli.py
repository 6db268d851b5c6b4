# SPDX-License-Identifier: Apache-2.0
"""A recipe's command line: arguments from a file, flags as people write them, and calls refused in
one line."""

import dataclasses
import importlib
import json

import pytest

from components.cli import find_out_of_bounds, may_change, parse_arguments
from jobs import RECIPES


def parse(*words, recipe="llama"):
    return parse_arguments(importlib.import_module(recipe).Arguments, words=[*map(str, words)])


def refused(capsys, *words):
    """The lines that a wrong call prints."""
    with pytest.raises(SystemExit) as stopped:
        parse(*words)
    assert stopped.value.code == 64
    return capsys.readouterr().err.splitlines()


def test_a_flag_may_be_written_with_dashes_or_underscores():
    assert parse("--learning-rate", "1e-3").learning_rate == 1e-3
    assert parse("--learning_rate=1e-3").learning_rate == 1e-3


@pytest.mark.parametrize("name", ["lora_modules_to_save", "lora-modules-to-save"])
def test_trls_name_of_a_flag_is_understood_too(name, tmp_path):
    assert parse(f"--{name}", "lm_head", "norm").modules_to_save == ["lm_head", "norm"]
    path = tmp_path / "run.yaml"
    path.write_text(f"{name}: [lm_head]\n")
    assert parse("--config", path).modules_to_save == ["lm_head"]


def test_a_config_gives_arguments_and_the_command_line_overrides_them(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 2e-4\npacking: true\nlora_target_modules: [q_proj, v_proj]\n")
    args = parse("--config", path, "--learning_rate", "1e-3")
    assert (args.learning_rate, args.packing) == (1e-3, True)
    assert args.lora_target_modules == ["q_proj", "v_proj"]


def test_settings_of_a_schedule_are_json_or_a_mapping_of_a_config(tmp_path, capsys):
    settings = {"min_lr": 1e-6}
    assert parse("--lr_scheduler_kwargs", '{"min_lr": 1e-6}').lr_scheduler_kwargs == settings
    path = tmp_path / "run.yaml"
    path.write_text("lr_scheduler_kwargs:\n  min_lr: 1.0e-6\n")
    assert parse("--config", path).lr_scheduler_kwargs == settings
    for wrong in ("min_lr=1e-6", "3"):
        [line] = refused(capsys, "--lr_scheduler_kwargs", wrong)
        assert f"{wrong} is not a JSON object" in line


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_changed_flag_wins_over_the_run_json_and_all_else_is_kept(recipe, tmp_path):
    before = parse("--seed", 7, "--use_peft", "--lora_target_modules", "q", "v", recipe=recipe)
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"arguments": vars(before)}))
    changed = ["--use_peft", "false", "--lora_target_modules", "k"]
    again = parse("--seed", 8, "--config", path, *changed, recipe=recipe)
    wanted = {"seed": 8, "use_peft": False, "lora_target_modules": ["k"]}
    assert again == dataclasses.replace(before, **wanted)


def test_of_several_configs_the_last_wins(tmp_path):
    (tmp_path / "model.yaml").write_text("lora_r: 8\nlearning_rate: 1e-4\n")
    (tmp_path / "data.yaml").write_text("dataset-name: rows.jsonl\nlearning_rate: 3e-4\n")
    args = parse("--config", tmp_path / "model.yaml", "--config", tmp_path / "data.yaml")
    assert (args.lora_r, args.dataset_name, args.learning_rate) == (8, ["rows.jsonl"], 3e-4)


def test_values_of_a_config_are_read_as_on_the_command_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "eval_strategy: no\npacking: yes\nmax_steps: -1\neval_dataset_name: null\nseed:\n"
    )
    args = parse("--config", path, "--output_dir=-o")
    assert (args.eval_strategy, args.packing, args.max_steps) == ("no", True, -1)
    assert (args.eval_dataset_name, args.seed) == (None, 42)
    path.write_text(json.dumps(vars(args)))
    assert parse("--config", path) == args


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("a.yaml", "config: b.yaml", "config"),
        ("a.yaml", "help: yes", "help"),
        ("a.yaml", "output_dir: {a: 1}", "mapping"),
        ("a.yaml", "learning_rat: 1", "learning_rate"),
        ("a.yaml", "distributed_type: FSDP", "accelerate launch"),
        ("a.yaml", "a: [", "cannot be read"),
        ("a.json", "{", "cannot be read"),
        ("a.yaml", "- 1", "no arguments"),
        ("a.yaml", "lora_r: x", "'x'"),
    ],
)
def test_a_wrong_config_is_one_line(name, content, word, tmp_path, capsys):
    (tmp_path / name).write_text(content)
    [line] = refused(capsys, "--config", tmp_path / name)
    assert word in line
    [line] = refused(capsys, "--config", tmp_path / "none.yaml")
    assert "none.yaml" in line


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--learning_rat", 3], "--learning_rate"),
        (["--bf16"], "YAML"),
        (["--num-processes=2"], "accelerate launch"),
        (["--dtype", "int8"], "int8"),
        (["--config", "--seed", 3], "--config"),
    ],
)
def test_a_flag_that_does_not_exist_ends_with_64(words, named, capsys):
    assert named in refused(capsys, *words)[-1]


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("learning_rate", 0.0, "above 0"),
        ("learning_rate", float("nan"), "above 0"),
        ("learning_rate", float("inf"), "above 0"),
        ("save_steps", -1, "0 or more"),
        ("lora_dropout", 1.0, "below 1"),
    ],
)
def test_a_number_out_of_bounds_is_told_with_its_bound(field, value, rule):
    args = dataclasses.replace(parse(), **{field: value})
    assert find_out_of_bounds(args) == [f"--{field} {value}: must be {rule}"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_defaults_are_within_their_bounds(recipe):
    assert find_out_of_bounds(parse(recipe=recipe)) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_default_of_a_recipe_keeps_what_its_group_says(recipe):
    """Which arguments a resumed run may have otherwise does not change with a recipe's defaults."""
    free = may_change(importlib.import_module(recipe).Arguments)
    assert {"output_dir", "logging_steps", "per_device_train_batch_size"} <= free
    assert not {"learning_rate", "seed", "dataset_name", "max_steps"} & free
