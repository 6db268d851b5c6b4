"""The components give bit for bit what the modules beside the recipes gave.

This file goes with those modules.
"""

from types import SimpleNamespace

import pytest
import torch
from bitsandbytes.optim import AdamW8bit
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, get_scheduler

import llama
import whole_state
from components.arguments import TrainingArguments
from components.export import save_model
from components.head_loss import LossInHead
from components.optimizer import make_optimizer
from components.state import gather_state, get_loss_scale, restore_loss_scale, restore_state
from fakes import fake_accelerator

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "plain": LlamaConfig(**SHAPE),
    "tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "capped": Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=2.0),
}
ADAPTERS = {"no adapters": None, "adapters": "all-linear", "on the head": ["q_proj", "lm_head"]}


def model_of(config, targets):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[config], dtype=torch.float32)
    if targets is None:
        return model
    return get_peft_model(model, LoraConfig(target_modules=targets, init_lora_weights=False))


def batch():
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 320, (4, 32), generator=chance)
    positions = torch.randperm(4 * 32 - 1, generator=chance)[:50]
    return {
        "inputs": {"input_ids": ids},
        "positions": positions,
        "targets": ids.flatten()[positions + 1],
    }


def gradients_after(model, loss, scale=1.0):
    (loss * scale).backward()
    return [weight.grad for weight in model.parameters()]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mib", [256, 0.01, 1e-9], ids=["at once", "8 tokens", "1 token"])
@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("config", CONFIGS)
def test_losses_and_gradients(config, adapters, mib, dtype):
    found = []
    for is_old in (True, False):
        model = model_of(config, ADAPTERS[adapters])
        one = batch()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            if is_old:
                llama.loss_in_head(model, mib)
                supervised = {name: one[name] for name in ("positions", "targets")}
                loss = llama.summed_loss(model, {"inputs": one["inputs"], "supervised": supervised})
            else:
                loss = LossInHead(model, mib, CPU)(model, one)
        found.append((loss, gradients_after(model, loss, scale=8.0)))
    (old_loss, old_gradients), (loss, gradients) = found
    assert loss.isfinite() and loss.equal(old_loss)
    for old, new in zip(old_gradients, gradients, strict=True):
        assert (old is None and new is None) or old.equal(new)


# ---- State ----
def trained(optimizer_class, seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.BatchNorm1d(128))
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.randn(8, 128)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, SimpleNamespace(optimizer=optimizer)


def assert_same(state, other):
    assert list(state) == list(other)
    for name, tensor in state.items():
        assert tensor.dtype == other[name].dtype and tensor.equal(other[name]), name


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, AdamW8bit])
def test_state_gathered_and_restored(optimizer_class):
    accelerator = fake_accelerator()
    old = whole_state.gather_state(accelerator, *trained(optimizer_class, 1))
    new = gather_state(accelerator, *trained(optimizer_class, 1))
    assert_same(old, new)
    one = trained(optimizer_class, 2)
    other = trained(optimizer_class, 2)
    assert whole_state.restore_state(accelerator, *one, old)
    assert restore_state(accelerator, *other, old)
    assert_same(gather_state(accelerator, *one), gather_state(accelerator, *other))


def test_loss_scale():
    accelerator = fake_accelerator(mixed_precision="fp16", scaler=torch.amp.GradScaler("cpu"))
    saved = whole_state.loss_scale(accelerator, None, {})
    assert get_loss_scale(accelerator, None) == saved
    restore_loss_scale(accelerator, None, saved | {"scale": 4.0})
    assert whole_state.loss_scale(accelerator, None, {}) == saved | {"scale": 4.0}


# ---- Export ----
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("config", CONFIGS)
def test_exported_bytes(config, adapters, is_compiled, tmp_path, tiny):
    tokenizer = llama.load_tokenizer(tiny / "model")
    accelerator = fake_accelerator(get_state_dict=lambda model: model.state_dict())
    for name, save in (("old", llama.export_model), ("new", save_model)):
        model = model_of(config, ADAPTERS[adapters])
        if is_compiled:
            layers = model.get_decoder().layers
            layers[0] = torch.compile(layers[0], backend="eager")
            model = torch.compile(model, backend="eager")
        save(accelerator, model, tokenizer, str(tmp_path / name))
    files = sorted(path.name for path in (tmp_path / "old").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "new").iterdir())
    for name in files:
        assert (tmp_path / "old" / name).read_bytes() == (tmp_path / "new" / name).read_bytes()


# ---- Optimizer and schedule ----
KINDS = ["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"]


@pytest.mark.parametrize("skipped", [(), (0, 3)], ids=["all applied", "two left out"])
@pytest.mark.parametrize("warmup", [0, 3, 0.25])
@pytest.mark.parametrize("kind", KINDS)
def test_learning_rates_in_the_metrics(kind, warmup, skipped):
    """The recipes stepped the schedule after the metrics of a step, and now step it before."""
    args = TrainingArguments(lr_scheduler_type=kind, warmup_steps=warmup, weight_decay=0.1)
    accelerator = fake_accelerator(sync_gradients=True, optimizer_step_was_skipped=False)
    model = torch.nn.Linear(2, 2)
    before = llama.make_optimizer(model, args)
    warmup_steps = {0: 0, 3: 3, 0.25: 3}[warmup]
    old = get_scheduler(kind, before, warmup_steps, 10)
    after, new = make_optimizer(model, args, accelerator, 10)
    assert after.param_groups == before.param_groups
    for step in range(10):
        before.step()
        logged = old.get_last_lr()[0]
        if step not in skipped:
            old.step()
        after.step()
        if step in skipped:
            new.hold()
        new.step()
        assert new.learning_rate == logged
        assert new.get_last_lr() == old.get_last_lr()
        assert new.steps == old.state_dict()["last_epoch"]
