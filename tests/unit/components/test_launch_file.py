# SPDX-License-Identifier: Apache-2.0
"""A recipe checks the file that its launcher read, as the launcher's own flags change it."""

import json

import pytest

from broken_configs import FSDP2, TYPO, ZERO_WITHOUT_PRECISION
from components import launch_file
from components.launch_command import read_command
from launching import CONFIGS

SHIPPED = sorted(CONFIGS.glob("*.yaml"))


def faults(tmp_path, text, flags="", name="config.yaml"):
    """(errors, warnings) of a file with this text, launched from its folder with these flags."""
    (tmp_path / name).write_text(text)
    words = [
        *flags.split(),
        "--config_file",
        name,
        "recipes/llama.py",
        "--config_file",
        "not the launcher's",
    ]
    return launch_file.faults_of(read_command(words, str(tmp_path)))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_file_passes_with_and_without_flags(path, tmp_path):
    for flags in (
        "",
        "--mixed_precision no",
        "--mixed_precision bf16",
        "--main_process_port 0 --num_machines 1",
    ):
        assert faults(tmp_path, path.read_text(), flags) == ([], []), flags


@pytest.mark.parametrize(
    ("text", "flags", "key"),
    [
        (
            FSDP2.replace("num_processes: 8", "num_processes: 9") + "parallelism_config:\n"
            "  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 4\n",
            "--num_processes 8",
            "parallelism_config",
        ),
        (
            FSDP2 + "  fsdp_sharding_strategy: SHARD_GRAD_OP\n",
            "--fsdp_version 1",
            "fsdp_sharding_strategy",
        ),
        (
            FSDP2.replace("version: 2", "version: 1") + "  fsdp_sync_module_states: false\n",
            "--fsdp_cpu_ram_efficient_loading false",
            "fsdp_sync_module_states",
        ),
        (FSDP2 + "deepspeed_config:\n  zero_stage: 2\n", "--multi_gpu", "deepspeed_config"),
        (
            ZERO_WITHOUT_PRECISION + "  zero_stage: 2\n  offload_param_device: cpu\n",
            "--zero_stage 3 --zero3_save_16bit_model true",
            "offload_param_device",
        ),
        ("distributed_type: 'NO'\nnum_processes: 2\n", "--num_processes 1", "distributed_type"),
        ("distributed_type: 'NO'\nnum_processes: 2\n", "--cpu", "distributed_type"),
        (
            "distributed_type: MULTI_GPU\nnum_processes: 4\ngpu_ids: 0,1\n",
            "--gpu_ids all",
            "gpu_ids",
        ),
    ],
    ids=lambda value: value if str(value).startswith("--") else "",
)
def test_a_value_that_the_command_line_overrides_is_judged_as_overridden(
    text, flags, key, tmp_path
):
    assert any(f".{key}:" in error or f" {key}:" in error for error in faults(tmp_path, text)[0])
    assert faults(tmp_path, text, flags)[0] == []


class TestDeepSpeedJson:
    CONTENT = {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
    }
    YAML = ZERO_WITHOUT_PRECISION + "  deepspeed_config_file: ds.json\n"

    def test_it_is_checked_too(self, tmp_path):
        wrong = self.CONTENT | {"gradient_cliping": 1.0}
        (tmp_path / "ds.json").write_text(json.dumps(wrong, indent=1))
        [error] = faults(tmp_path, self.YAML)[0]
        assert error.startswith(f"{tmp_path}/ds.json:11: gradient_cliping")

    def test_one_that_is_named_on_the_command_line_counts(self, tmp_path):
        (tmp_path / "ds.json").write_text(json.dumps(self.CONTENT | {"zero_optimisation": {}}))
        (tmp_path / "good.json").write_text(json.dumps(self.CONTENT))
        assert len(faults(tmp_path, self.YAML)[0]) == 1
        assert faults(tmp_path, self.YAML, "--deepspeed_config_file good.json")[0] == []

    def test_mixed_precision_of_the_command_line_is_not_refused_beside_it(self, tmp_path):
        (tmp_path / "ds.json").write_text(json.dumps(self.CONTENT))
        text = self.YAML.replace("deepspeed_config:", "mixed_precision: bf16\ndeepspeed_config:")
        assert "mixed_precision" in faults(tmp_path, text)[0][0]
        assert faults(tmp_path, text, "--mixed_precision bf16")[0] == []


def test_a_key_that_only_the_installed_accelerate_knows_is_no_fault(tmp_path, monkeypatch):
    def newer():
        parser = original()
        parser.add_argument("--fsdp_reshard_after_foward")
        return parser

    original = launch_file.launch_command_parser
    monkeypatch.setattr(launch_file, "launch_command_parser", newer)
    assert faults(tmp_path, TYPO) == ([], [])
    assert faults(tmp_path, FSDP2 + "  fsdp_reshard_after_forwrd: false\n")[0]
