# SPDX-License-Identifier: Apache-2.0
"""What the trace changes in other libraries while it runs, so that they accept fake tensors.

Seen in transformers 5.23. tests/unit/planner/test_patches.py shows what happens without it.
"""

import contextlib
from collections.abc import Iterator

import torch
from transformers import masking_utils


@contextlib.contextmanager
def known_packing(packed: bool) -> Iterator[None]:
    """Make transformers take sequences as packed, or not, without looking at them.

    It reads that from the values of position_ids. A fake tensor has none, so that every sequence
    would count as packed.
    """

    def find_as_known(position_ids: torch.Tensor) -> torch.Tensor | None:
        if packed:
            return torch.zeros_like(position_ids)
        return None

    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = find_as_known
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find
