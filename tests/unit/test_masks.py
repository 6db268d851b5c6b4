"""No token reaches the logits of another document, whatever the attention.

Neither in packed rows nor from padding. Tiny random models in fp32, in process. Flash attention needs a GPU: tests/gpu/test_masks_on_gpu.py.
"""

import json

import pytest
import torch
from datasets import Dataset

import llama
from components.chat import load_tokenizer
from components.packing import TokenCollator
from mask_probe import ARCHITECTURES, PADDING, distance_from_alone, leak, packed_batch, random_model

# Logits are about 0.5. A document alone is summed in another order, in fp32, which keeps seven
# digits
ALONE = 1e-6
PLANTED = 0.1  # what a planted leak moves at least
PLANTS = {
    "an all-ones mask": lambda batch: (
        batch | {"attention_mask": torch.ones_like(batch["input_ids"])}
    ),
    "positions that run on": lambda batch: batch | {"position_ids": torch.arange(24).expand(2, -1)},
    "a cache": lambda batch: batch | {"use_cache": True},
}
# flex_attention runs uncompiled: its mask is the same, and compiling takes a minute on a CPU
pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
    pytest.mark.filterwarnings("ignore:_compile flag"),
]


@pytest.fixture(params=["eager", "sdpa", "flex_attention"])
def attention(request):
    with torch.compiler.set_stance("force_eager"):
        yield request.param


@pytest.fixture(params=ARCHITECTURES)
def model(request, attention):
    return random_model(request.param, attention)


LAYOUTS = {  # lines of row numbers, and what the collator is asked for
    "padded": ([[0], [1], [2], [3], [4]], {}),
    "packed": ([[0, 1], [2], [3, 4]], {"width": 96}),
    "padding free": ([[0], [1], [2], [3], [4]], {"refit": True}),
}


def batch_of(tiny, layout):
    """(batch, owners) of five rows of two lengths as the recipe tokenises and lays them out."""
    tokenizer = load_tokenizer(tiny / "model")
    texts = (tiny / "data" / "train.jsonl").read_text().splitlines()
    rows = [
        llama.tokenize_row(json.loads(text), tokenizer, 1024) | {"row": i}
        for i, text in enumerate(texts[:5])
    ]
    lines, options = LAYOUTS[layout]
    lengths = (12, 100, 9, 100, 7)  # so that the short ones fit into one line of the longest
    chosen = [
        row | {key: row[key][-n:] for key in ("input_ids", "labels")}
        for row, n in zip(rows, lengths, strict=True)
    ]
    collate = TokenCollator(pad_token_id=tokenizer.pad_token_id, **options)
    inputs = collate(Dataset.from_list(chosen), lines)["inputs"]
    owners = torch.full_like(inputs["input_ids"], PADDING)
    for number, row in enumerate(chosen):  # wherever it was put: by its tokens
        tokens = torch.tensor(row["input_ids"])
        for line, ids in enumerate(inputs["input_ids"]):
            for start in range(len(ids) - len(tokens) + 1):
                if ids[start : start + len(tokens)].equal(tokens):
                    owners[line, start : start + len(tokens)] = number
    assert owners.unique().tolist() == [PADDING, *range(5)]
    return inputs | {"use_cache": False}, owners


def test_packed_documents_do_not_see_each_other(model):
    batch, owners = packed_batch([7, 1, 10, 6], [13, 5, 6])
    assert leak(model, batch, owners) == 0
    assert distance_from_alone(model, batch, owners) < ALONE


@pytest.mark.parametrize("plant", PLANTS)
def test_the_probe_finds_a_leak_between_documents(plant, model):
    batch, owners = packed_batch([7, 1, 10, 6], [13, 5, 6])
    batch = PLANTS[plant](batch)
    assert leak(model, batch, owners) > PLANTED
    assert distance_from_alone(model, batch, owners) > PLANTED


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_of_the_recipe_keeps_rows_and_padding_apart(layout, model, tiny):
    batch, owners = batch_of(tiny, layout)
    packed = layout != "padded"
    assert (len(owners) < 5, "position_ids" in batch) == (packed, packed)
    assert leak(model, batch, owners) == 0
    assert distance_from_alone(model, batch, owners) < ALONE


def test_the_probe_finds_padding_that_is_seen(model, tiny):
    batch, owners = batch_of(tiny, "padded")
    batch["input_ids"], owners = (
        batch["input_ids"].flip(1),
        owners.flip(1),
    )  # to the left, where causal models look
    batch["attention_mask"] = torch.ones_like(owners)
    assert leak(model, batch, owners) > PLANTED
    assert distance_from_alone(model, batch, owners) > PLANTED
