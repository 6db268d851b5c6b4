# SPDX-License-Identifier: Apache-2.0
"""What is planned for a save is what the recipes write, and no more than an equal share."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from core.state import state_of
from planner.plan import Plan
from planner.recipe import parse_words
from planner.saving import saving_of
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


def whole_of(words=(), **how):
    return saving_of(Plan(training_arguments([*words]), **how), config()).whole


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tensors_are_those_that_are_written(tied, dtype):
    shape = config(tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    sizes = [box.part.nbytes for box in state_of(model, optimizer).boxes]
    planned = saving_of(Plan(training_arguments(["--dtype", dtype])), shape)
    assert (planned.whole, planned.largest) == (sum(sizes), max(sizes))


def test_deepspeed_saves_fp32_whatever_the_dtype_of_the_model():
    in_bf16 = whole_of(["--dtype", "bfloat16"], engine="zero", stage=2, ranks=4)
    assert in_bf16 == whole_of()


def test_adapters_are_saved_without_their_base():
    assert whole_of(["--use_peft"]) < whole_of() / 10


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_a_rank_has_an_equal_share_and_needs_one_tensor_more(ranks):
    plan = Plan(training_arguments([]), engine="fsdp2", ranks=ranks, shards=ranks)
    saving = saving_of(plan, config())
    assert saving.share == round(saving.whole / ranks)
    assert saving.largest == 4000 * 128 * 4  # the embedding, in fp32
    assert saving.most == saving.share + saving.largest


def test_all_ranks_of_a_host_need_what_they_have_between_them():
    plan = Plan(training_arguments([]), engine="fsdp2", ranks=8, shards=8, machines=2)
    saving = saving_of(plan, config())
    assert saving.host == round(saving.whole / 2) + 4 * saving.largest


def test_the_stages_at_the_ends_of_a_pipeline_have_the_largest_shares():
    """They have the embedding and the head beside their layers."""
    args = parse_words(["--pp_size", "4"], "llama_pipeline.py")
    plan = Plan(args, ranks=4, pp=4)
    saving = saving_of(plan, config(num_hidden_layers=8))
    assert saving.share > saving.whole / 4 + saving.largest
