# SPDX-License-Identifier: Apache-2.0
"""Continuous batching answers each prompt, and changes nothing of the model that is trained."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from transformers import ContinuousBatchingConfig, LlamaForCausalLM

from core.exits import End
from core.generation import greedy_options
from extras.continuous_batching import batcher
from extras.continuous_batching.hooks import answerer
from fakes import small_llama


def test_each_prompt_has_its_answer_and_the_model_trains_on(monkeypatch):
    # By default it fills the memory of this machine
    small = partial(ContinuousBatchingConfig, num_blocks=64, max_batch_tokens=64)
    monkeypatch.setattr(batcher, "ContinuousBatchingConfig", small)
    model = LlamaForCausalLM(small_llama()).train()
    config = model.config.to_dict()
    ends = {"eos_token_id": [2, 3], "pad_token_id": 0, "max_new_tokens": 12}
    sampler = batcher.Batcher(Accelerator(cpu=True), greedy_options(model) | ends, 1.0)
    rows = [{"input_ids": torch.arange(4, 6 + length)} for length in range(6)]
    state = torch.random.get_rng_state()
    first, second, other = (sampler.answer(model, rows, [seed] * 6) for seed in (1, 1, 2))
    assert len(first) == 6 and first == second != other
    for ids, is_truncated in first + other:
        assert is_truncated == (len(ids) == 12 and ids[-1] not in (2, 3))
        assert not {2, 3} & {*ids[:-1]}
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training and model.config.to_dict() == config


def test_it_is_refused_without_a_gpu():
    args = SimpleNamespace(use_transformers_continuous_batching=True)
    with pytest.raises(End):
        answerer(args, None, Accelerator(cpu=True), None, {})
