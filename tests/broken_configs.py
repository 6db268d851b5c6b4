# SPDX-License-Identifier: Apache-2.0
"""Configs that are wrong in one way each."""

from dataclasses import dataclass
from pathlib import Path

import yaml

FSDP = (
    "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config:\n"
    "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
)
FSDP1 = FSDP + "  fsdp_version: 1\n"
FSDP2 = FSDP + "  fsdp_version: 2\n"
FULL1 = FSDP1 + "  fsdp_sharding_strategy: FULL_SHARD\n"
FULL2 = FSDP2 + "  fsdp_reshard_after_forward: true\n"
ZERO = "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\ndeepspeed_config:\n"
ZERO2 = ZERO + "  zero_stage: 2\n"
ZERO3 = ZERO + "  zero_stage: 3\n  zero3_save_16bit_model: true\n"
# Without a precision, as beside a DeepSpeed JSON, which has its own
ZERO_WITHOUT_PRECISION = ZERO.replace("mixed_precision: bf16\n", "")
DDP = "distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf16\n"
DEEPSPEED_JSON = {
    "bf16": {"enabled": True},
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "stage3_max_live_parameters": 1e9,
        "offload_param": {"device": "cpu"},
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "train_micro_batch_size_per_gpu": "auto",
}


@dataclass(frozen=True)
class Broken:
    """A config that is wrong at one key.

    Attributes:
        text: of the file.
        key: that is wrong.
    """

    text: str
    key: str


def read_broken():
    """{what is wrong: Broken} of broken_configs.yaml."""
    broken = {}
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    for name, (key, base, replaced, added) in table.items():
        text = globals()[base] if base else ""
        for old, value in replaced.items():
            text = text.replace(old, value, 1)
        broken[name] = Broken(text + added, key)
    return broken


BROKEN = read_broken()
