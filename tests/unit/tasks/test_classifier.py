# SPDX-License-Identifier: Apache-2.0
"""A classifier's loss is that of all rows, however they are cut into batches; its head is new."""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    RobertaConfig,
    RobertaModel,
)

from core.cli import parse
from example_arguments import ClassifierArguments
from fakes import rows_of_their_own
from tasks.labels import load_classifier, weighted_row_losses

SHAPE = {
    "vocab_size": 9,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 16,
}


def test_a_new_head_of_two_layers_is_trained_beside_adapters(tmp_path):
    """As RoBERTa's and ELECTRA's: to peft it is one module, "classifier"."""
    RobertaModel(RobertaConfig(**SHAPE)).save_pretrained(tmp_path)
    words = ["--model_name_or_path", str(tmp_path), "--use_peft"]
    args = parse(ClassifierArguments, words=words)
    auto_class, alone = AutoModelForSequenceClassification, rows_of_their_own()
    model, notes = load_classifier(auto_class, args, ["a", "b"], alone, task_type="SEQ_CLS")
    assert "new" in notes["head"]
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([1])).loss.backward()
    gradients = {
        name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad
    }
    assert sum("classifier" in name for name in gradients) == 4
    for name, gradient in gradients.items():
        # B is zero at first, and then nothing depends on A
        assert "lora_A" in name or (gradient is not None and gradient.any()), name


LABELS = torch.tensor([0] * 5 + [1] * 2 + [2])


@pytest.mark.parametrize(
    "of_class", [None, torch.tensor([8 / 15, 8 / 6, 8 / 3])], ids=["none", "balanced"]
)
def test_the_loss_is_torchs_weighted_mean_however_rows_are_cut(of_class):
    logits = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    weights = torch.ones(8) if of_class is None else of_class[LABELS]
    total = 0.0
    for numbers in ([0, 1, 2], [3, 4, 5, 6], [], [7]):
        of_batch = logits[numbers or [0]]  # a model runs on a row of padding where there is none
        batch = {"inputs": {}, "labels": LABELS[numbers], "weights": weights[numbers]}
        total += weighted_row_losses(lambda out=of_batch: SimpleNamespace(logits=out), batch)[0]
    wanted = torch.nn.CrossEntropyLoss(weight=of_class)(logits, LABELS)
    assert (total / weights.sum()).item() == pytest.approx(wanted.item(), rel=1e-6)


def test_the_loss_of_numbers_is_their_squared_error():
    logits = torch.tensor([[1.0], [2.0], [5.0]])
    batch = {
        "inputs": {},
        "labels": torch.tensor([0.0, 2.5, 5.0]),
        "weights": torch.ones(3),
    }
    loss, _ = weighted_row_losses(lambda: SimpleNamespace(logits=logits), batch)
    assert loss.item() == 1.25
