# SPDX-License-Identifier: Apache-2.0
"""Mixed precision reaches adapters and quantized bases: no products in fp32 and no needless copies.

All of it runs in process, since autocast works on a CPU too.
"""

import pytest
import torch

import llama
import vit
from core.cli import parse
from core.engine import Layout, set_up_engine
from fakes import fake_accelerator

# What accelerate says of itself under single, DDP and FSDP1 with mixed precision
AUTOCASTS = {"native_amp": True, "is_fsdp2": False}
LORA = ("--use_peft", "--dtype", "bfloat16")


def accelerator_with(mixed_precision="bf16", **others):
    return fake_accelerator(**AUTOCASTS | {"mixed_precision": mixed_precision} | others)


def arguments(recipe, *flags):
    return parse(recipe.Arguments, words=flags)


class Loaded(BaseException):  # an Exception would be reported as a model that cannot be read
    """Stands in for the loading of weights, with what they would be loaded as."""


def capture(self_or_name, *_, quantization_config=None, **__):
    raise Loaded(quantization_config)


@pytest.mark.parametrize(
    ("mixed_precision", "dtype", "computes_in"),
    [
        ("bf16", "float32", torch.bfloat16),
        ("fp16", "float32", torch.float16),
        ("no", "float32", torch.float32),
        ("no", "bfloat16", torch.bfloat16),
    ],
)
def test_4_bit_weights_are_multiplied_in_what_mixed_precision_says(
    mixed_precision, dtype, computes_in, tiny, monkeypatch
):
    flags = ["--use_peft", "--load_in_4bit", "--dtype", dtype]
    args = arguments(llama, "--model_name_or_path", str(tiny / "model"), *flags)
    monkeypatch.setattr(llama.AutoModelForCausalLM, "from_pretrained", capture)
    with pytest.raises(Loaded) as found:
        llama.load_model(args, Layout(accelerator_with(mixed_precision)))
    (config,) = found.value.args
    assert config.bnb_4bit_compute_dtype == computes_in
    # It only says how the bytes are packed
    assert config.bnb_4bit_quant_storage == getattr(torch, dtype)


def loaded(folder, *flags, **facts):
    torch.manual_seed(0)
    args = arguments(llama, "--model_name_or_path", str(folder / "model"), *flags)
    model = llama.load_model(args, Layout(accelerator_with(**facts))).train()
    return with_learned_adapters(model)


def with_learned_adapters(model):
    """B is zero at first, and then nothing depends on A."""
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    return model


def casts_of(model):
    name = "cast_input_dtype_enabled"
    return {getattr(module, name) for module in model.modules() if hasattr(module, name)}


def step_of(model):
    """The loss in bf16 autocast, gradients by name, and the bytes kept for the backward pass."""
    kept, ids = {}, torch.arange(48).view(2, 24)

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }
    return loss.detach(), gradients, sum(kept.values())


def assert_same_with_less(ours, pefts):
    assert casts_of(ours) == {False} and casts_of(pefts) == {True}
    loss, gradients, kept = step_of(ours)
    expected_loss, expected_gradients, more_kept = step_of(pefts)
    assert torch.equal(loss, expected_loss)
    assert gradients and gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.any() and torch.equal(gradient, expected_gradients[name]), name
    assert kept < more_kept


def test_inputs_of_adapters_are_not_copied_and_nothing_else_changes(tiny):
    ours = loaded(tiny, *LORA)
    assert_same_with_less(ours, loaded(tiny, *LORA, native_amp=False))


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        (LORA, {"is_fsdp2": True}),  # casts weights, and does not autocast
        (LORA, {"native_amp": False}),  # as with DeepSpeed, or without mixed precision
        ((*LORA, "--use_dora"), {}),  # which takes norms in the dtype of its input
    ],
    ids=["FSDP2", "no autocast", "DoRA"],
)
def test_peft_casts_where_autocast_does_not_or_results_would_change(flags, facts, tiny):
    assert casts_of(loaded(tiny, *flags, **facts)) == {True}


@pytest.mark.parametrize("flags", [[], ["--tf32"]], ids=lambda flags: " ".join(flags) or "none")
def test_convolutions_are_in_tf32_only_where_asked(flags, monkeypatch):
    """torch's default lets cuDNN round to TF32, such as vit.py's of patches."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not flags)
    precision = torch.get_float32_matmul_precision()
    try:
        set_up_engine(arguments(vit, *flags), accelerator_with("no"))
        assert torch.backends.cudnn.allow_tf32 == bool(flags)
        assert torch.get_float32_matmul_precision() == ("high" if flags else "highest")
    finally:
        torch.set_float32_matmul_precision(precision)
