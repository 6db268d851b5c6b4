# SPDX-License-Identifier: Apache-2.0
"""With adapters the adapters are trained and nothing else; without them, every weight."""

import importlib
from inspect import signature

import pytest
from transformers import AutoModelForCausalLM

import llama
from core.cli import parse
from core.engine import Layout
from core.model import load_tokenizer, make_optimizer
from core.summary import size_of
from fakes import fake_accelerator
from jobs import RECIPES
from tasks.labels import load_classifier

ONE_PROCESS = Layout(fake_accelerator())


def llama_arguments(*words):
    return parse(llama.Arguments, words=words)


def optimizer_of(model, args):
    return make_optimizer(model, args, ONE_PROCESS.accelerator, total_steps=1)[0]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--use_peft"],
        ["--use_peft", "--use_dora"],
        ["--use_peft", "--load_in_4bit"],
        ["--use_peft", "--load_in_8bit"],
    ],
    ids=lambda flags: " ".join(flags) or "full",
)
def test_exactly_what_should_train_is_trained(flags, tiny):
    args = llama_arguments("--model_name_or_path", str(tiny / "model"), *flags)
    model = llama.load_model(args, ONE_PROCESS)
    weights = dict(model.named_parameters())
    expected = [name for name in weights if "lora_" in name or not flags]
    assert expected
    assert [name for name, weight in weights.items() if weight.requires_grad] == expected
    groups = optimizer_of(model, args).param_groups
    stepped = {id(weight) for group in groups for weight in group["params"]}
    assert [name for name, weight in weights.items() if id(weight) in stepped] == expected
    base = [size_of(weight) for name, weight in weights.items() if "lora_" not in name]
    whole = AutoModelForCausalLM.from_pretrained(tiny / "model")
    assert sum(base) == whole.num_parameters()  # 4-bit ones unpacked


# ---- Every recipe ----
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


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_checks_the_layers_before_it_makes_adapters(
    recipe, tiny_of, monkeypatch, capsys
):
    monkeypatch.setattr("peft.get_peft_model", lambda *_, **__: pytest.fail("adapters are made"))
    with pytest.raises(SystemExit, match="64"):
        with_adapters(recipe, tiny_of(recipe), ONE_PROCESS, "--lora_target_modules", "nothing")
    assert "--lora_target_modules nothing: " in capsys.readouterr().err


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_leaves_the_casts_to_autocast(recipe, tiny_of):
    autocasts = Layout(fake_accelerator(native_amp=True, mixed_precision="bf16"))
    model = with_adapters(recipe, tiny_of(recipe), autocasts)
    attribute = "cast_input_dtype_enabled"
    layers = [module for module in model.modules() if hasattr(module, attribute)]
    assert layers and not any(getattr(layer, attribute) for layer in layers)
