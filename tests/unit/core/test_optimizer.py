# SPDX-License-Identifier: Apache-2.0
"""What decays and what does not; a schedule that does not advance at skipped steps."""

import typing
from types import SimpleNamespace

import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config

from core import workarounds
from core.arguments import Optimizer, TrainingArguments
from core.model import make_adamw, make_optimizer, warmup_steps
from fakes import fake_accelerator, small_llama
from harm import shows_harm_without

LLAMA = small_llama()
GPT2 = GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16)
BLOOM = BloomConfig(hidden_size=8, n_layer=1, n_head=1, vocab_size=16)


# ---- AdamW ----
@pytest.mark.parametrize("config", [LLAMA, GPT2, BLOOM], ids=lambda config: config.model_type)
def test_biases_and_norms_do_not_decay(config):
    model = AutoModelForCausalLM.from_config(config)
    decayed, kept = make_adamw(model, TrainingArguments(weight_decay=0.1)).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert {weight.dim() for weight in decayed["params"]} == {2}
    assert {weight.dim() for weight in kept["params"]} == {1}


@pytest.mark.parametrize("optim", typing.get_args(Optimizer))
def test_every_optimizer_gets_the_moments_decays_and_epsilon(optim):
    args = TrainingArguments(optim=optim, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6)
    for group in make_adamw(AutoModelForCausalLM.from_config(LLAMA), args).param_groups:
        assert (tuple(group["betas"]), group["eps"]) == ((0.8, 0.95), 1e-6)


def types_of_state():
    """The types of an 8-bit optimizer's state of an embedding and of a linear layer."""
    model = torch.nn.Sequential(torch.nn.Embedding(64, 128), torch.nn.Linear(128, 64))
    optimizer = make_adamw(model, TrainingArguments(optim="adamw_8bit", learning_rate=1e-3))
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    return [optimizer.state[layer.weight]["state1"].dtype for layer in model]


@shows_harm_without("keep_embeddings_in_32_bits")
def test_embeddings_keep_32_bits_of_state_under_an_8_bit_optimizer(cured, monkeypatch):
    GlobalOptimManager.get_instance().initialize()  # forgets what was asked for before
    if not cured:
        monkeypatch.setattr(workarounds, "keep_embeddings_in_32_bits", lambda model: None)
    of_embeddings = torch.float32 if cured else torch.uint8
    assert types_of_state() == [of_embeddings, torch.uint8]


# ---- Schedule ----
def made(total_steps=10, **arguments):
    """An accelerator, and the schedule of a tiny model."""
    state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)
    accelerator = fake_accelerator(
        state=state, sync_gradients=True, optimizer_step_was_skipped=False
    )
    args = TrainingArguments(**{"learning_rate": 1.0} | arguments)
    optimizer, schedule = make_optimizer(torch.nn.Linear(2, 2), args, accelerator, total_steps)
    optimizer.step()  # so that torch does not warn
    return accelerator, schedule


@pytest.mark.parametrize(
    ("given", "total", "steps"), [(0, 10, 0), (3, 10, 3), (0.25, 10, 3), (0.5, 7, 4), (1, 10, 1)]
)
def test_warmup_below_1_is_a_share_of_all_steps_rounded_up(given, total, steps):
    assert warmup_steps(TrainingArguments(warmup_steps=given), total) == steps


def test_it_stays_at_a_step_that_the_loss_scale_left_out():
    accelerator, schedule = made()
    schedule.step()
    accelerator.optimizer_step_was_skipped = True
    schedule.step()
    assert schedule.steps == 1
    assert schedule.learning_rate == 0.9  # what that step had, and what the next one has
    accelerator.optimizer_step_was_skipped = False
    schedule.step()
    assert (schedule.steps, schedule.learning_rate) == (2, 0.9)
