# SPDX-License-Identifier: Apache-2.0
"""The loss in the output head is that of all logits, at once and in pieces.

In process, on random numbers and tiny random models in fp32.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    ModernBertDecoderConfig,
    PhiConfig,
)

from core.batches import TokenCollator
from core.data import IGNORED
from core.loss import (
    LossInHead,
    LossInPieces,
    changes_logits_after_head,
    compiled_losses_of,
    losses_of,
)

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


def model_of(name, attention="eager"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        MODELS[name], attn_implementation=attention, dtype=torch.float32
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
CASES = [*((name, "eager") for name in MODELS), ("llama", "sdpa")]


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def one_by_one(request):
    """A function that makes a model, its loss of the rows one by one, and its gradient's norm."""
    plain = model_of(*request.param)
    loss = loss_one_by_one(plain)
    return partial(model_of, *request.param), loss.detach(), norm_after(loss, plain)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_is_that_of_the_rows_one_by_one(layout, one_by_one):
    """Rows that share a line, and padding, do not see each other."""
    make_model, loss, norm = one_by_one
    for mib in (256, 0.02):  # at once, and in pieces of 16 tokens
        model = make_model()
        token_loss = LossInHead(model, mib, CPU)
        ours = token_loss(model, LAYOUTS[layout])
        is_capped = model.config.model_type == "gemma2"
        assert ("after its head" in str(token_loss)) == is_capped
        assert ours.dtype == torch.float32 and ours.item() == pytest.approx(loss.item(), rel=1e-6)
        assert norm_after(ours, model) == pytest.approx(norm, rel=1e-5)


CAP_OR_SCALE_IT = {
    "gemma2": Gemma2Config(**SHAPE, final_logit_softcapping=2.0),
    "granite": GraniteConfig(**SHAPE, logits_scaling=8.0),
    "cohere": CohereConfig(**SHAPE),
}


@pytest.mark.parametrize("name", ["llama", *CAP_OR_SCALE_IT])
def test_models_that_change_their_logits_after_the_head_are_found(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config((MODELS | CAP_OR_SCALE_IT)[name])
    changes = name in CAP_OR_SCALE_IT
    assert changes_logits_after_head(model) == changes
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    assert changes_logits_after_head(adapted) == changes


def test_adapters_on_the_head_get_the_gradient_of_all_logits():
    batch = LAYOUTS["padded"]
    gradients = []
    for mib in (None, 256, 0.02):
        model = model_of("llama")
        config = LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        model = get_peft_model(model, config)
        if mib is None:
            logits = model(**batch["inputs"]).logits.flatten(0, 1)[batch["positions"]]
            targets = batch["targets"]
            loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        else:
            loss = LossInHead(model, mib, CPU)(model, batch)
        loss.backward()
        gradients.append([weight.grad for weight in model.parameters() if weight.requires_grad])
    for plain, *ours in zip(*gradients, strict=True):
        for gradient in ours:
            torch.testing.assert_close(gradient, plain, rtol=1e-4, atol=1e-4)


def test_a_weight_that_was_multiplied_without_gradients_still_gets_them():
    """Autocast keeps what it has cast, with or without a history."""
    torch.manual_seed(0)
    weight, hidden = torch.randn(8, 4, requires_grad=True), torch.randn(6, 4)
    with torch.autocast("cpu", torch.bfloat16):
        first = LossInPieces.apply(hidden, weight, None, torch.arange(6), 2, losses_of).sum()
        second = torch.nn.functional.linear(hidden, weight).float().sum()
    (first_gradient,) = torch.autograd.grad(first, weight)
    (second_gradient,) = torch.autograd.grad(second, weight)
    assert first_gradient.any() and second_gradient.any()


def test_the_loss_is_compiled_once_for_any_number_of_tokens():
    counters.clear()
    for number in (7, 3, 12, 1, 0, 5):
        logits = torch.randn(number, 320, requires_grad=True)
        targets = torch.randint(320, (number,))
        plain = losses_of(logits, targets)
        compiled = compiled_losses_of(logits, targets)
        assert torch.allclose(compiled, plain, rtol=1e-6, atol=1e-6)
        [gradient] = torch.autograd.grad(plain.sum(), logits)
        [same] = torch.autograd.grad(compiled.sum(), logits)
        assert torch.allclose(gradient, same, rtol=1e-6, atol=1e-7)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("mib", [256, 0.01], ids=["whole", "in pieces"])
def test_an_evaluation_has_the_cross_entropy_whatever_the_loss_of_training(monkeypatch, mib):
    model = model_of("llama")
    token_loss = LossInHead(model, mib, CPU)
    plain = token_loss(model.train(), LAYOUTS["padded"])
    monkeypatch.setattr("core.loss.token_losses", lambda logits, _: logits.logsumexp(-1))
    assert token_loss(model.eval(), LAYOUTS["padded"]) == plain
    assert token_loss(model.train(), LAYOUTS["padded"]) != plain
