# SPDX-License-Identifier: Apache-2.0
"""What is planned for a save is what the recipes write, and no more than an equal share."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from core.state import state_of
from planner.engines import saving_of
from planner.plan import Plan
from planner.trace import profile_of
from planner_jobs import training_arguments

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4000,
}


def config(**more):
    return AutoConfig.for_model("llama", **SMALL | more)


def saved(folder, words=(), shape=None, **how):
    """What a rank of a plan keeps while it saves."""
    (shape or config()).save_pretrained(folder)
    plan = Plan(training_arguments(folder, words), **how)
    return saving_of(plan, profile_of(plan, None).weights)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tensors_are_those_that_are_written(tied, dtype, tmp_path):
    shape = config(tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    sizes = [box.part.nbytes for box in state_of(model, optimizer).boxes]
    planned = saved(tmp_path, ["--dtype", dtype, "--no_master_weights"], shape)
    assert (planned.whole, planned.largest) == (sum(sizes), max(sizes))


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_a_rank_has_an_equal_share_and_needs_one_tensor_more(ranks, tmp_path):
    saving = saved(tmp_path, engine="fsdp2", ranks=ranks, shards=ranks)
    assert saving.share == round(saving.whole / ranks)
    assert saving.largest == 4000 * 128 * 4  # the embedding, in fp32
    assert saving.most == saving.share + saving.largest


def test_all_ranks_of_a_host_need_what_they_have_between_them(tmp_path):
    saving = saved(tmp_path, engine="fsdp2", ranks=8, shards=8, machines=2)
    assert saving.host == round(saving.whole / 2) + 4 * saving.largest
