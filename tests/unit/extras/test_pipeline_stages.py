# SPDX-License-Identifier: Apache-2.0
"""A model cut into stages computes what the whole one does, with the names of the whole one."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from core.weights import make_skeleton
from extras.pipeline.schedules import KINDS
from extras.pipeline.stages import (
    PartOfModel,
    cut_into_stages,
    view_of,
    why_not_cut,
)

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 5,
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 2,
    },
    "qwen3": {"head_dim": 16},
}
OPTIONS = {"dtype": "float32", "attn_implementation": "sdpa"}


def save_model(folder, kind, **changes):
    """Write a small random model of a family, and return it as it is loaded."""
    config = AutoConfig.for_model(kind, **SHAPE | FAMILIES.get(kind, {}) | changes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, **OPTIONS)


def names_of(model):
    return {name for name, _ in model.named_parameters()}


# Each family, with each schedule's places of stages and with a tied head at least once
WHOLE = [
    ("llama", "1f1b", True),
    ("mistral", "interleaved", False),
    ("qwen2", "zbv", True),
    ("qwen3", "1f1b", False),
]


@pytest.mark.parametrize(("kind", "schedule", "is_tied"), WHOLE)
def test_stages_one_after_the_other_compute_the_logits_of_the_whole(
    kind, schedule, is_tied, tmp_path
):
    whole = save_model(tmp_path, kind, tie_word_embeddings=is_tied)
    per_rank = KINDS[schedule].stages_per_rank
    stages = cut_into_stages(5, 2 * per_rank)
    views = {}
    names = set()
    for rank in range(2):
        own = [stages[number] for number in KINDS[schedule].stages_of(rank, 2)]
        part = PartOfModel(own).from_pretrained(tmp_path, **OPTIONS)
        assert type(part).__name__ == type(whole).__name__
        assert len(names_of(part)) < len(names_of(whole))
        names |= names_of(part)
        for stage in own:
            views[stage.index] = view_of(part, stage)
    assert names == names_of(whole)  # A tied head has the name of the embedding on both ends

    tokens = torch.randint(3, 64, (2, 9))
    hidden = views[0].model(input_ids=tokens, use_cache=False).last_hidden_state
    for index in range(1, len(stages) - 1):
        hidden = views[index].model(inputs_embeds=hidden, use_cache=False).last_hidden_state
    logits = views[len(stages) - 1](inputs_embeds=hidden, use_cache=False).logits
    assert torch.equal(logits, whole(input_ids=tokens).logits)


def test_what_a_model_computes_between_its_modules_is_found(tmp_path):
    save_model(tmp_path, "granite", embedding_multiplier=2.0)
    reason = why_not_cut(make_skeleton(AutoModelForCausalLM, tmp_path, **OPTIONS))
    assert reason.startswith("it computes more between its embedding, layers and norm")
