# SPDX-License-Identifier: Apache-2.0
"""In which type DeepSpeed reduces and adds gradients, by stage.

The harm without it, and that of FSDP: tests/launch/test_upstream.py.
"""

from types import SimpleNamespace

import pytest

from core.workarounds import reduce_in_fp32
from fakes import fake_accelerator


@pytest.mark.parametrize(
    ("stage", "offload", "adds_in"),
    [
        (0, "none", None),
        (1, "none", None),
        (2, "none", "fp32"),
        (2, "cpu", None),
        (3, "none", "fp32"),
        (3, "cpu", "fp32"),
        (2, None, "fp32"),
    ],
)
def test_deepspeed_reduces_in_fp32_and_adds_in_fp32_where_it_can(stage, offload, adds_in):
    config = {"zero_optimization": {"offload_optimizer": offload and {"device": offload}}}
    zero = SimpleNamespace(zero_stage=stage, deepspeed_config=config)
    reduce_in_fp32(fake_accelerator(state=SimpleNamespace(deepspeed_plugin=zero, fsdp_plugin=None)))
    assert config["communication_data_type"] == "fp32"
    assert config.get("data_types", {}).get("grad_accum_dtype") == adds_in
