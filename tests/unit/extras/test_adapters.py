# SPDX-License-Identifier: Apache-2.0
"""Which splits of matrices adapters cannot follow."""

import pytest
import torch
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from extras.mesh.adapters import split_adapters_of


@pytest.mark.parametrize("style", [None, ALL_PARALLEL_STYLES["embedding_rowwise"]])
def test_adapters_of_whole_outputs_stay_whole(style):
    layer = torch.nn.ModuleDict({"lora_A": torch.nn.Linear(2, 1)})
    before = dict(layer.named_parameters())
    split_adapters_of(layer, "embed_tokens", style, mesh=None)
    assert dict(layer.named_parameters()) == before


def test_adapters_of_other_splits_are_refused():
    dora = torch.nn.Module()
    dora.use_dora = {"default": True}
    for layer, style in ((torch.nn.Module(), "grouped_gemm"), (dora, "colwise")):
        with pytest.raises(ValueError, match="layers.0"):
            split_adapters_of(layer, "layers.0", ALL_PARALLEL_STYLES[style], mesh=None)
