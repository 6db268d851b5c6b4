# SPDX-License-Identifier: Apache-2.0
"""A rate that is chosen for all weights is recognized as too low for adapters."""

import pytest

import llama_dpo
from components.cli import parse_arguments
from components.learning_rate import is_low_for_adapters, rate_for_adapters
from example_arguments import language_model_arguments


@pytest.mark.parametrize(
    ("flags", "is_low"),
    [
        ("", False),
        ("--use_peft", True),
        ("--use_peft --learning_rate 4.9e-5", True),
        ("--use_peft --learning_rate 5e-5", False),
        ("--learning_rate 1e-6", False),
    ],
)
def test_below_5e_5_is_low_for_adapters_only(flags, is_low):
    assert is_low_for_adapters(language_model_arguments(*flags.split())) is is_low


def test_the_recipe_decides_what_is_usual():
    """Preferences are trained at lower rates."""
    assert rate_for_adapters(language_model_arguments()) == 2e-4
    args = parse_arguments(llama_dpo.Arguments, words=["--use_peft", "--learning_rate", "5e-6"])
    assert rate_for_adapters(args) == 1e-5
    assert not is_low_for_adapters(args)
