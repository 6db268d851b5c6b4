# SPDX-License-Identifier: Apache-2.0
"""recipes/llama_dpo.py: what ranks that share a row compute of it; losses and rows of all forms are
compared with TRL's in tests/launch/test_dpo_trainer_parity.py."""

from argparse import Namespace

import pytest
import torch
from datasets import Dataset

import llama_dpo
from fakes import rows_of_their_own, sharing_rows

PAIRS = [
    {"prompt_ids": [5, 6], "chosen_ids": [7, 8, 9], "rejected_ids": [10], "row": 3},
    {"prompt_ids": [11], "chosen_ids": [12], "rejected_ids": [13, 14], "row": 8},
]


@pytest.mark.parametrize("learn_prompts", [False, True])
def test_log_probabilities_of_the_parts_of_a_row_add_up_to_those_of_the_row(learn_prompts):
    collate = llama_dpo.PairCollator(0, learn_prompts=learn_prompts, pad_to_multiple_of=2)
    batch = collate(Dataset.from_list(PAIRS), [[0], [1]])
    # The loss of a token is the same on any rank
    token_loss = Namespace(losses=lambda _, part: (part["targets"] / 10, None))
    whole = llama_dpo.answer_logps(rows_of_their_own(), None, token_loss, batch)
    by_pair, prompts = torch.zeros(2, 2), torch.zeros(())
    for rank in range(2):
        with sharing_rows(2, rank).part_of(batch) as part:
            sums = llama_dpo.answer_logps(rows_of_their_own(), None, token_loss, part)
        assert len(part["targets"]) < len(batch["targets"])
        by_pair, prompts = by_pair + sums[0], prompts + sums[1]
    torch.testing.assert_close((by_pair, prompts), whole)
