# SPDX-License-Identifier: Apache-2.0
"""No token reaches the logits of another document, whatever the attention.

This holds for packed rows and for padding. Tiny random models in fp32, in process; flash attention
needs a GPU: evidence/gpu/test_precisions.py.
"""

import json

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

import llama
from core.batches import TokenCollator
from core.chat import ChatTemplate
from mask_probe import ARCHITECTURES, PADDING, distance_from_alone, leak, packed_batch, random_model

# Logits are about 0.5. The sums of a single document are in another order, in fp32, which has seven
# digits
ALONE = 1e-6
PLANTED = 0.1  # what a planted leak moves at least
# flex_attention runs uncompiled: its mask is the same, and compiling takes a minute on a CPU
pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
    pytest.mark.filterwarnings("ignore:_compile flag"),
]


@pytest.fixture(params=["eager", "sdpa", "flex_attention"], scope="module")
def attention(request):
    with torch.compiler.set_stance("force_eager"):
        yield request.param


@pytest.fixture(params=ARCHITECTURES, scope="module")
def model(request, attention):
    return random_model(request.param, attention)


@pytest.fixture(scope="module")
def rows(tiny):
    """Three rows of the recipe, of which the first and the last fit into a line of the longest."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    texts = (tiny / "data" / "train.jsonl").read_text().splitlines()
    rows = []
    for number, (text, length) in enumerate(zip(texts, (12, 21, 9), strict=False)):
        row = llama.tokenize_row(json.loads(text), ChatTemplate(tokenizer), 1024)
        last = {key: row[key][-length:] for key in ("input_ids", "labels")}
        rows.append(last | {"row": number})
    return rows


LAYOUTS = {  # lines of row numbers, and what the collator is asked for
    "padded": ([[0], [1], [2]], {}),
    "packed": ([[0, 2], [1]], {"width": 24}),
    "padding free": ([[0], [1], [2]], {"refit": True}),
}


def batch_of(rows, layout):
    """(batch, owners) of rows as the recipe lays them out."""
    lines, options = LAYOUTS[layout]
    collate = TokenCollator(pad_token_id=0, **options)
    inputs = collate(Dataset.from_list(rows), lines)["inputs"]
    owners = torch.full_like(inputs["input_ids"], PADDING)
    for number, row in enumerate(rows):  # wherever it was put: by its tokens
        tokens = torch.tensor(row["input_ids"])
        for line, ids in enumerate(inputs["input_ids"]):
            for start in range(len(ids) - len(tokens) + 1):
                if ids[start : start + len(tokens)].equal(tokens):
                    owners[line, start : start + len(tokens)] = number
    assert set(owners.unique().tolist()) - {PADDING} == set(range(len(rows)))
    return inputs | {"use_cache": False}, owners


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_of_the_recipe_keeps_rows_and_padding_apart(layout, model, rows):
    batch, owners = batch_of(rows, layout)
    packed = layout != "padded"
    assert (len(owners) < 3, "position_ids" in batch) == (packed, packed)
    assert leak(model, batch, owners) == 0
    assert distance_from_alone(model, batch, owners) < ALONE


@pytest.mark.parametrize("change", ["mask", "positions", "cache", "padding"])
def test_the_probe_finds_a_leak(change, rows):
    batch, owners = packed_batch([7, 1, 8], [9, 7])
    if change == "mask":
        batch["attention_mask"] = torch.ones_like(owners)
    elif change == "positions":  # They run on
        batch["position_ids"] = torch.arange(16).expand(2, -1)
    elif change == "cache":
        batch["use_cache"] = True
    else:  # Padding to the left, where causal models look
        batch, owners = batch_of(rows, "padded")
        batch["input_ids"], owners = batch["input_ids"].flip(1), owners.flip(1)
        batch["attention_mask"] = torch.ones_like(owners)
    model = random_model("llama", "eager")
    assert leak(model, batch, owners) > PLANTED
    assert distance_from_alone(model, batch, owners) > PLANTED
