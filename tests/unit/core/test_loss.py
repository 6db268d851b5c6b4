# SPDX-License-Identifier: Apache-2.0
"""The loss in the output head is that of all logits, at once and in pieces.

In process, on random numbers and tiny random models in fp32.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    ModernBertDecoderConfig,
    PhiConfig,
    Qwen3Config,
)

from core.batches import TokenCollator
from core.data import IGNORED
from core.loss import LossInHead, LossInPieces, changes_logits_after_head

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
MODELS = {
    "llama": LlamaConfig(**SHAPE),
    "tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "phi, whose head has a bias": PhiConfig(**SHAPE),
    "gpt2": GPT2Config(
        vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=128, **NO_DROPOUT
    ),
    "gemma2, which caps its logits": Gemma2Config(
        **SHAPE, final_logit_softcapping=2.0, sliding_window=16
    ),
    "modernbert, with a layer before its head": ModernBertDecoderConfig(
        **SHAPE, local_attention=16, pad_token_id=0
    ),
}


def model_of(name):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        MODELS[name], attn_implementation="eager", dtype=torch.float32
    )


@dataclass(frozen=True)
class Row:
    """Tokens, of which the first `prompt` are not trained on."""

    ids: list[int]
    prompt: int


NUM_ROWS = 12


def random_rows():
    chance = np.random.default_rng(0)
    rows = []
    for _ in range(NUM_ROWS):
        length = int(chance.integers(4, 40))
        prompt = max(int(chance.integers(0, length - 1)), 1)  # nothing comes before the first token
        rows.append(Row(chance.integers(1, 320, length).tolist(), prompt))
    return rows


ROWS = random_rows()


def batch_of(lines):
    """The recipes' batch of lines, each of one row or of several that do not see each other."""
    rows = []
    for number, row in enumerate(ROWS, 1):
        labels = [IGNORED] * row.prompt + row.ids[row.prompt :]
        rows.append({"input_ids": row.ids, "labels": labels, "row": number})
    return TokenCollator(pad_token_id=0)(Dataset.from_list(rows), lines)


NUMBERS = list(range(NUM_ROWS))
LAYOUTS = {
    "padded": batch_of([[number] for number in NUMBERS]),
    "packed": batch_of([NUMBERS[start : start + 2] for start in range(0, NUM_ROWS, 2)]),
    "in one line": batch_of([NUMBERS]),
}


@pytest.fixture
def batch():
    return LAYOUTS["padded"]


def loss_one_by_one(model):
    """The loss summed over the rows one by one, by transformers' own forward pass."""
    total = torch.zeros(())
    for row in ROWS:
        ids = torch.tensor([row.ids])
        logits = model(input_ids=ids).logits[0, row.prompt - 1 : -1].float()
        total = total + torch.nn.functional.cross_entropy(
            logits, ids[0, row.prompt :], reduction="sum"
        )
    return total


def norm_after(loss, model):
    model.zero_grad()
    loss.backward()
    return torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()]).item()


# ---- The loss ----
@pytest.fixture(scope="module", params=MODELS)
def one_by_one(request):
    """The name of a model, its loss of the rows one by one, and the norm of its gradient."""
    plain = model_of(request.param)
    loss = loss_one_by_one(plain)
    return request.param, loss.detach(), norm_after(loss, plain)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_is_that_of_the_rows_one_by_one(layout, one_by_one):
    name, loss, norm = one_by_one
    for mib in (256, 0.02):  # at once, and in pieces of 16 tokens
        model = model_of(name)
        token_loss = LossInHead(model, mib, CPU)
        ours = token_loss(model, LAYOUTS[layout])
        assert ("after its head" in str(token_loss)) == name.startswith("gemma2")
        assert ours.dtype == torch.float32 and ours.item() == pytest.approx(loss.item(), rel=1e-6)
        assert norm_after(ours, model) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("mib", [256, 0.02], ids=["at once", "in pieces"])
@pytest.mark.parametrize("name", ["llama", "gemma2, which caps its logits"])
def test_another_loss_is_written_in_one_place(name, mib, batch, monkeypatch):
    """Who edits `token_losses` gets that loss and its gradient on every path."""

    def smoothed(logits, targets):
        return torch.nn.functional.cross_entropy(
            logits, targets, reduction="none", label_smoothing=0.1
        )

    plain = model_of(name)
    logits = plain(**batch["inputs"]).logits.flatten(0, 1)[batch["positions"]]
    wanted = smoothed(logits, batch["targets"]).sum()
    norm = norm_after(wanted, plain)
    monkeypatch.setattr("core.loss.token_losses", smoothed)
    model = model_of(name)
    ours = LossInHead(model, mib, CPU)(model, batch)
    assert ours.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert norm_after(ours, model) == pytest.approx(norm, rel=1e-5)


# ---- Models that change their logits ----
FEW = SHAPE | {"num_hidden_layers": 1}
ROUTED = FEW | {"num_local_experts": 2}
PUT_OUT_WHAT_THE_HEAD_RETURNS = {
    "llama": LlamaConfig(**FEW),
    "qwen3": Qwen3Config(**FEW, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=320, n_embd=32, n_layer=1, n_head=4),
    "bloom": BloomConfig(vocab_size=320, hidden_size=32, n_layer=1, n_head=4),
    "mixtral, with its router's loss": MixtralConfig(**ROUTED, output_router_logits=True),
    "gpt_oss": GptOssConfig(**ROUTED),
    "modernbert, with a layer before its head": ModernBertDecoderConfig(**FEW, pad_token_id=0),
    "gemma2 without a cap": Gemma2Config(**FEW, final_logit_softcapping=None),
}
CAP_OR_SCALE_IT = {
    "gemma2": Gemma2Config(**FEW, final_logit_softcapping=2.0),
    "granite": GraniteConfig(**FEW, logits_scaling=8.0),
    "cohere": CohereConfig(**FEW),
}


@pytest.mark.parametrize("name", [*PUT_OUT_WHAT_THE_HEAD_RETURNS, *CAP_OR_SCALE_IT])
def test_models_that_change_their_logits_after_the_head_are_found(name):
    changes = name in CAP_OR_SCALE_IT
    config = (PUT_OUT_WHAT_THE_HEAD_RETURNS | CAP_OR_SCALE_IT)[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    forwards = [vars(module).get("forward") for module in model.modules()]
    assert changes_logits_after_head(model) == changes
    assert [vars(module).get("forward") for module in model.modules()] == forwards
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    assert changes_logits_after_head(adapted) == changes


# ---- Gradients of pieces ----


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "lm_head"]], ids=str)
def test_adapters_on_the_head_or_beside_it_get_the_gradient_of_all_logits(targets, batch):
    gradients = []
    for mib in (None, 256, 0.02):
        torch.manual_seed(1)
        model = get_peft_model(
            model_of("llama"), LoraConfig(target_modules=targets, init_lora_weights=False)
        )
        if mib is None:
            loss = loss_of_all_logits(model, batch)
        else:
            loss = LossInHead(model, mib, CPU)(model, batch)
        loss.backward()
        gradients.append([weight.grad for weight in model.parameters() if weight.requires_grad])
    for plain, *ours in zip(*gradients, strict=True):
        for gradient in ours:
            torch.testing.assert_close(gradient, plain, rtol=1e-4, atol=1e-4)


def loss_of_all_logits(model, batch):
    """The loss summed over the tokens of a batch, from transformers' own forward pass."""
    logits = model(**batch["inputs"]).logits.flatten(0, 1)[batch["positions"]]
    return torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="sum")


def test_a_weight_that_was_multiplied_without_gradients_still_gets_them():
    """Autocast keeps what it has cast, with or without a history."""
    torch.manual_seed(0)
    weight, hidden = torch.randn(8, 4, requires_grad=True), torch.randn(6, 4)
    with torch.autocast("cpu", torch.bfloat16):
        first = LossInPieces.apply(hidden, weight, None, torch.arange(6), 2).sum()
        second = torch.nn.functional.linear(hidden, weight).float().sum()
    (first_gradient,) = torch.autograd.grad(first, weight)
    (second_gradient,) = torch.autograd.grad(second, weight)
    assert first_gradient.any() and second_gradient.any()
