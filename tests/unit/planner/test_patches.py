# SPDX-License-Identifier: Apache-2.0
"""What the trace changes in other libraries is still needed."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils

from planner.patches import known_packing


def test_transformers_takes_every_fake_sequence_for_packed_rows():
    row = torch.arange(4)[None]
    assert masking_utils.find_packed_sequence_indices(row) is None
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(row)
        assert masking_utils.find_packed_sequence_indices(fake) is not None


@pytest.mark.parametrize("packed", [False, True])
def test_the_trace_tells_it_instead(packed):
    with FakeTensorMode(), known_packing(packed):
        found = masking_utils.find_packed_sequence_indices(torch.arange(4)[None])
    assert (found is not None) == packed
