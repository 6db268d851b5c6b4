# SPDX-License-Identifier: Apache-2.0
"""What is planned for a save is what the recipes gather, and no more than an equal share."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from components.state import gather_state
from fakes import fake_accelerator
from planner.plan import Plan
from planner.saving import saving_of, sizes_of_tensors
from planner.validation import training_arguments

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4000,
}


def config(**more):
    return AutoConfig.for_model("llama", **SMALL, **more)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tensors_are_those_that_are_gathered(tied, dtype):
    model = AutoModelForCausalLM.from_config(
        config(tie_word_embeddings=tied), dtype=getattr(torch, dtype)
    )
    optimizer = SimpleNamespace(optimizer=torch.optim.AdamW(model.parameters()))
    gathered = gather_state(fake_accelerator(), model, optimizer)
    plan = Plan(training_arguments(["--dtype", dtype]))
    planned = sizes_of_tensors(plan, config(tie_word_embeddings=tied))
    assert sorted(planned.values()) == sorted(tensor.nbytes for tensor in gathered.values())


def test_deepspeed_saves_fp32_whatever_the_dtype_of_the_model():
    in_fp32 = sizes_of_tensors(Plan(training_arguments([])), config())
    plan = Plan(training_arguments(["--dtype", "bfloat16"]), engine="zero", stage=2, ranks=4)
    assert sizes_of_tensors(plan, config()) == in_fp32


def test_adapters_are_saved_without_their_base():
    whole = saving_of(Plan(training_arguments([])), config()).whole
    assert saving_of(Plan(training_arguments(["--use_peft"])), config()).whole < whole / 10


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_a_rank_has_an_equal_share_and_at_most_one_tensor_more(ranks):
    plan = Plan(training_arguments([]), engine="fsdp2", ranks=ranks, shards=ranks)
    saving = saving_of(plan, config())
    assert saving.whole / ranks <= saving.share <= saving.whole / ranks + saving.largest
    assert saving.largest == 4000 * 128 * 4  # the embedding, in fp32
    assert saving.most == saving.share + 2 * saving.largest


def test_split_matrices_are_saved_whole():
    whole = sizes_of_tensors(Plan(training_arguments([])), config())
    assert sizes_of_tensors(Plan(training_arguments([]), ranks=2, tp=2), config()) == whole


def test_all_ranks_of_a_host_need_what_they_have_between_them():
    plan = Plan(training_arguments([]), engine="fsdp2", ranks=8, shards=8, machines=2)
    saving = saving_of(plan, config())
    assert saving.host <= 4 * saving.most
    assert saving.host >= saving.whole / 2 + 4 * 2 * saving.largest
