# SPDX-License-Identifier: Apache-2.0
"""Every recipe makes adapters alike: without casts that autocast does."""

import importlib
from inspect import signature

import pytest

from core.cli import parse
from core.engine import Layout
from core.model import load_tokenizer
from fakes import fake_accelerator
from jobs import RECIPES
from tasks.labels import load_classifier

ONE_PROCESS = Layout(fake_accelerator())


def with_adapters(recipe, folder, accelerator, *flags):
    """The model of a recipe with adapters, as its main() loads it."""
    module = importlib.import_module(recipe)
    name = str(folder / "model")
    args = parse(module.Arguments, words=["--model_name_or_path", name, "--use_peft", *flags])
    if hasattr(module, "load_classifier"):
        (kind,) = [value for key, value in vars(module).items() if key.startswith("AutoModelFor")]
        return load_classifier(kind, args, ["one", "other"], accelerator)[0]
    more = [load_tokenizer(args)] if "tokenizer" in signature(module.load_model).parameters else []
    return module.load_model(args, accelerator, *more)


def casts_of(model):
    name = "cast_input_dtype_enabled"
    return {getattr(module, name) for module in model.modules() if hasattr(module, name)}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_leaves_the_casts_to_autocast(recipe, tiny_of):
    autocasts = Layout(fake_accelerator(native_amp=True, mixed_precision="bf16"))
    model = with_adapters(recipe, tiny_of(recipe), autocasts)
    assert casts_of(model) == {False}


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        ([], {"native_amp": True, "is_fsdp2": True}),  # casts weights, and does not autocast
        ([], {"native_amp": False}),  # as with DeepSpeed, or without mixed precision
        (["--use_dora"], {"native_amp": True}),  # which takes norms in the dtype of its input
    ],
    ids=["FSDP2", "no autocast", "DoRA"],
)
def test_peft_casts_where_autocast_does_not_or_results_would_change(flags, facts, tiny):
    layout = Layout(fake_accelerator(mixed_precision="bf16", **facts))
    model = with_adapters("llama", tiny, layout, "--dtype", "bfloat16", *flags)
    assert casts_of(model) == {True}
