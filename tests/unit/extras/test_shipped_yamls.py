# SPDX-License-Identifier: Apache-2.0
"""accelerate understands each YAML in full; it says what it is, and owns nothing about learning."""

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from launching import CONFIGS
from paths import FIRST_CHOICE, SAME_AS_FIRST_CHOICE

EXPECTED = {
    "single": "NO",
    "ddp": "MULTI_GPU",
    "pp": "MULTI_GPU",
    "fsdp": "FSDP",
    "fsdp1_full_shard": "FSDP",
    "fsdp1_shard_grad_op": "FSDP",
    "fsdp1_no_shard": "FSDP",
    "fsdp1_hybrid_shard": "FSDP",
    "fsdp2_full_shard": "FSDP",
    "fsdp2_shard_grad_op": "FSDP",
    "fsdp2_hybrid_shard": "FSDP",
    "fsdp2_cpu_offload": "FSDP",
    "ep": "MULTI_GPU",
    "fsdp2_ep": "FSDP",
    "tp": "MULTI_GPU",
    "fsdp2_tp": "FSDP",
    "hsdp_tp": "FSDP",
    "fsdp2_cp": "FSDP",
    "hsdp_cp": "FSDP",
    "deepspeed_ulysses": "DEEPSPEED",
    "deepspeed_zero0": "DEEPSPEED",
    "deepspeed_zero1": "DEEPSPEED",
    "deepspeed_zero2": "DEEPSPEED",
    "deepspeed_zero3": "DEEPSPEED",
    "deepspeed_zero2_offload": "DEEPSPEED",
    "deepspeed_zero3_offload": "DEEPSPEED",
}
OWNED_BY_THE_COMMAND_LINE = {
    "gradient_accumulation_steps",
    "gradient_clipping",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "optimizer",
    "scheduler",
}
PATHS = sorted(CONFIGS.glob("*.yaml"))


def test_the_files_are_the_expected_ones():
    assert {path.stem for path in PATHS} == set(EXPECTED)


def test_the_yaml_to_start_with_is_a_file_with_the_content_of_fsdp2_full_shard():
    assert not any(path.is_symlink() for path in PATHS)  # a download of a link holds only a name
    assert FIRST_CHOICE.read_bytes() == SAME_AS_FIRST_CHOICE.read_bytes()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
class TestConfig:
    def test_accelerate_knows_every_key(self, path):
        content = yaml.safe_load(path.read_text())
        assert content["distributed_type"] == EXPECTED[path.stem]
        load_config_from_file(str(path))  # refuses unknown keys at the top level
        known = {action.dest for action in launch_command_parser()._actions}
        for section, prefix in (
            ("fsdp_config", "fsdp_"),
            ("deepspeed_config", ""),
            ("parallelism_config", ""),
        ):
            for key in content.get(section, {}):  # accelerate ignores unknown ones here
                assert key.startswith(prefix) and key in known, f"{section}.{key}"

    def test_it_uses_the_sharding_key_of_its_version(self, path):
        fsdp = yaml.safe_load(path.read_text()).get("fsdp_config")
        if fsdp is None:
            return
        version = fsdp["fsdp_version"]
        assert path.stem == "fsdp" or path.stem.startswith((f"fsdp{version}_", "hsdp_"))
        assert ("fsdp_sharding_strategy" in fsdp) == (version == 1)
        assert ("fsdp_reshard_after_forward" in fsdp) == (version == 2)

    def test_it_only_owns_topology_and_precision(self, path):
        content = yaml.safe_load(path.read_text())
        assert content["mixed_precision"] == "bf16" and content["num_processes"] >= 1
        assert not OWNED_BY_THE_COMMAND_LINE & {*content, *content.get("deepspeed_config", {})}
        assert content.get("deepspeed_config", {}).get("zero_stage") != 3 or (
            content["deepspeed_config"]["zero3_save_16bit_model"] is True
        )

    def test_its_header_says_what_is_sharded_and_when_to_choose_it(self, path):
        header = [line for line in path.read_text().splitlines() if line.startswith("#")]
        assert len(header) >= 3 and "Choose it" in " ".join(header)
