"""What the trace changes in other libraries while it runs, so that fake tensors pass through them.

Measured with transformers 5.23. tests/unit/planner/test_patches.py shows what happens without it.
"""

import contextlib
from unittest import mock

import torch
import transformers.masking_utils


def packing_as_told(packed: bool) -> contextlib.AbstractContextManager:
    """Tell transformers whether sequences hold several rows.

    It reads that from the values of position_ids. A fake tensor has none, so that every sequence
    would count as packed.
    """

    def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
        if packed:
            return torch.zeros_like(position_ids)
        return None

    return mock.patch.object(
        transformers.masking_utils, "find_packed_sequence_indices", find_packed_sequence_indices
    )
