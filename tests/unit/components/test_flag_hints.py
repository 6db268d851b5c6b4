# SPDX-License-Identifier: Apache-2.0
"""Flags of other programs lead to what a recipe has in their place, and only to what it has."""

import importlib
import re

import pytest
from accelerate.commands.launch import launch_command_parser

from components.cli import RecipeParser
from components.flag_hints import ADVICE, GOES_BEFORE, LAUNCHER_OPTIONS, NAMES_ELSEWHERE, hint_on
from proof.jobs import MAKERS

EXPLAINED = " ".join([*NAMES_ELSEWHERE.values(), *ADVICE.values(), *LAUNCHER_OPTIONS]).split()
OF_LAUNCHER = {name.lstrip("-") for name in launch_command_parser()._option_string_actions}


@pytest.fixture(scope="module")
def flags():
    """{recipe: names of its flags}."""
    found = {}
    for recipe in MAKERS:
        found[recipe] = RecipeParser(importlib.import_module(recipe).Arguments).flag_names()
    return found


@pytest.fixture(scope="module")
def all_flags(flags):
    """The names of the flags of all recipes."""
    return set().union(*flags.values())


def test_flags_that_are_named_exist(all_flags):
    assert set(NAMES_ELSEWHERE) <= all_flags
    assert set(LAUNCHER_OPTIONS) <= OF_LAUNCHER
    for advice in ADVICE:
        is_about_launcher = "accelerate launch" in advice
        exist = OF_LAUNCHER if is_about_launcher else all_flags
        assert set(re.findall(r"--(\w+)", advice)) <= exist


def test_flags_that_no_recipe_has_are_the_ones_explained(all_flags):
    """Some flags are in some recipes and not in others."""
    in_some = {"eval_on_start", "max_length", "load_in_4bit", "load_in_8bit", "ep_size"}
    assert set(EXPLAINED) & all_flags == in_some


@pytest.mark.parametrize("recipe", MAKERS)
def test_a_recipe_is_not_advised_to_use_a_flag_that_it_does_not_have(recipe, flags):
    unknown = set(EXPLAINED) - set(flags[recipe])
    hints = [hint_on(f"--{name}", flags[recipe]) for name in sorted(unknown)]
    hints = [hint.partition(": ")[2] for hint in hints if hint and GOES_BEFORE not in hint]
    assert len(hints) >= 60
    for hint in hints:
        if "accelerate launch" not in hint:
            assert set(re.findall(r"--(\w+)", hint)) <= set(flags[recipe]), hint


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--lr", "did you mean --learning_rate?"),
        ("--batch-size=4", "did you mean --per_device_train_batch_size?"),
        ("--model", "did you mean --model_name_or_path?"),
        ("--max_seq_length", "did you mean --max_length?"),
        ("--evaluation_strategy", "did you mean --eval_strategy?"),
        ("--save_strategy", "--save_steps N saves after every N optimizer steps"),
        ("--overwrite_output_dir", "--resume_from_checkpoint none starts over"),
        ("--deepspeed", "accelerate_configs/deepspeed_zero2.yaml to accelerate launch"),
        ("--config_file", GOES_BEFORE),
        ("--fsdp-offload-params", GOES_BEFORE),
        ("--eval_on_start", "this recipe evaluates only after steps"),
        ("--ep_size", "only recipes/mixtral.py spreads experts over ranks"),
        ("--pp_size", "only recipes/llama_pipeline.py trains over a pipeline"),
        ("--lora_rnk", "did you mean --lora_r?"),
    ],
)
def test_what_llama_says_to_a_flag_that_it_does_not_have(flag, hint, flags):
    told = hint_on(flag, flags["llama"])
    assert told is not None and told.startswith(flag.partition("=")[0] + ": ") and hint in told


@pytest.mark.parametrize("flag", ["--label_names", "--use_cache", "--nonsense"])
def test_nothing_is_said_where_no_flag_is_near(flag, flags):
    assert hint_on(flag, flags["llama"]) is None


def test_another_recipe_may_have_another_flag_for_the_same(flags):
    told = hint_on("--max_length", flags["t5"])
    assert told == "--max_length: did you mean --max_source_length?"
