# SPDX-License-Identifier: Apache-2.0
"""What a rank of a pipeline has to hold: the tensors of its own stages, and no others."""

from types import SimpleNamespace

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from extras.pipeline.stages import cut_into_stages, keep_only
from rehearsal.pipeline_hooks import part_of, tensors_of
from rehearsal.step_hooks import describe

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
FOLDED = [[0, 3], [1, 2]]  # stages of each rank under ZBV
IN_ORDER = [[0], [1], [2], [3]]


def whole(is_tied):
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=is_tied))


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("by_rank", [IN_ORDER, FOLDED])
def test_each_rank_is_promised_what_its_part_of_the_model_has(by_rank, is_tied):
    stages = cut_into_stages(4, 4)
    for numbers in by_rank:
        own = [stages[number] for number in numbers]
        model = whole(is_tied)
        promised = tensors_of(model, own)
        keep_only(model, own)
        assert promised == describe(model)


def test_all_ranks_together_are_promised_the_whole_model():
    model = whole(is_tied=False)
    stages = cut_into_stages(4, 2)
    found = [shape for stage in stages for shape in tensors_of(model, [stage])]
    assert sorted(found) == sorted(describe(model))


@pytest.mark.parametrize("shard_stages, shards", [(False, 1), (True, 3)])
def test_pipelines_share_stages_only_if_requested(shard_stages, shards, monkeypatch):
    monkeypatch.setattr("rehearsal.pipeline_hooks.whole_model", lambda args: whole(is_tied=False))
    layout = SimpleNamespace(num_pipelines=3, data_rank=2)
    part = part_of(SimpleNamespace(shard_stages=shard_stages), layout, cut_into_stages(4, 2)[1:])
    assert (part.shards, part.place) == (shards, 2)
