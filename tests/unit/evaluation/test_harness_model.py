# SPDX-License-Identifier: Apache-2.0
"""A model is asked by lm-eval with the weights that it was loaded with."""

import types

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from evaluation import harness
from fakes import small_llama
from generation.loading import Source

TOKENS = torch.arange(12)[None]


@pytest.fixture
def tokenizer():
    words = Tokenizer(WordLevel({"a": 0, "<end>": 1}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")


def wrap(model, tokenizer):
    """A model as lm-eval gets it, asked plain text."""
    args = types.SimpleNamespace(batch_size=1)
    return harness.wrap(args, Source("none"), model, tokenizer, is_chat=False)


def model_with_a_head_of_its_own(folder, modules):
    """A model whose configuration says that its head is tied, though its files hold another one.

    Args:
        modules: trained whole beside adapters; with none there are no adapters.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(small_llama(tie_word_embeddings=False))
    model.config.tie_word_embeddings = True
    model.save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    if modules:
        config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=modules)
        model = get_peft_model(model, config)
    return model.eval()


@pytest.mark.parametrize("modules", [[], ["embed_tokens"], ["lm_head"]], ids=str)
def test_an_output_head_of_its_own_stays_what_it_is(modules, tokenizer, tmp_path):
    model = model_with_a_head_of_its_own(tmp_path, modules)
    before = model(TOKENS).logits
    asked = wrap(model, tokenizer)
    assert torch.equal(asked.model(TOKENS).logits, before)
    assert "tie_weights" not in vars(model)  # It is only kept from it for that while


@pytest.mark.parametrize("modules", [[], ["embed_tokens"]], ids=str)
def test_lm_eval_by_itself_replaces_it(modules, tokenizer, tmp_path):
    model = model_with_a_head_of_its_own(tmp_path, modules)
    before = model(TOKENS).logits
    asked = HFLM(pretrained=model, backend="causal", tokenizer=tokenizer)
    assert not torch.allclose(asked.model(TOKENS).logits, before, atol=1e-3)
