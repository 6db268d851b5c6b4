# SPDX-License-Identifier: Apache-2.0
"""The key of each fault is named with its line, in a file as the launcher's flags change it."""

import contextlib
import json

import pytest

from broken_configs import BROKEN, DEEPSPEED_JSON, FSDP2, ZERO, ZERO_WITHOUT_PRECISION
from core.config_names import find_unknown_keys, read_command
from extras.configs.rules import check
from launching import CONFIGS

ONLY_COSTS = {
    "prefetch that FSDP2 does not know",
    "number for FULL_SHARD under FSDP2",
    "HYBRID_SHARD on a mesh",
    "FULL_SHARD on a mesh",
    "FSDP1 FULL_SHARD under FSDP2's key",
    "FSDP1 meant, no version",
    "no wrap policy",
    "machines without an address",
    "no ZeRO stage",
    "ZeRO-3 that cannot save",
    "ZeRO-3 loaded whole",
}


def faults(folder, text, flags=""):
    """What is found in a file with this text, launched from its folder with these flags."""
    (folder / "config.yaml").write_text(text)
    words = [*flags.split(), "--config_file", "config.yaml", "train.py"]
    launch = read_command(words, str(folder))
    with contextlib.chdir(folder):  # where DeepSpeed looks for its JSON
        return [*find_unknown_keys(launch.config_file), *check(launch.config_file, launch)]


@pytest.mark.parametrize("name", BROKEN)
def test_the_broken_key_is_named(name, tmp_path):
    broken = BROKEN[name]
    found = faults(tmp_path, broken.text)
    severities = {one.severity for one in found if one.key.split(".")[-1] == broken.key}
    assert severities and ("error" not in severities) == (name in ONLY_COSTS)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_file_has_no_fault_with_and_without_flags(path, tmp_path):
    for flags in ("", "--mixed_precision no", "--main_process_port 0 --num_machines 1"):
        assert faults(tmp_path, path.read_text(), flags) == []


MESH_OF_9 = (
    "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"
    "  parallelism_config_dp_shard_size: 4\n"
)
OVERRIDDEN = [  # text, flags that mend it, key
    (FSDP2.replace("8", "9") + MESH_OF_9, "--num_processes 8", "parallelism_config"),
    (FSDP2 + "  fsdp_sharding_strategy: SHARD_GRAD_OP\n", "--fsdp_version 1", "sharding_strategy"),
    (FSDP2 + "deepspeed_config:\n  zero_stage: 2\n", "--multi_gpu", "deepspeed_config"),
    (ZERO + "  offload_param_device: cpu\n  zero_stage: 2\n", "--zero_stage 3", "offload_param"),
    ("distributed_type: 'NO'\nnum_processes: 2\n", "--num_processes 1", "distributed_type"),
    ("distributed_type: 'NO'\nnum_processes: 2\n", "--cpu", "distributed_type"),
]


@pytest.mark.parametrize(("text", "flags", "key"), OVERRIDDEN)
def test_a_value_is_judged_as_the_command_line_overrides_it(text, flags, key, tmp_path):
    def errors(flags):
        return [fault for fault in faults(tmp_path, text, flags) if fault.severity == "error"]

    assert any(key in fault.key for fault in errors(""))
    assert errors(flags) == []


JSON_FAULTS = [  # change of a DeepSpeed JSON that has no fault, key
    ({"gradient_cliping": 1.0}, "gradient_cliping"),
    ({"zero_optimization": {"stage": 3, "overlap_com": True}}, "zero_optimization.overlap_com"),
    ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage"),
    (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param.device",
    ),
    ({"zero_optimization": {"stage": 2, "round_robin_gradients": True}}, "round_robin_gradients"),
    ({"optimizer": {"type": "AdamW"}}, "optimizer"),
    ({"bf16": {"enabled": True, "loss_scale": 0}}, "bf16.loss_scale"),
    ({"bf16": {"enabled": "auto"}}, "bf16.enabled"),
    ({"zero_optimization": "cpu"}, "zero_optimization"),
]


@pytest.mark.parametrize(("change", "key"), JSON_FAULTS)
def test_a_deepspeed_json_is_checked_with_its_yaml(change, key, tmp_path):
    text = ZERO_WITHOUT_PRECISION + "  deepspeed_config_file: ds.json\n"
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED_JSON, indent=1))
    assert faults(tmp_path, text) == []
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED_JSON | change, indent=1))
    found = faults(tmp_path, text)
    assert any(fault.key.endswith(key) and fault.line for fault in found), found
    assert {fault.file for fault in found} == {"ds.json"}
