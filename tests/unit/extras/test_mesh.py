# SPDX-License-Identifier: Apache-2.0
"""Rows whose tokens are on several ranks: nothing is lost or counted twice; gradients add up."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from accelerate.big_modeling import _attach_context_parallel_hooks
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
)

from extras.mesh import workarounds
from extras.mesh.hooks import find_attention_of_its_own, find_faults_of_engine
from extras.mesh.layout import MeshLayout
from fakes import fake_accelerator, mixture_of_two, parallelism
from harm import shows_harm_without


# ---- What would be silently wrong ----
def why_not_shared(config, kind):
    return " ".join(find_attention_of_its_own(config, MeshLayout(fake_accelerator(), {kind: 2})))


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
WINDOW = MistralConfig(num_attention_heads=4, num_key_value_heads=4, sliding_window=8)


@pytest.mark.parametrize(
    ("config", "fits"),
    [
        (LlamaConfig(**SMALL), {"cp", "sp"}),
        (OPTConfig(**SMALL, ffn_dim=8, word_embed_proj_dim=16), {"cp", "sp"}),
        (BloomConfig(**SMALL), set()),  # adds biases to scores
        (Gemma2Config(**SMALL), set()),  # caps scores
        (WINDOW, set()),  # which is in the masks that are dropped
        (GPT2Config(**SMALL), {"sp"}),  # whose masks accelerate does not drop
        (GPTNeoXConfig(**SMALL, intermediate_size=8), {"sp"}),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_attention_that_needs_its_masks_is_refused_where_rows_are_shared(config, fits):
    assert {kind for kind in ("cp", "sp") if not why_not_shared(config, kind)} == fits
    if "cp" in fits or config.model_type in ("gpt2", "gpt_neox"):
        model = AutoModelForCausalLM.from_config(config)
        _attach_context_parallel_hooks(model)
        assert any(module._forward_pre_hooks for module in model.modules()) == ("cp" in fits)


def test_engines_that_form_no_such_groups():
    def faults(layout):
        return " ".join(find_faults_of_engine(layout))

    plain = fake_accelerator(num_processes=2, parallelism_config=parallelism(sp=2))
    assert "does not split rows" in faults(MeshLayout(plain, {"sp": 2}))
    assert not faults(MeshLayout(fake_accelerator(num_processes=2), {"tp": 2}))
    assert "never compared" in faults(MeshLayout(fake_accelerator(), {"tp": 2, "cp": 2}))


# ---- Sizes ----
@shows_harm_without("let_batches_differ_in_size")
def test_ulysses_takes_a_batch_of_another_size(cured):
    from deepspeed.runtime.sequence_parallel import ulysses_sp

    alone = SimpleNamespace(
        get_world_size=lambda group: 1,
        get_rank=lambda *group: 0,
        all_gather=lambda gathered, own, group: gathered[0].copy_(own),
    )
    original = ulysses_sp.UlyssesSPAttentionHF.forward
    with (
        mock.patch.object(ulysses_sp, "dist", alone),
        mock.patch.object(ulysses_sp, "register_all_to_all_group"),
        mock.patch.object(ulysses_sp, "_dim_zero_all_to_all", lambda group, sent: sent),
        # Put back at the end
        mock.patch.object(ulysses_sp.UlyssesSPAttentionHF, "forward", original),
    ):
        if cured:
            workarounds.let_batches_differ_in_size()
            once = ulysses_sp.UlyssesSPAttentionHF.forward
            workarounds.let_batches_differ_in_size()
            assert ulysses_sp.UlyssesSPAttentionHF.forward is once
        attention = ulysses_sp.UlyssesSPAttentionHF(
            lambda module, query, key, value, mask, **others: (value.transpose(1, 2), None),
            batch_size=3,
            attn_head_count=2,
            attn_head_size=4,
            kv_head_count=2,
            num_hidden_layers=1,
            process_group=None,
            seq_length_is_variable=True,
        )
        lines = torch.randn(5, 2, 6, 4)  # lines, heads, tokens and features
        places = torch.arange(6).expand(5, 6).contiguous()
        with contextlib.nullcontext() if cured else pytest.raises(AssertionError, match="shape"):
            output, _ = attention(attention, lines, lines, lines, None, position_ids=places)
            assert output.equal(lines.transpose(1, 2).flatten(2))


class ReachedError(Exception):
    """Ends DeepSpeed's registration before it replaces the attention of this process."""


@shows_harm_without("name_size_of_heads")
def test_ulysses_knows_the_size_of_heads_that_a_config_leaves_open(cured):
    from deepspeed.runtime.sequence_parallel import parallel_state_sp, ulysses_sp

    config = mixture_of_two()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if cured:
        workarounds.name_size_of_heads(model)
    seen = {}

    def note_sizes(self, **sizes):
        seen.update(sizes)
        raise ReachedError

    with (
        mock.patch.object(parallel_state_sp, "initialize_sequence_parallel"),
        mock.patch.object(parallel_state_sp, "get_sequence_parallel_group"),
        mock.patch.object(ulysses_sp.UlyssesSPAttentionHF, "__init__", note_sizes),
        pytest.raises(ReachedError),
    ):
        ulysses_sp.UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation="sdpa",
            sequence_parallel_size=2,
            micro_batch_size=1,
            seq_length_is_variable=True,
        )
    assert (seen["attn_head_size"] == 8) == cured
