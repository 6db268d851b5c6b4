# SPDX-License-Identifier: Apache-2.0
"""recipes/mistral_pretrain.py: what a batch of blocks has, and what a token of a block sees."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig

import mistral_pretrain as recipe
from extras.mesh.layout import MeshLayout
from fakes import fake_accelerator
from mask_probe import SHAPE, distance_from_alone, leak

LENGTH = 8


def block(*documents, length=LENGTH):
    """A block of documents, given by number and tokens, behind which the data end."""
    made, filled = torch.zeros(3, length + 1, dtype=torch.int32), 0
    for number, tokens in documents:
        places = range(len(tokens))
        made[:, filled : filled + len(tokens)] = torch.tensor(
            [[*map(int, tokens)], places, [number for _ in places]]
        )
        filled += len(tokens)
    return made


class TestBatch:
    def test_numbers_by_hand(self):
        batch = recipe.make_batch(
            [
                block((7, [11, 12, 13]), (4, [21, 22]), (9, [31, 32, 33, 34])),
                block((9, [34, 35, 1])),
            ],
            LENGTH,
        )
        assert batch["inputs"]["input_ids"].tolist() == [
            [11, 12, 13, 21, 22, 31, 32, 33],
            [34, 35, 1, 0, 0, 0, 0, 0],
        ]
        assert batch["inputs"]["position_ids"].tolist() == [
            [0, 1, 2, 0, 1, 0, 1, 2],
            [0, 1, 2, 0, 0, 0, 0, 0],
        ]
        assert batch["positions"].tolist() == [0, 1, 3, 5, 6, 7, 8, 9]
        assert batch["targets"].tolist() == [12, 13, 22, 32, 33, 34, 35, 1]
        assert batch["counts"].tolist() == [8, 11] and batch["row"] == [4, 7, 9]

    @pytest.mark.parametrize("kind", ["cp", "sp"])
    def test_where_ranks_share_a_line_each_document_has_one(self, kind):
        blocks = [
            block((7, [11, 12, 13]), (4, [21, 22]), (9, [31, 32, 33, 34])),
            block((9, [34, 35, 1])),
        ]
        layout = MeshLayout(
            fake_accelerator(), {kind: 2}
        )  # lines are multiples of 4 under CP, of 2 under SP
        batch = recipe.make_batch(blocks, LENGTH, layout=layout)
        whole = recipe.make_batch(blocks, 8)
        ids = [[11, 12, 13, 0], [21, 22, 0, 0], [31, 32, 33, 0], [34, 35, 1, 0]]
        assert batch["inputs"].keys() == {"input_ids"}  # all begin at 0, as part_of counts them
        assert batch["inputs"]["input_ids"].tolist() == ids
        assert batch["positions"].tolist() == [0, 1, 4, 8, 9, 10, 12, 13]
        for name in ("targets", "counts"):
            assert batch[name].equal(whole[name])
        assert batch["row"] == whole["row"]
        nothing = recipe.make_batch([], LENGTH, layout=layout)
        assert nothing["inputs"]["input_ids"].shape == (1, layout.multiple_of)
        assert len(nothing["targets"]) == 0


# There are two layers, each of which sees four tokens back: a token influences the eighth token
# after it, but not the ninth
WINDOW, REACH, LONG = 5, 8, 40


@pytest.fixture(params=["eager", "sdpa"])
def attention(request):
    return request.param


def mistral(attention, window):
    torch.manual_seed(0)
    config = MistralConfig(**SHAPE, sliding_window=window)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def long_batch(lengths):
    """(inputs, owners) of a block, much longer than the window, of documents of these lengths."""
    rng = np.random.default_rng(1)
    documents = [(i, rng.integers(2, 300, length)) for i, length in enumerate(lengths, 1)]
    made = block(*documents, length=LONG)
    inputs = recipe.make_batch([made], LONG)["inputs"]
    return inputs | {"use_cache": False}, made[2, :-1].long()[None]


@torch.no_grad()
def reach(model, inputs, owners):
    """How far on a changed token still changes logits, at most.

    What is masked changes them by exactly 0.
    """
    logits, far = model(**inputs).logits, 0
    for i in range(LONG):
        ids = inputs["input_ids"].clone()
        ids[0, i] = (ids[0, i] + 1) % 300
        changed = (model(**inputs | {"input_ids": ids}).logits - logits).abs().amax(-1)[0]
        assert (changed[owners[0] != owners[0, i]] == 0).all() and (changed[:i] == 0).all()
        far = max(far, int(changed.nonzero().max()) - i)
    return far


class TestMasks:
    @pytest.mark.parametrize("lengths", [[40], [3, 30, 1, 6]], ids=str)
    def test_a_token_sees_its_document_alone_and_of_that_its_window_alone(self, attention, lengths):
        inputs, owners = long_batch(lengths)
        model = mistral(attention, WINDOW)
        assert max(lengths) > 2 * REACH and reach(model, inputs, owners) == REACH
        assert leak(model, inputs, owners) == 0
        assert distance_from_alone(model, inputs, owners) < 1e-6

    def test_the_probe_finds_a_window_that_is_lost(self, attention):
        lengths = [3, 30, 1, 6]
        inputs, owners = long_batch(lengths)
        assert reach(mistral(attention, None), inputs, owners) == max(lengths) - 1
