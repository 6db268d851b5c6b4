# SPDX-License-Identifier: Apache-2.0
"""Each shipped YAML asks for what its name says, and for nothing about learning."""

import pytest
import yaml

from config_strategy import read, strategy_of
from launching import CONFIGS

EXPECTED = {  # engine and the strategy in FSDP1's words; places of the mesh
    "ddp": ("ddp NO_SHARD", 0),
    "deepspeed_ulysses": ("zero FULL_SHARD", 2),
    "deepspeed_zero0": ("zero NO_SHARD", 0),
    "deepspeed_zero1": ("zero ZeRO-1", 0),
    "deepspeed_zero2": ("zero ZeRO-2", 0),
    "deepspeed_zero2_offload": ("zero ZeRO-2", 0),
    "deepspeed_zero3": ("zero FULL_SHARD", 0),
    "deepspeed_zero3_offload": ("zero FULL_SHARD", 0),
    "ep": ("ddp NO_SHARD", 0),
    "fsdp": ("fsdp2 FULL_SHARD", 0),
    "fsdp1_full_shard": ("fsdp1 FULL_SHARD", 0),
    "fsdp1_hybrid_shard": ("fsdp1 HYBRID_SHARD", 0),
    "fsdp1_no_shard": ("fsdp1 NO_SHARD", 0),
    "fsdp1_shard_grad_op": ("fsdp1 SHARD_GRAD_OP", 0),
    "fsdp2_cp": ("fsdp2 FULL_SHARD", 4),
    "fsdp2_cpu_offload": ("fsdp2 FULL_SHARD", 0),
    "fsdp2_ep": ("fsdp2 FULL_SHARD", 0),
    "fsdp2_full_shard": ("fsdp2 FULL_SHARD", 0),
    "fsdp2_hybrid_shard": ("fsdp2 HYBRID_SHARD", 4),
    "fsdp2_shard_grad_op": ("fsdp2 SHARD_GRAD_OP", 0),
    "fsdp2_tp": ("fsdp2 FULL_SHARD", 4),
    "hsdp_cp": ("fsdp2 HYBRID_SHARD", 8),
    "hsdp_tp": ("fsdp2 HYBRID_SHARD", 8),
    "pp": ("ddp NO_SHARD", 0),
    "single": ("single NO_SHARD", 0),
    "tp": ("ddp NO_SHARD", 2),
}


def test_the_files_are_the_expected_ones():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(EXPECTED)


def test_the_yaml_to_start_with_is_a_file_with_the_content_of_fsdp2_full_shard():
    assert not any(path.is_symlink() for path in CONFIGS.glob("*.yaml"))  # a download lacks it
    first, same = CONFIGS / "fsdp.yaml", CONFIGS / "fsdp2_full_shard.yaml"
    assert first.read_bytes() == same.read_bytes()


@pytest.mark.parametrize("name", EXPECTED)
def test_it_asks_for_its_strategy_in_bf16_and_says_when_to_choose_it(name):
    path = CONFIGS / f"{name}.yaml"
    asked = strategy_of(read(path))
    assert (f"{asked.engine} {asked.in_force}", asked.places) == EXPECTED[name]
    content = yaml.safe_load(path.read_text())
    assert content["mixed_precision"] == "bf16" and content["num_processes"] >= 1
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert len(header) >= 3 and "Choose it" in " ".join(header)
