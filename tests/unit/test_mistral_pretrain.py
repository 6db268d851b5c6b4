# SPDX-License-Identifier: Apache-2.0
"""recipes/mistral_pretrain.py: what a batch of blocks has."""

import pytest
import torch

import mistral_pretrain as recipe
from extras.mesh.layout import MeshLayout
from fakes import fake_accelerator

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
