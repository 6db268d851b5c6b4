"""scripts/check_config.py tells what a config does, finds what is wrong with it, and mends it without harm.

The launcher and the plugins of accelerate are the judges wherever the check claims that a key is ignored or refused.
"""

import json
import random
import re
import subprocess
import sys
from contextlib import nullcontext

import accelerate_keys as keys
import check_config
import config_files
import config_rules
import pytest
import yaml
from accelerate.commands.config import cluster
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    TERecipeKwargs,
    patch_environment,
)
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from launching import CONFIGS, REPO
from yaml_edits import edit_content

SHIPPED = sorted(CONFIGS.glob("*.yaml"))
FSDP = (
    "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config:\n"
    "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
)
FSDP1, FSDP2 = FSDP + "  fsdp_version: 1\n", FSDP + "  fsdp_version: 2\n"
FULL1, FULL2 = (
    FSDP1 + "  fsdp_sharding_strategy: FULL_SHARD\n",
    FSDP2 + "  fsdp_reshard_after_forward: true\n",
)
ZERO = "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\ndeepspeed_config:\n"
ZERO2, ZERO3 = (
    ZERO + "  zero_stage: 2\n",
    ZERO + "  zero_stage: 3\n  zero3_save_16bit_model: true\n",
)
DDP = "distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf16\n"
MESH = "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: "


def write(tmp_path, text, name="config.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def run(*arguments, monkeypatch):
    """The exit code of a call."""
    monkeypatch.setattr(sys, "argv", ["check_config.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        check_config.main()
    return stopped.value.code


def what_runs(path, ranks=None):
    return check_config.check_file(check_config.load(path), ranks)[1]


# ---- Shipped files ----
SHARES = {  # of parameters, gradients and optimizer state, with 4 processes
    "single": "whole whole whole",
    "ddp": "whole whole whole",
    "fsdp": "1/4 1/4 1/4",
    "fsdp1_full_shard": "1/4 1/4 1/4",
    "fsdp1_shard_grad_op": "1/4 1/4 1/4",
    "fsdp1_no_shard": "whole whole whole",
    "fsdp1_hybrid_shard": "1/4 1/4 1/4",
    "fsdp2_full_shard": "1/4 1/4 1/4",
    "fsdp2_shard_grad_op": "1/4 1/4 1/4",
    "fsdp2_hybrid_shard": "1/2 1/2 1/2",
    "fsdp2_cpu_offload": "1/4 1/4 1/4",
    "deepspeed_zero0": "whole whole whole",
    "deepspeed_zero1": "whole whole 1/4",
    "deepspeed_zero2": "whole 1/4 1/4",
    "deepspeed_zero3": "1/4 1/4 1/4",
    "deepspeed_zero2_offload": "whole 1/4 1/4",
    "deepspeed_zero3_offload": "1/4 1/4 1/4",
}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
class TestShippedFile:
    def test_it_passes_and_every_key_has_an_effect(self, path, monkeypatch, capsys):
        assert run(path, "--strict", monkeypatch=monkeypatch) == 0
        said = capsys.readouterr().out
        assert "no effect    none of the keys" in said and "warning" not in said

    def test_the_explanation_names_what_is_split(self, path):
        words = what_runs(path, None if path.stem == "single" else 4)
        shares = [words[name].split()[0] for name in ("parameters", "gradients", "optimizer")]
        assert " ".join(shares) == SHARES[path.stem]
        assert (words["state"] != "on the GPU") == ("offload" in path.stem)
        assert "bf16" in words["precision"]


# ---- Broken files ----
# name: (file, severity, key, words of the finding, {key: value} of the mended file or None where a person must choose)
BROKEN = {
    "no distributed_type": ("num_processes: 8\n", "error", "distributed_type", "missing", None),
    "no distributed_type, but a section": (
        FULL2.replace("distributed_type: FSDP\n", ""),
        "error",
        "distributed_type",
        "FSDP",
        {"distributed_type": "FSDP"},
    ),
    "bare NO": (
        "distributed_type: NO\nnum_processes: 1\n",
        "warning",
        "distributed_type",
        '"NO"',
        {"distributed_type": "NO"},
    ),
    "bare no precision": (
        DDP.replace("bf16", "no"),
        "error",
        "mixed_precision",
        "false in YAML",
        {"mixed_precision": "no"},
    ),
    "misspelt engine": (
        FULL2.replace("FSDP\n", "FDSP\n", 1),
        "error",
        "distributed_type",
        "FSDP",
        {"distributed_type": "FSDP"},
    ),
    "engine in small letters": (
        DDP.lower(),
        "error",
        "distributed_type",
        "MULTI_GPU",
        {"distributed_type": "MULTI_GPU"},
    ),
    "DDP as an engine": (
        DDP.replace("MULTI_GPU", "DDP"),
        "error",
        "distributed_type",
        "MULTI_GPU",
        {"distributed_type": "MULTI_GPU"},
    ),
    "unknown precision": (
        DDP.replace("bf16", "fp32"),
        "error",
        "mixed_precision",
        "no",
        {"mixed_precision": "no"},
    ),
    "misspelt top-level key": (
        DDP + "num_machine: 1\n",
        "error",
        "num_machine",
        "num_machines",
        {"num_machines": 1},
    ),
    "misspelt section": (
        FULL2.replace("fsdp_config", "fdsp_config"),
        "error",
        "fdsp_config",
        "fsdp_config",
        {"fsdp_version": 2},
    ),
    "misspelt key in a section": (
        FULL2 + "  fsdp_offload_param: true\n",
        "error",
        "fsdp_offload_param",
        "fsdp_offload_params",
        {"fsdp_offload_params": True},
    ),
    "misspelt value": (
        FSDP1 + "  fsdp_sharding_strategy: FULL_SHRAD\n",
        "error",
        "fsdp_sharding_strategy",
        "FULL_SHARD",
        {"fsdp_sharding_strategy": "FULL_SHARD"},
    ),
    "misspelt wrap policy": (
        FULL2.replace("TRANSFORMER_BASED", "TRANSFORMERS_BASED"),
        "error",
        "fsdp_auto_wrap_policy",
        "TRANSFORMER_BASED_WRAP",
        {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    ),
    "value that is no boolean": (
        FULL2 + "  fsdp_offload_params: maybe\n",
        "error",
        "fsdp_offload_params",
        "True, False",
        None,
    ),
    "misspelt beside the right one": (
        FULL2 + "  fsdp_offload_param: true\n  fsdp_offload_params: false\n",
        "error",
        "fsdp_offload_param",
        "fsdp_offload_params is written too",
        None,
    ),
    "incomplete beside the complete": (
        FULL2 + "  offload_params: true\n  fsdp_offload_params: false\n",
        "error",
        "offload_params",
        "the last one counts",
        None,
    ),
    "misplaced beside another": (
        FULL2.replace("bf16", "'no'") + "  mixed_precision: bf16\n",
        "error",
        "mixed_precision",
        "mixed_precision is written too",
        None,
    ),
    "misplaced, and again in its place": (
        FULL2 + "  fsdp_offload_params: true\nfsdp_offload_params: true\n",
        "error",
        "fsdp_offload_params",
        "its place is fsdp_config; fsdp_offload_params is written too",
        {"fsdp_offload_params": True},
    ),
    "no boolean for FSDP2": (
        FSDP2 + "  fsdp_reshard_after_forward: ture\n",
        "error",
        "fsdp_reshard_after_forward",
        "ture: must be one of True, False",
        {"fsdp_reshard_after_forward": True},
    ),
    "processes in words": (
        FULL2.replace("num_processes: 8", "num_processes: two"),
        "error",
        "num_processes",
        "two: must be a whole number",
        None,
    ),
    "section of accelerate 1.12": (
        DDP + "ipex_config:\n  ipex: true\n  use_xpu: false\n",
        "error",
        "ipex_config",
        "older versions knew",
        {"num_processes": 8, "fp8_config": None, "ipex": None},
    ),
    "key of accelerate 1.12": (
        DDP + "mpirun_config: {mpirun_ccl: '1', mpirun_hostfile: /h}\n",
        "error",
        "mpirun_ccl",
        "older versions knew",
        {"mpirun_hostfile": "/h", "mpirun_ccl": None},
    ),
    "section of accelerate 1.6": (
        DDP + "tp_config:\n  tp_size: 2\n",
        "error",
        "tp_config",
        "parallelism_config_tp_size",
        None,
    ),
    "section of another tool": (
        DDP + "my_config:\n  a: 1\n",
        "error",
        "my_config",
        "its right name",
        None,
    ),
    "section that is none": (
        FULL2.replace("fsdp_config:", "fsdp_config: true\nother:"),
        "error",
        "fsdp_config",
        "is a section",
        None,
    ),
    "prefetch that FSDP2 does not know": (
        FULL2 + "  fsdp_forward_prefetch: true\n",
        "warning",
        "fsdp_forward_prefetch",
        "nothing is prefetched",
        {"fsdp_forward_prefetch": None},
    ),
    "number for FULL_SHARD under FSDP2": (
        FSDP2 + "  fsdp_sharding_strategy: 1\n",
        "warning",
        "fsdp_sharding_strategy",
        "FULL_SHARD runs anyway",
        {"fsdp_reshard_after_forward": True},
    ),
    "HYBRID_SHARD on a mesh": (
        FSDP2.replace("8", "4") + "  fsdp_sharding_strategy: HYBRID_SHARD\n" + MESH + "2\n",
        "warning",
        "fsdp_sharding_strategy",
        "HYBRID_SHARD runs anyway",
        {"fsdp_reshard_after_forward": True},
    ),
    "FULL_SHARD on a mesh": (
        FSDP2.replace("8", "4") + "  fsdp_sharding_strategy: FULL_SHARD\n" + MESH + "2\n",
        "warning",
        "fsdp_sharding_strategy",
        "HYBRID_SHARD runs anyway",
        {"fsdp_reshard_after_forward": True},
    ),
    "empty value": (
        FULL2 + "  fsdp_offload_params:\n",
        "error",
        "fsdp_offload_params",
        "empty",
        None,
    ),
    "layers as a list": (
        FULL2 + "  fsdp_transformer_layer_cls_to_wrap: [LlamaDecoderLayer]\n",
        "error",
        "fsdp_transformer_layer_cls_to_wrap",
        "LlamaDecoderLayer",
        {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
    ),
    "key of another place": (
        FULL2 + "  num_machines: 1\n",
        "error",
        "num_machines",
        "the top level",
        {"num_machines": 1},
    ),
    "section key at the top level": (
        FULL2 + "fsdp_offload_params: true\n",
        "error",
        "fsdp_offload_params",
        "in fsdp_config",
        {"fsdp_offload_params": True},
    ),
    "DeepSpeed key for FSDP": (
        FULL2 + "  zero_stage: 3\n",
        "error",
        "zero_stage",
        "FSDP does not read",
        {"fsdp_version": 2},
    ),
    "mesh without the long prefix": (
        FULL2.replace("8", "4") + MESH.replace("parallelism_config_dp_r", "dp_r") + "2\n",
        "error",
        "dp_replicate_size",
        "parallelism_config_dp_replicate_size",
        {"parallelism_config_dp_replicate_size": 2},
    ),
    "FSDP key without its prefix": (
        FULL2 + "  offload_params: true\n",
        "warning",
        "offload_params",
        "fsdp_offload_params",
        {"fsdp_offload_params": True},
    ),
    "accumulation in the file": (
        ZERO2 + "  gradient_accumulation_steps: 4\n",
        "error",
        "gradient_accumulation_steps",
        "--gradient_accumulation_steps",
        {"zero_stage": 2},
    ),
    "clipping at the top level": (
        DDP + "gradient_clipping: 1.0\n",
        "error",
        "gradient_clipping",
        "accelerate refuses unknown keys here; the recipes take it from their command line: --max_grad_norm",
        {"num_processes": 8},
    ),
    "FSDP1 NO_SHARD under FSDP2's key": (
        FSDP1 + "  fsdp_reshard_after_forward: NO_SHARD\n",
        "error",
        "fsdp_reshard_after_forward",
        "FULL_SHARD runs, not NO_SHARD",
        {"fsdp_sharding_strategy": "NO_SHARD"},
    ),
    "FSDP1 SHARD_GRAD_OP under FSDP2's key": (
        FSDP1 + "  fsdp_reshard_after_forward: SHARD_GRAD_OP\n",
        "error",
        "fsdp_reshard_after_forward",
        "FULL_SHARD runs",
        {"fsdp_sharding_strategy": "SHARD_GRAD_OP"},
    ),
    "FSDP1 FULL_SHARD under FSDP2's key": (
        FSDP1 + "  fsdp_reshard_after_forward: FULL_SHARD\n",
        "warning",
        "fsdp_reshard_after_forward",
        "FULL_SHARD runs anyway",
        {"fsdp_sharding_strategy": "FULL_SHARD"},
    ),
    "FSDP2 NO_SHARD under FSDP1's key": (
        FSDP2 + "  fsdp_sharding_strategy: NO_SHARD\n",
        "error",
        "fsdp_sharding_strategy",
        "FULL_SHARD runs, not NO_SHARD",
        {"distributed_type": "MULTI_GPU", "fsdp_config": None},
    ),
    "FSDP2 SHARD_GRAD_OP under FSDP1's key": (
        FSDP2 + "  fsdp_sharding_strategy: SHARD_GRAD_OP\n",
        "error",
        "fsdp_sharding_strategy",
        "FULL_SHARD runs",
        {"fsdp_reshard_after_forward": False},
    ),
    "FSDP2 HYBRID_SHARD without a mesh": (
        FSDP2 + "  fsdp_sharding_strategy: HYBRID_SHARD\n",
        "error",
        "fsdp_sharding_strategy",
        "fsdp2_hybrid_shard.yaml",
        None,
    ),
    "FSDP2 NO_SHARD as it would be said to FSDP1": (
        FSDP2 + "  fsdp_reshard_after_forward: NO_SHARD\n",
        "error",
        "fsdp_reshard_after_forward",
        "DDP holds the same",
        {"distributed_type": "MULTI_GPU", "fsdp_config": None},
    ),
    "FSDP1 true as it would be said to FSDP2": (
        FSDP1 + "  fsdp_sharding_strategy: true\n",
        "error",
        "fsdp_sharding_strategy",
        "FSDP2 says it",
        {"fsdp_sharding_strategy": "FULL_SHARD"},
    ),
    "both sharding keys, apart": (
        FULL2 + "  fsdp_sharding_strategy: NO_SHARD\n",
        "error",
        "fsdp_sharding_strategy",
        "FULL_SHARD runs, not NO_SHARD",
        None,
    ),
    "FSDP2 meant, no version": (
        FSDP + "  fsdp_reshard_after_forward: false\n",
        "error",
        "fsdp_version",
        "FSDP1 runs",
        {"fsdp_version": 2, "fsdp_reshard_after_forward": False},
    ),
    "FSDP1 meant, no version": (
        FSDP + "  fsdp_sharding_strategy: FULL_SHARD\n",
        "warning",
        "fsdp_version",
        "FSDP1 runs",
        {"fsdp_version": 1},
    ),
    "no such version": (FSDP + "  fsdp_version: 3\n", "error", "fsdp_version", "one of 1, 2", None),
    "no wrap policy": (
        FULL2.replace("  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n", ""),
        "warning",
        "fsdp_auto_wrap_policy",
        "one unit",
        {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    ),
    "shards of NO_SHARD": (
        FSDP1 + "  fsdp_sharding_strategy: NO_SHARD\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n",
        "warning",
        "fsdp_state_dict_type",
        "no shards",
        {"fsdp_state_dict_type": "FULL_STATE_DICT"},
    ),
    "FSDP2 LOCAL_STATE_DICT": (
        FULL2 + "  fsdp_state_dict_type: LOCAL_STATE_DICT\n",
        "error",
        "fsdp_state_dict_type",
        "FSDP2 has none",
        {"fsdp_state_dict_type": "SHARDED_STATE_DICT"},
    ),
    "FSDP1 without sync": (
        FULL1 + "  fsdp_sync_module_states: false\n",
        "error",
        "fsdp_sync_module_states",
        "refuses",
        {"fsdp_cpu_ram_efficient_loading": False},
    ),
    "FSDP2 without sync": (
        FULL2 + "  fsdp_sync_module_states: false\n",
        "error",
        "fsdp_sync_module_states",
        "refuses",
        {"fsdp_version": 2},
    ),
    "FSDP1 with flat parameters": (
        FULL1 + "  fsdp_use_orig_params: false\n",
        "error",
        "fsdp_use_orig_params",
        "nothing is trained",
        {"fsdp_use_orig_params": True},
    ),
    "offloaded checkpoints of FSDP1": (
        FULL1 + "  fsdp_activation_checkpointing_offload: true\n",
        "error",
        "fsdp_activation_checkpointing_offload",
        "needs FSDP2",
        None,
    ),
    "FSDP section under DDP": (
        FULL2.replace("FSDP", "MULTI_GPU", 1),
        "error",
        "distributed_type",
        "MULTI_GPU runs and does not read fsdp_config",
        {"distributed_type": "FSDP"},
    ),
    "DeepSpeed section under FSDP": (
        FULL2 + "deepspeed_config:\n  zero_stage: 3\n",
        "error",
        "deepspeed_config",
        "FSDP runs",
        {"deepspeed_config": None, "distributed_type": "FSDP"},
    ),
    "many processes under NO": (
        DDP.replace("MULTI_GPU", '"NO"'),
        "error",
        "distributed_type",
        "one process runs, not 8",
        {"distributed_type": "MULTI_GPU"},
    ),
    "no number of processes": (
        "distributed_type: MULTI_GPU\n",
        "warning",
        "num_processes",
        "--num_processes",
        None,
    ),
    "processes that do not spread": (
        DDP + "num_machines: 3\nmain_process_ip: a\nmain_process_port: 1\n",
        "error",
        "num_processes",
        "6 run",
        None,
    ),
    "number in quotes": (
        DDP.replace("8", '"8"'),
        "warning",
        "num_processes",
        "num_processes: 8",
        {"num_processes": 8},
    ),
    "machines without an address": (
        DDP + "num_machines: 2\n",
        "warning",
        "num_machines",
        "main_process_ip",
        None,
    ),
    "no machine": (
        DDP + "num_machines: 0\n",
        "warning",
        "num_machines",
        "one machine runs",
        {"num_machines": 1},
    ),
    "no machine, no processes": (
        "distributed_type: MULTI_GPU\nnum_machines: 0\nnum_processes: many\n",
        "error",
        "num_processes",
        "a whole number",
        None,
    ),
    "rank of no machine": (DDP + "machine_rank: 1\n", "error", "machine_rank", "0 to 0", None),
    "DeepSpeed on machines without a hostfile": (
        ZERO2 + "num_machines: 2\nmain_process_ip: a\nmain_process_port: 1\n",
        "error",
        "num_machines",
        "this machine alone",
        None,
    ),
    "rendezvous in the file": (
        DDP + "num_machines: 2\nmain_process_ip: a\nmain_process_port: 1\nrdzv_backend: c10d\n",
        "warning",
        "rdzv_backend",
        "--rdzv_backend",
        None,
    ),
    "GPU ids as a number": (DDP + "gpu_ids: 0\n", "error", "gpu_ids", "not text", None),
    "fewer GPUs than processes": (DDP + "gpu_ids: 0,1\n", "error", "gpu_ids", "8 processes", None),
    "mesh and processes apart": (
        FULL2 + MESH + "2\n",
        "error",
        "parallelism_config",
        "multiply to 4",
        None,
    ),
    "mesh for FSDP1": (
        FULL1.replace("8", "4") + MESH + "2\n",
        "error",
        "parallelism_config",
        "FSDP1 takes no mesh",
        None,
    ),
    "mesh without FSDP": (
        DDP.replace("8", "4") + MESH + "2\n",
        "error",
        "parallelism_config",
        "shards nothing",
        {"distributed_type": "FSDP", "fsdp_version": 2},
    ),
    "mesh that shards nothing": (
        FULL2.replace("8", "2") + MESH + "1\n",
        "error",
        "parallelism_config",
        "nothing to shard",
        None,
    ),
    "tensor parallel mesh": (
        FULL2 + "parallelism_config:\n  parallelism_config_tp_size: 8\n",
        "error",
        "parallelism_config_tp_size",
        "shard and replicate alone",
        None,
    ),
    "fp16 as it was": (
        "distributed_type: MULTI_GPU\nnum_processes: 8\nfp16: true\n",
        "warning",
        "fp16",
        "old name",
        {"mixed_precision": "fp16", "fp16": None},
    ),
    "fp8 of no backend": (
        DDP.replace("bf16", "fp8"),
        "warning",
        "mixed_precision",
        "first installed",
        None,
    ),
    "no ZeRO stage": (
        ZERO + "  zero3_init_flag: false\n",
        "warning",
        "zero_stage",
        "ZeRO-2 runs",
        {"zero_stage": 2},
    ),
    "no such ZeRO stage": (ZERO + "  zero_stage: 4\n", "error", "zero_stage", "0, 1, 2, 3", None),
    "ZeRO-3 that cannot save": (
        ZERO + "  zero_stage: 3\n",
        "error",
        "zero3_save_16bit_model",
        "fails at the final save",
        {"zero3_save_16bit_model": True},
    ),
    "ZeRO-3 loaded whole": (
        ZERO3 + "  zero3_init_flag: false\n",
        "warning",
        "zero3_init_flag",
        "whole model",
        {"zero3_init_flag": True},
    ),
    "ZeRO-2 with parameters offloaded": (
        ZERO2 + "  offload_param_device: cpu\n",
        "error",
        "offload_param_device",
        "ZeRO-2 does not offload",
        None,
    ),
    "no such device": (
        ZERO3 + "  offload_param_device: gpu\n",
        "error",
        "offload_param_device",
        "none, cpu, nvme",
        {"offload_param_device": "none"},
    ),
    "nvme, whose path is lost": (
        ZERO3 + "  offload_param_device: nvme\n  offload_param_nvme_path: /fast\n",
        "error",
        "offload_param_device",
        "./none",
        None,
    ),
    "DeepSpeed file that is not there": (
        ZERO.replace("mixed_precision: bf16\n", "") + "  deepspeed_config_file: no.json\n",
        "error",
        "deepspeed_config_file",
        "no JSON file",
        None,
    ),
    "settings beside a DeepSpeed file": (
        ZERO2 + "  deepspeed_config_file: no.json\n",
        "error",
        "mixed_precision",
        "bf16.enabled",
        None,
    ),
    "key written twice": (
        DDP + "num_processes: 4\n",
        "error",
        "num_processes",
        "last one counts",
        None,
    ),
}


def flat(content):
    """All keys of a config, those of its sections too, in one dict."""
    inner = [flat(value) for value in content.values() if isinstance(value, dict)]
    return {key: value for section in [content, *inner] for key, value in section.items()}


@pytest.mark.parametrize("name", BROKEN)
class TestBrokenFile:
    def test_it_is_found_with_its_key_its_reason_and_the_way_out(self, name, tmp_path):
        text, severity, key, words, _ = BROKEN[name]
        file = check_config.load(write(tmp_path, text))
        found = [
            item for item in check_config.check_file(file, recipes=True)[0] if item.path[-1] == key
        ]
        assert severity in [item.severity for item in found]
        assert any(words in f"{item.reason}; {item.fix}" for item in found), found
        assert all(item.fix for item in found if item.severity != "info")
        assert file.line_of(found[0].path) or "missing" in found[0].reason

    def test_it_is_mended_as_its_author_meant_or_left_to_a_person(self, name, tmp_path):
        text, _, key, _, meant = BROKEN[name]
        fixed, mended, left = check_config.mend(
            check_config.load(write(tmp_path, text)), recipes=True
        )
        if meant is None:
            assert key in [item.path[-1] for item in left]
            return
        assert mended and not left
        assert {name: flat(fixed.content).get(name) for name in meant} == meant
        again = check_config.load(write(tmp_path, fixed.text, "fixed.yaml"))
        assert again.content == fixed.content
        assert all(
            item.severity == "info" for item in check_config.check_file(again, recipes=True)[0]
        )


WISHES = {  # of the recipes, and what anybody else is told
    "accumulation in the file": "info",
    "FSDP1 with flat parameters": "info",
    "tensor parallel mesh": "info",
    "ZeRO-3 that cannot save": "warning",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_wish_of_the_recipes_is_no_fault_of_somebody_elses_file(name, tmp_path):
    text, severity, key, _, _ = BROKEN[name]
    file = check_config.load(write(tmp_path, text))
    found = {item.severity for item in check_config.check_file(file)[0] if item.path[-1] == key}
    assert WISHES.get(name, severity) in found and (name not in WISHES or "error" not in found)


def test_a_deepspeed_key_at_the_top_level_has_accelerates_reason_and_moves(tmp_path):
    text = ZERO2.replace("deepspeed_config:", "gradient_clipping: 1.0\ndeepspeed_config:")
    file = check_config.load(write(tmp_path, text))
    (item,) = [item for item in check_config.check_file(file)[0] if item.severity == "error"]
    assert item.reason == "accelerate refuses unknown keys here; its place is deepspeed_config"
    moved = check_config.mend(file)[0].content
    assert (
        moved["deepspeed_config"]["gradient_clipping"] == 1.0 and "gradient_clipping" not in moved
    )
    assert "gradient_clipping" not in flat(check_config.mend(file, recipes=True)[0].content)


def test_what_the_recipes_are_not_tested_with_is_a_warning_for_them_alone(tmp_path):
    for text in (
        DDP.replace("MULTI_GPU", "MULTI_CPU"),
        DDP.replace("bf16", "fp8") + "fp8_config: {fp8_backend: TE}\n",
    ):
        file = check_config.load(write(tmp_path, text))
        said = [
            [item.severity for item in check_config.check_file(file, recipes=recipes)[0]]
            for recipes in (0, 1)
        ]
        assert said == [["info"], ["warning"]]


def test_there_are_enough_broken_files():
    assert len(BROKEN) >= 25
    print(
        f"{len(BROKEN)} broken files, {sum(case[4] is not None for case in BROKEN.values())} mended"
    )


def test_several_faults_are_mended_together_and_comments_stay(tmp_path):
    text = (
        "# mine\ndistributed_type: FSDP  # sharded\n\nnum_processes: 8\nfsdp_config:\n  # FSDP1\n"
        "  fsdp_version: 1\n  fsdp_reshard_after_forward: NO_SHARD  # whole\n  fsdp_offlod_params: false\n"
        "  fsdp_state_dict_type: SHARDED_STATE_DICT\n  gradient_clipping: 1.0\n"
    )
    fixed, _, left = check_config.mend(check_config.load(write(tmp_path, text)))
    assert not left
    assert fixed.text == (
        "# mine\ndistributed_type: FSDP  # sharded\n\nnum_processes: 8\nfsdp_config:\n  # FSDP1\n"
        "  fsdp_version: 1\n  fsdp_sharding_strategy: NO_SHARD  # whole\n  fsdp_offload_params: false\n"
        "  fsdp_state_dict_type: FULL_STATE_DICT\n"
    )


def test_mending_never_writes_a_key_twice_nor_over_another():
    text = (
        FULL2
        + "  fsdp_offload_param: true\n  fsdp_offlod_params: false\n  offload_params: true\nnum_process: 2\n"
    )
    for case in (
        text,
        *(
            case[0]
            for case in BROKEN.values()
            if case[2] != "num_processes" and "tw" not in case[3]
        ),
    ):
        fixed, _, _ = check_config.mend(
            config_files.ConfigFile(CONFIGS / "mine.yaml", case, yaml.safe_load(case))
        )
        assert not fixed.positions[1] and yaml.safe_load(fixed.text) == fixed.content
    fixed, mended, left = check_config.mend(
        config_files.ConfigFile(CONFIGS / "mine.yaml", text, yaml.safe_load(text))
    )
    assert (
        not [item for item in mended if "num_process" in item.path]
        and fixed.content["num_processes"] == 8
    )
    assert {"fsdp_offload_param", "fsdp_offlod_params", "num_process"} <= {
        item.path[-1] for item in left
    } | {item.path[-1] for item in mended}


def test_comments_stay_or_are_said_to_be_lost(tmp_path, monkeypatch, capsys):
    path = write(
        tmp_path, "distributed_type: MULTI_GPU  # mine\nnum_processes: 8\nfp16: true # keep\n"
    )
    assert run(path, "--fix", monkeypatch=monkeypatch) == 0
    assert (tmp_path / "config.fixed.yaml").read_text().endswith("mixed_precision: fp16 # keep\n")
    assert "lost" not in capsys.readouterr().out
    path = write(
        tmp_path,
        FSDP2.split("fsdp_config")[0]
        + "# all\nfsdp_config: {fsdp_version: 2,  # new\n  fsdp_offload_params: true,\n"
        "  fsdp_auto_wrap_policy: 'TRANSFORMER_BASED_WRAP', zzzz: '#1'}\n",
    )
    assert run(path, "--fix", monkeypatch=monkeypatch) == 0
    assert f"{tmp_path}/config.fixed.yaml: comments lost: # all  # new\n" in capsys.readouterr().out


def test_a_file_in_flow_style_is_mended_too(tmp_path):
    text = "{distributed_type: FSDP, num_processes: 8, fsdp_config: {fsdp_version: 2, fsdp_offlod_params: true}}"
    fixed, _, left = check_config.mend(check_config.load(write(tmp_path, text)))
    assert not left and yaml.safe_load(fixed.text)["fsdp_config"]["fsdp_offload_params"] is True


def test_no_value_of_any_kind_makes_the_check_fail():
    samples = [yaml.safe_load(path.read_text()) for path in SHIPPED] + [
        yaml.safe_load(text)
        for text in (*(case[0] for case in BROKEN.values()), FULL2 + MESH + "2\n")
    ]
    for content in samples:
        for path in paths_of(content):
            for value in (
                None,
                True,
                7,
                -1,
                2.5,
                "",
                "word",
                [],
                ["a"],
                {},
                {"a": {"b": 1}},
                {1: 2},
            ):
                broken = edit_content(content, ("set", path, value))
                findings, config = config_rules.check(broken)
                check_config.explain(broken, config, findings)
    for path in paths_of(DEEPSPEED):
        for value in (None, True, 7, "auto", "word", [], {}, {"auto": "auto"}):
            broken = edit_content(DEEPSPEED, ("set", path, value))
            content = yaml.safe_load(ZERO + "  deepspeed_config_file: ds.json\n")
            findings, config = config_rules.check(content, broken)
            check_config.explain(content, config, findings, broken)


# ---- Misspellings ----
PREFIXES = (
    "fsdp_",
    "parallelism_config_",
    "zero3_",
    "offload_",
    "num_",
    "mixed_",
    "distributed_",
    "zero_",
)


def misspellings(key):
    """Every slip of one finger, hyphens for underscores, a missing and a wrong prefix."""
    slips = {key[:i] + key[i + 1 :] for i in range(len(key))} | {
        key[:i] + key[i] + key[i:] for i in range(len(key))
    }
    slips |= {key[:i] + key[i + 1] + key[i] + key[i + 2 :] for i in range(len(key) - 1)}
    slips |= {key[:i] + "x" + key[i + 1 :] for i in range(len(key))}
    slips |= {key.replace("_", "-"), key.upper(), key.replace("_", "")}
    for prefix in PREFIXES:
        if key.startswith(prefix):
            slips |= {
                key.removeprefix(prefix),
                f"deepspeed_{key.removeprefix(prefix)}",
                f"accelerate_{key}",
            }
    return slips - {key}


def renamed(content, path, key):
    """The content with one key, at a path, under another name in its place."""
    return {
        (key if (name,) == path else name): (
            renamed(value, path[1:], key)
            if name == path[0] and isinstance(value, dict) and path[1:]
            else value
        )
        for name, value in content.items()
    }


def paths_of(content, path=()):
    for key, value in content.items():
        yield (*path, key)
        yield from paths_of(value, (*path, key)) if isinstance(value, dict) else ()


def right_suggestions(content, check):
    """Count misspellings, and those whose fix is the right key. All are refused, but what accelerate completes itself."""
    total = right = 0
    for path in paths_of(content):
        for slip in misspellings(path[-1]):
            wrong = (*path[:-1], slip)
            findings = check(renamed(content, path, slip))
            found = [item for item in findings if item.path == wrong]
            if (
                path[1:] and config_rules.full_name(path[0], slip) == path[-1]
            ):  # accelerate completes the name itself
                assert [item.severity for item in found] == ["warning"] and found[0].fix == path[-1]
                continue
            assert "error" in [item.severity for item in findings], (path, slip)
            total, right = (
                total + 1,
                right + any(("rename", wrong, path[-1]) in item.edits for item in found),
            )
    return total, right


def test_every_misspelling_of_every_key_of_every_shipped_file_is_refused_and_put_right():
    counts = [
        right_suggestions(
            yaml.safe_load(path.read_text()), lambda content: config_rules.check(content)[0]
        )
        for path in SHIPPED
    ]
    total, right = (sum(column) for column in zip(*counts, strict=True))
    print(
        f"{total:,} misspellings of {len(SHIPPED)} files, all refused, {right / total:.1%} put right"
    )
    assert right / total >= 0.95


DEEPSPEED = {
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


def test_every_misspelling_in_a_deepspeed_json_is_refused_and_put_right():
    total, right = right_suggestions(
        DEEPSPEED, lambda content: list(config_rules.check_json_names(content))
    )
    print(f"{total:,} misspellings of a DeepSpeed JSON, all refused, {right / total:.1%} put right")
    assert right / total >= 0.95


# ---- accelerate as the judge ----
@pytest.fixture(autouse=True)
def pretended_gpu(monkeypatch):
    """FSDP1 asks which GPU it is on; there is none here."""
    monkeypatch.setattr("accelerate.utils.dataclasses.is_cuda_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)


def launched(tmp_path, text, *flags):
    """The environment that accelerate's launcher makes of a file, and its arguments."""
    path = write(tmp_path, text, "launched.yaml")
    flags = ["--config_file", str(path), *flags, "--main_process_port", "0"]
    args = launch_command_parser().parse_args([*flags, "train.py"])
    args, defaults, has_precision = _validate_launch_command(args)
    fields = [
        *defaults.deepspeed_config,
        *["mixed_precision"] * has_precision,
    ]  # as launch_command hands them on
    args.deepspeed_fields_from_accelerate_config = ",".join(fields)
    environment = (
        prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
    )
    names = ("ACCELERATE_", "FSDP_", "PARALLELISM_")
    return {name: value for name, value in environment.items() if name.startswith(names)}, args


def fsdp_run(tmp_path, text):
    """What FSDP is told to do, as a dict."""
    with patch_environment(**launched(tmp_path, text)[0]):
        plugin = FullyShardedDataParallelPlugin()
    return {name: str(value) for name, value in vars(plugin).items() if name != "param_init_fn"}


def deepspeed_run(tmp_path, text, *flags):
    """The DeepSpeed config that comes of it."""
    environment, _ = launched(tmp_path, text, *flags)
    with patch_environment(**environment):
        plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision(environment["ACCELERATE_MIXED_PRECISION"])
    return plugin.deepspeed_config


class TestTheTwoNoShardsThatRunFullShard:
    def test_fsdp1_with_reshard_after_forward(self, tmp_path):
        text = FSDP1 + "  fsdp_reshard_after_forward: NO_SHARD\n"
        assert fsdp_run(tmp_path, text)["sharding_strategy"] == "ShardingStrategy.FULL_SHARD"
        words = what_runs(write(tmp_path, text))
        assert words["runs"] == "FSDP1 FULL_SHARD" and words["parameters"].startswith("1/8 ")

    def test_fsdp2_with_sharding_strategy(self, tmp_path):
        text = FSDP2 + "  fsdp_sharding_strategy: NO_SHARD\n"
        run = fsdp_run(tmp_path, text)
        assert (run["sharding_strategy"], run["reshard_after_forward"]) == ("None", "True")
        words = what_runs(write(tmp_path, text))
        assert words["runs"] == "FSDP2 FULL_SHARD" and words["parameters"].startswith("1/8 ")


@pytest.mark.parametrize("strategy", keys.STRATEGIES)
def test_the_explanation_names_the_strategy_that_fsdp1_runs(strategy, tmp_path):
    text = FSDP1 + f"  fsdp_sharding_strategy: {strategy}\n"
    assert (
        fsdp_run(tmp_path, text)["sharding_strategy"].removeprefix("ShardingStrategy.").lstrip("_")
        == strategy
    )
    assert what_runs(write(tmp_path, text))["runs"] == f"FSDP1 {strategy}"


FSDP_VALUES = {  # for each key a value that is no version's default, and what must stand beside it to be read
    "fsdp_sharding_strategy": ("SHARD_GRAD_OP", {}),
    "fsdp_reshard_after_forward": (False, {}),
    "fsdp_backward_prefetch": ("BACKWARD_PRE", {}),
    "fsdp_forward_prefetch": (True, {}),
    "fsdp_use_orig_params": (False, {}),
    "fsdp_offload_params": (True, {}),
    "fsdp_sync_module_states": (False, {"fsdp_cpu_ram_efficient_loading": False}),
    "fsdp_activation_checkpointing": (True, {}),
    "fsdp_cpu_ram_efficient_loading": (False, {}),
    "fsdp_auto_wrap_policy": ("SIZE_BASED_WRAP", {}),
    "fsdp_ignored_modules": ("head", {}),
    "fsdp_min_num_params": (5, {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}),
    "fsdp_transformer_layer_cls_to_wrap": (
        "Block",
        {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    ),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("key", FSDP_VALUES)
def test_a_key_of_fsdp_has_an_effect_under_the_versions_that_the_check_names(
    key, version, tmp_path
):
    value, beside = FSDP_VALUES[key]
    content = yaml.safe_load(DDP) | {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": version, **beside},
    }
    without, content["fsdp_config"][key] = yaml.safe_dump(content), value
    changed = fsdp_run(tmp_path, without) != fsdp_run(tmp_path, yaml.safe_dump(content))
    assert changed == (keys.READ_BY_ONE_VERSION.get(key, version) == version)
    assert changed != (key in what_runs(write(tmp_path, yaml.safe_dump(content)))["no effect"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rdzv_backend", "c10d"),
        ("same_network", "true"),
        ("enable_cpu_affinity", "true"),
        ("downcast_bf16", "true"),
        ("tpu_use_sudo", "true"),
    ],
)
def test_the_launcher_takes_from_the_command_line_alone_what_the_check_says(key, value, tmp_path):
    assert key in keys.COMMAND_LINE_ONLY and len(keys.COMMAND_LINE_ONLY) == 5
    without, with_it = launched(tmp_path, DDP)[1], launched(tmp_path, DDP + f"{key}: {value}\n")[1]
    assert getattr(without, key) == getattr(with_it, key) != value
    assert key in what_runs(write(tmp_path, DDP + f"{key}: {value}\n"))["no effect"]


@pytest.mark.parametrize("key", list(keys.SECTIONS["deepspeed_config"]))
def test_accelerate_refuses_beside_a_deepspeed_file_what_the_check_refuses(key, tmp_path):
    named = write(tmp_path, json.dumps(DEEPSPEED), "ds.json")
    text = ZERO.replace("mixed_precision: bf16\n", "") + f"  deepspeed_config_file: {named}\n"
    value = {
        "zero_stage": 3,
        "zero3_init_flag": "true",
        "deepspeed_multinode_launcher": "standard",
    }.get(key, "1")
    text += f"  {key}: {value}\n" * (key != "deepspeed_config_file")
    findings, _ = config_rules.check(yaml.safe_load(text), DEEPSPEED)
    refused = [item.path[-1] for item in findings if "refuses" in item.reason]
    assert refused == [key] * (key in keys.REFUSED_BESIDE_A_FILE)
    with pytest.raises(ValueError, match="will be ignored") if refused else nullcontext():
        deepspeed_run(tmp_path, text)


def test_accelerate_stops_or_goes_astray_where_the_check_says_so(tmp_path):
    lost = deepspeed_run(
        tmp_path, ZERO3 + "  offload_param_device: nvme\n  offload_param_nvme_path: /fast\n"
    )
    assert lost["zero_optimization"]["offload_param"] == {"device": "nvme", "nvme_path": "none"}
    with pytest.raises(AttributeError):
        launched(tmp_path, DDP.replace("bf16", "no"))  # a bare no
    with pytest.raises(AttributeError):
        launched(tmp_path, DDP + "gpu_ids: 0\n")
    with pytest.raises(ValueError, match="fsdp_sync_module_states"):
        launched(tmp_path, FULL2 + "  fsdp_sync_module_states: false\n")
    with pytest.raises(ValueError, match="invalid truth value"):
        fsdp_run(tmp_path, FSDP2 + "  fsdp_reshard_after_forward: SHARD_GRAD_OP\n")
    layers = fsdp_run(tmp_path, FULL1 + "  fsdp_transformer_layer_cls_to_wrap: [Block]\n")
    assert layers["transformer_cls_names_to_wrap"] == """["['Block']"]"""


STOPS_LATER = {  # what stops with the processes, the GPUs or the model at hand, and no sooner
    "layers as a list",
    "processes in words",
    "mesh without the long prefix",
    "rank of no machine",
    "fewer GPUs than processes",
    "mesh and processes apart",
    "mesh for FSDP1",
    "mesh that shards nothing",
    "tensor parallel mesh",
    "no such ZeRO stage",
    "no such device",
}


@pytest.mark.parametrize(
    "name",
    sorted({*BROKEN} - {"no number of processes", "no machine, no processes", "fp8 of no backend"}),
)  # they need more
def test_accelerate_stops_exactly_where_the_check_says_that_it_stops(name, tmp_path):
    path = write(tmp_path, BROKEN[name][0])
    findings, words = check_config.check_file(check_config.load(path))
    stopped = None
    try:
        args = launched(tmp_path, path.read_text())[1]
        (fsdp_run if args.use_fsdp else deepspeed_run if args.use_deepspeed else launched)(
            tmp_path, path.read_text()
        )
    except (ValueError, KeyError, AttributeError) as error:
        stopped = error
    assert (config_rules.STOPS in [item.kind for item in findings]) == (
        stopped is not None or name in STOPS_LATER
    )
    assert words["runs"].startswith("nothing") == (stopped is not None or name in STOPS_LATER)
    assert stopped is None or name not in STOPS_LATER


def test_flat_parameters_of_fsdp1_are_none_of_those_that_an_optimizer_made_before_holds(tmp_path):
    from torch import distributed, nn
    from torch.distributed.fsdp import FullyShardedDataParallel

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        for original in (True, False):
            model = nn.Linear(4, 4)
            held = {id(parameter) for parameter in model.parameters()}
            wrapped = FullyShardedDataParallel(model, use_orig_params=original, device_id="cpu")
            assert held.isdisjoint(map(id, wrapped.parameters())) == (not original)
    finally:
        distributed.destroy_process_group()


def test_auto_in_a_deepspeed_json_is_what_the_check_says(tmp_path):
    data = json.loads(json.dumps(DEEPSPEED))
    data["bf16"]["enabled"] = data["zero_optimization"][
        "stage3_gather_16bit_weights_on_model_save"
    ] = "auto"
    del data["gradient_accumulation_steps"]
    text = (
        ZERO.replace("mixed_precision: bf16\n", "")
        + f"  deepspeed_config_file: {tmp_path}/ds.json\n"
    )
    write(tmp_path, json.dumps(data), "ds.json")
    run = deepspeed_run(tmp_path, text)
    assert run["bf16"]["enabled"] is False and run["gradient_accumulation_steps"] == 1
    assert run["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is False
    assert deepspeed_run(tmp_path, text, "--mixed_precision", "bf16")["bf16"]["enabled"] is True
    found = {".".join(item.path) for item in config_rules.check(yaml.safe_load(text), data)[0]}
    assert found == {
        "bf16.enabled",
        "gradient_accumulation_steps",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    }
    data["zero_optimization"]["sub_group_size"] = "auto"
    assert "accelerate has no value" in str(list(config_rules.check_json(data)))


def test_a_deepspeed_section_that_is_none_stops_where_the_check_says_so(tmp_path):
    from deepspeed.runtime.config import DeepSpeedConfig

    for path in keys.DEEPSPEED_SECTIONS:
        for value in ("cpu", True, None):
            data = {
                "train_batch_size": 1,
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "zero_optimization": {"stage": 2},
            }
            data = edit_content(data, ("set", tuple(path.split(".")), value))
            found = [
                item for item in config_rules.check_json(data) if item.reason == "is a section"
            ]
            assert [".".join(item.path) for item in found] == [path] * (
                value is not None or path not in keys.MAY_BE_NULL
            )
            try:
                plugin = DeepSpeedPlugin(hf_ds_config=data, gradient_clipping=1.0)
                plugin.set_mixed_precision("no")
                DeepSpeedConfig(plugin.deepspeed_config)
            except Exception as error:  # of any kind, from either
                assert found, (path, value, error)
            else:
                assert not found, (path, value)
    text = (
        ZERO.replace("mixed_precision: bf16\n", "")
        + f"  deepspeed_config_file: {tmp_path}/ds.json\n"
    )
    write(
        tmp_path,
        json.dumps({"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}, "bf16": True}),
        "ds.json",
    )
    assert what_runs(write(tmp_path, text))["runs"].startswith("nothing")
    with pytest.raises(AttributeError):
        deepspeed_run(tmp_path, text)


def test_the_launcher_has_a_port_and_asks_for_gpus_where_the_check_says_so(tmp_path):
    def found(text):
        return {item.path[-1]: item.kind for item in config_rules.check(yaml.safe_load(text))[0]}

    several = "num_machines: 2\nmain_process_ip: a\nmachine_rank: 1\n"
    for text in (DDP, FULL2, FULL1, ZERO2 + "  deepspeed_multinode_launcher: standard\n"):
        assert "num_machines" not in found(text + several)
    arguments = launch_command_parser().parse_args(
        ["--config_file", str(write(tmp_path, DDP + several)), "train.py"]
    )
    arguments = _validate_launch_command(arguments)[0]
    prepare_multi_gpu_env(arguments)
    assert arguments.rdzv_endpoint == "a:29500"
    on_cpus = DDP.replace("MULTI_GPU", "MULTI_CPU")
    assert (
        found(on_cpus + several)["num_machines"] == config_rules.COSTS
    )  # its launcher asks for the port
    assert (
        "gpu_ids" not in found(on_cpus + "gpu_ids: '0'\n")
        and not launched(tmp_path, on_cpus + "gpu_ids: '0'\n")[1].multi_gpu
    )
    assert "gpu_ids" not in found(DDP.replace("8", "2") + several + "gpu_ids: '0'\n")
    with pytest.raises(ValueError, match="at least two"):
        launched(tmp_path, DDP + "gpu_ids: '0'\n")


def test_accelerate_says_nothing_to_unknown_keys_and_completes_names_in_three_sections(tmp_path):
    assert fsdp_run(tmp_path, FULL2 + "  fsdp_reshard_after_forwrd: false\n") == fsdp_run(
        tmp_path, FULL2
    )
    assert deepspeed_run(tmp_path, ZERO + "  zero_stge: 3\n")["zero_optimization"]["stage"] == 2
    assert (
        fsdp_run(tmp_path, FSDP2 + "  reshard_after_forward: false\n")["reshard_after_forward"]
        == "False"
    )
    args = launched(
        tmp_path, DDP + "dynamo_config:\n  mode: max-autotune\nfp8_config:\n  margin: 3\n"
    )[1]
    assert (args.dynamo_mode, args.fp8_margin) == ("max-autotune", 3) and len(
        keys.ADDED_PREFIXES
    ) == 3
    args = launched(tmp_path, FULL2 + "parallelism_config:\n  dp_shard_size: 8\n")[1]
    assert args.parallelism_config_dp_shard_size == 1


# ---- The tables of keys against the installed packages ----
def test_the_keys_are_those_of_the_installed_accelerate():
    from accelerate.commands.config.config_args import BaseConfig

    groups = launch_command_parser()._action_groups
    groups = {group.title: {action.dest for action in group._group_actions} for group in groups}
    titles = {
        "fsdp_config": "FSDP Arguments",
        "deepspeed_config": "DeepSpeed Arguments",
        "fp8_config": "FP8 Arguments",
        "megatron_lm_config": "Megatron-LM Arguments",
        "mpirun_config": "MPI Arguments",
        "parallelism_config": "ParallelismConfig Arguments",
        "dynamo_config": "Resource Selection Arguments",
    }
    handed_on = {
        "fsdp_ignored_modules",
        "fp8_use_mxfp8_block_scaling",
    }  # without an argument; see their comments
    for section, known in keys.SECTIONS.items():
        arguments = groups[titles[section]]
        if section == "dynamo_config":
            arguments = {name for name in arguments if name.startswith("dynamo_")}
        assert set(known) - handed_on == arguments, section
    fields = set(ClusterConfig.__dataclass_fields__) | set(BaseConfig.__dataclass_fields__)
    assert {*keys.TOP_LEVEL, *keys.SECTIONS} == fields | {"fp16", "dynamo_backend"}
    assert "use_mxfp8_block_scaling" in TERecipeKwargs.__dataclass_fields__


def test_the_choices_are_those_of_the_installed_accelerate():
    from accelerate.utils import constants, dataclasses, str_to_bool

    fsdp, zero, dynamo = (
        keys.SECTIONS[name] for name in ("fsdp_config", "deepspeed_config", "dynamo_config")
    )
    assert list(keys.STRATEGIES) == constants.FSDP_SHARDING_STRATEGY
    assert list(fsdp["fsdp_auto_wrap_policy"]) == constants.FSDP_AUTO_WRAP_POLICY
    assert list(fsdp["fsdp_backward_prefetch"]) == constants.FSDP_BACKWARD_PREFETCH
    assert list(fsdp["fsdp_state_dict_type"]) == constants.FSDP_STATE_DICT_TYPE
    assert set(zero["deepspeed_multinode_launcher"]) == set(constants.DEEPSPEED_MULTINODE_LAUNCHERS)
    assert list(dynamo["dynamo_mode"]) == constants.TORCH_DYNAMO_MODES
    assert list(dynamo["dynamo_backend"]) == [choice.value for choice in dataclasses.DynamoBackend]
    assert set(keys.TOP_LEVEL["distributed_type"]) == {
        choice.value for choice in dataclasses.DistributedType
    }
    assert set(keys.TOP_LEVEL["mixed_precision"]) == {
        choice.value for choice in dataclasses.PrecisionType
    }
    assert {*keys.SECTIONS["fp8_config"]["fp8_backend"], "NO"} == {
        choice.value for choice in dataclasses.FP8BackendType
    }
    assert {word: bool(str_to_bool(word)) for word in keys.TRUTHS} == keys.TRUTHS


def test_the_keys_of_a_deepspeed_json_are_those_of_the_installed_deepspeed():
    from deepspeed.runtime import config, precision_config
    from deepspeed.runtime.zero import config as zero
    from deepspeed.runtime.zero import offload_config
    from pydantic import ValidationError

    class Watched(dict):
        """A dict that remembers the keys it was asked for."""

        asked = set()

        def __contains__(self, key):
            self.asked.add(key)
            return super().__contains__(key)

        def get(self, key, default=None):
            self.asked.add(key)
            return super().get(key, default)

        def keys(self):
            return self

        def __deepcopy__(self, memo):
            return self

    config.DeepSpeedConfig(Watched(train_micro_batch_size_per_gpu=1))
    assert set(keys.REMOVED_FROM_DEEPSPEED) == set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert set(keys.DEEPSPEED_JSON[()]) == Watched.asked - set(keys.REMOVED_FROM_DEEPSPEED)
    for section, model in {
        ("zero_optimization",): zero.DeepSpeedZeroConfig,
        ("bf16",): precision_config.DeepSpeedBF16Config,
        ("fp16",): precision_config.DeepSpeedFP16Config,
        ("zero_optimization", "offload_param"): offload_config.DeepSpeedZeroOffloadParamConfig,
        (
            "zero_optimization",
            "offload_optimizer",
        ): offload_config.DeepSpeedZeroOffloadOptimizerConfig,
    }.items():
        assert set(keys.DEEPSPEED_JSON[section]) == {
            field.alias or name for name, field in model.model_fields.items()
        }
        with pytest.raises(ValidationError):
            model(no_such_key=1)
    config.DeepSpeedConfig(
        {"train_micro_batch_size_per_gpu": 1, "zero_optimisation": {"stage": 3}}
    )  # no word of it


# ---- Files that `accelerate config` writes ----
def questionnaire(monkeypatch, tmp_path, answers):
    """A file of accelerate's own questionnaire: {part of a question: answer}, else what Enter would say."""

    def ask_options(question, options=(), convert=None, default=0):
        wanted = next((answer for part, answer in answers.items() if part in question), None)
        number = (
            default if wanted is None else [str(option) for option in options].index(str(wanted))
        )
        return convert(number) if convert else number

    def ask_field(question, convert=None, default=None, error_message=None):
        wanted = next((answer for part, answer in answers.items() if part in question), None)
        return default if wanted is None else convert(wanted) if convert else wanted

    monkeypatch.setattr(cluster, "_ask_options", ask_options)
    monkeypatch.setattr(cluster, "_ask_field", ask_field)
    path = tmp_path / "default_config.yaml"
    cluster.get_cluster_input().to_yaml_file(str(path))
    return path


GPUS = {"type of machine": "multi-GPU", "GPU(s) should be used": "8", "mixed precision": "bf16"}
ASK1 = GPUS | {"FullyShardedDataParallel": "yes", "FSDP version": 1, "_no_split_modules": "yes"}
ASK2 = ASK1 | {"FSDP version": 2}
ASK3 = GPUS | {"want to use DeepSpeed": "yes"}
WRITTEN = {  # answers, what then runs, {key: severity} of the findings
    "one process": ({"mixed precision": "bf16"}, "one process", {}),
    "DDP": (GPUS, "DDP", {}),
    "FSDP1 FULL_SHARD": (ASK1, "FSDP1 FULL_SHARD", {"fsdp_reshard_after_forward": "warning"}),
    "FSDP1 SHARD_GRAD_OP": (
        ASK1 | {"sharding strategy": "SHARD_GRAD_OP"},
        "FSDP1 FULL_SHARD",
        {"fsdp_reshard_after_forward": "error"},
    ),
    "FSDP1 NO_SHARD": (
        ASK1 | {"sharding strategy": "NO_SHARD"},
        "FSDP1 FULL_SHARD",
        {"fsdp_reshard_after_forward": "error"},
    ),
    "FSDP2": (ASK2, "FSDP2 FULL_SHARD", {}),
    "FSDP2 without resharding": (ASK2 | {"resharding": "no"}, "FSDP2 SHARD_GRAD_OP", {}),
    "ZeRO-2": (ASK3, "DeepSpeed ZeRO-2", {"gradient_accumulation_steps": "error"}),
    "ZeRO-3": (
        ASK3 | {"ZeRO optimization stage": 3},
        "DeepSpeed ZeRO-3",
        {
            "gradient_accumulation_steps": "error",
            "zero3_save_16bit_model": "error",
            "zero3_init_flag": "warning",
        },
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_that_accelerate_config_writes_is_understood_and_mended(name, monkeypatch, tmp_path):
    answers, runs, expected = WRITTEN[name]
    file = check_config.load(questionnaire(monkeypatch, tmp_path, answers))
    findings, words = check_config.check_file(file, recipes=True)
    assert words["runs"] == runs
    assert {
        item.path[-1]: item.severity for item in findings if item.severity != "info"
    } == expected
    fixed, _, left = check_config.mend(file, recipes=True)
    assert not left
    wanted = answers.get("sharding strategy")
    if wanted:  # what was answered is what then runs
        assert fsdp_run(tmp_path, fixed.text)["sharding_strategy"] == f"ShardingStrategy.{wanted}"


def test_the_fp8_keys_of_the_questionnaire_that_nothing_reads_are_found(monkeypatch, tmp_path):
    for name in ("is_fp8_available", "is_transformer_engine_available"):
        monkeypatch.setattr(cluster, name, lambda: True)
    answers = GPUS | {"mixed precision": "fp8", "FP8 backend": "te"}
    found = check_config.check_file(
        check_config.load(questionnaire(monkeypatch, tmp_path, answers))
    )[0]
    assert {item.path[-1]: item.fix for item in found if item.severity == "error"} == {
        "amax_history_length": "fp8_amax_history_len",
        "amax_compute_algorithm": "fp8_amax_compute_algo",
    }


# ---- The tool ----
class TestTool:
    def test_exit_codes(self, tmp_path, monkeypatch, capsys):
        good, bad = (
            write(tmp_path, FULL2, "good.yaml"),
            write(tmp_path, FSDP1 + "  fsdp_versoin: 2\n", "bad.yaml"),
        )
        costly = write(tmp_path, DDP + "enable_cpu_affinity: true\n", "costly.yaml")
        for arguments, code in (
            ([good], 0),
            ([costly], 0),
            ([costly, "--strict"], 65),
            ([good, bad], 65),
            ([tmp_path / "none.yaml"], 64),
            ([good, "--no_such_flag"], 64),
            ([good, bad, "--fix", "--output", "x"], 64),
            ([bad, "--output", "x"], 64),
            ([bad, "--fix", "--output", bad], 64),
            ([tmp_path], 64),
            ([good, "--num_processes", "0"], 64),
            ([good, "--num_processes", "-1"], 64),
        ):
            assert run(*arguments, monkeypatch=monkeypatch) == code, arguments
        assert "Traceback" not in capsys.readouterr().err

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "- a\n- b\n",
            "a: [1\n",
            "just text\n",
            "\t\tx: 1",
            b"\xff\xfe",
            b"\x00\x01",
            "mixed_precision: caf\xe9".encode("latin1"),
            "a: !!timestamp b",
            "a: !!int ''",
            "a: =",
            FSDP + "  <<: 1\n",
            "[" * 2000,
            "a: " + "[" * 30 + "]" * 30,
            FSDP2.replace("fsdp_config:", "fsdp_config: &a") + "  x: *a\n",
            "".join(f"key_{n}: {n}\n" for n in range(5000)),
            "a0: &a0 {x: 1}\n"
            + "".join(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 18)),
        ],
    )
    def test_what_is_no_config_is_bad_data(self, text, tmp_path, monkeypatch, capsys):
        path = tmp_path / "config.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        assert run(path, monkeypatch=monkeypatch) == 65
        assert "config.yaml: error: file: " in capsys.readouterr().out

    @pytest.mark.parametrize(
        "text",
        [
            FULL2 + "parallelism_config:\ndeepspeed_config: null\nmpirun_config: ~\n",
            DDP + "1: a\n2020-01-01: b\nnull: c\ntrue: d\n",
            DDP + "num_processes: 2\ngpu_ids: {2020-01-01: [x]}\n",
            DDP + "gpu_ids: [': [']\nmixed_precision: '{'\n",
            FULL2 + "  ? 5\n  : 6\n",
            DDP + 'x: "\\ud800"\n',
            DDP + "".join(f"ky_{n}: {n}\n" for n in range(400)),
        ],
    )
    def test_odd_keys_and_values_are_judged(self, text, tmp_path, monkeypatch, capsys):
        path = write(tmp_path, text)
        code = run(path, monkeypatch=monkeypatch)
        assert code == (
            0 if text.startswith("distributed_type: FSDP") and "? 5" not in text else 65
        )
        for flag in ("--json", "--fix"):
            assert run(path, "--num_processes", 4, flag, monkeypatch=monkeypatch) in (0, 65)

    def test_a_file_that_points_to_itself_is_read_once(self, tmp_path, monkeypatch):
        for name, data in (
            ("a.json", DEEPSPEED),
            ("b.json", {"distributed_type": "DEEPSPEED", "num_processes": 8}),
            ("c.yaml", {"distributed_type": "DEEPSPEED"}),
        ):
            path = write(
                tmp_path,
                json.dumps(
                    data | {"deepspeed_config": {"deepspeed_config_file": str(tmp_path / name)}}
                ),
                name,
            )
            assert run(path, monkeypatch=monkeypatch) == 65

    def test_processes_of_the_command_line_count_for_the_mended_file_too(
        self, tmp_path, monkeypatch, capsys
    ):
        path = write(tmp_path, "distributed_type: 'NO'\nnum_processes: 1\n")
        assert run(path, monkeypatch=monkeypatch) == 0
        assert run(path, "--num_processes", 4, monkeypatch=monkeypatch) == 65
        assert "one process runs, not 4" in capsys.readouterr().out
        assert run(path, "--num_processes", 4, "--fix", monkeypatch=monkeypatch) == 0
        assert "mended: distributed_type" in capsys.readouterr().out
        path = write(tmp_path, DDP.replace("8", "4") + "num_machines: 2\nmain_process_ip: a\n")
        assert run(path, "--num_processes", 3, "--fix", monkeypatch=monkeypatch) == 65

    def test_broken_copies_of_the_shipped_files_get_an_answer(self, tmp_path, monkeypatch, capsys):
        chosen = random.Random(0)
        for number in range(300):
            text = chosen.choice(SHIPPED).read_text()
            for _ in range(chosen.randint(1, 4)):
                where, length = chosen.randrange(len(text)), chosen.choice([0, 1, 1, 8, 40])
                noise = chosen.choice(
                    [
                        "",
                        "x",
                        ":",
                        "\n",
                        "  ",
                        "{",
                        "[",
                        "- ",
                        "&a ",
                        "*a",
                        "#",
                        "'",
                        "\t",
                        "null",
                        "0",
                        "-1",
                        "\x00",
                        "\ud800",
                        text[:where],
                    ]
                )
                text = text[:where] + noise + text[where + length :]
            path = tmp_path / f"{number}.yaml"
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
            code = run(path, *["--fix"] * (number % 3 == 0), monkeypatch=monkeypatch)
            assert code in (0, 65) and str(path) in capsys.readouterr().out, text

    def test_json_tells_machines_the_same(self, tmp_path, monkeypatch, capsys):
        path = write(tmp_path, FSDP1 + "  fsdp_reshard_after_forward: NO_SHARD\n")
        assert run(path, "--json", monkeypatch=monkeypatch) == 65
        (report,) = json.loads(capsys.readouterr().out)
        assert report["does"]["runs"] == "FSDP1 FULL_SHARD"
        (found,) = report["findings"]
        assert (found["severity"], found["kind"], found["line"]) == (
            "error",
            "ignored",
            7,
        ) and found["mendable"]

    def test_fix_writes_beside_the_file_and_never_over_it(self, tmp_path, monkeypatch, capsys):
        path = write(tmp_path, FULL2 + "  fsdp_offlod_params: true\n")
        assert run(path, "--fix", monkeypatch=monkeypatch) == 0
        assert path.read_text() == FULL2 + "  fsdp_offlod_params: true\n"
        assert (
            tmp_path / "config.fixed.yaml"
        ).read_text() == FULL2 + "  fsdp_offload_params: true\n"
        assert "mended: fsdp_config.fsdp_offlod_params" in capsys.readouterr().out
        assert (
            run(path, "--fix", "--output", tmp_path / "new" / "mine.yaml", monkeypatch=monkeypatch)
            == 0
        )
        assert (tmp_path / "new" / "mine.yaml").is_file()

    def test_a_deepspeed_json_is_checked_with_its_yaml_and_alone(
        self, tmp_path, monkeypatch, capsys
    ):
        data = json.loads(json.dumps(DEEPSPEED)) | {
            "optimizer": {"type": "AdamW"},
            "train_batch_sise": 8,
        }
        named = write(tmp_path, json.dumps(data, indent=1), "ds.json")
        path = write(
            tmp_path,
            ZERO.replace("mixed_precision: bf16\n", "") + f"  deepspeed_config_file: {named}\n",
        )
        assert run(path, monkeypatch=monkeypatch) == 65
        said = capsys.readouterr().out
        assert "DeepSpeed ZeRO-3" in said and "parameters on cpu" in said and "bf16 weights" in said
        line = 1 + named.read_text().splitlines().index(' "train_batch_sise": 8')
        assert re.search(
            rf"ds.json:{line}: error: train_batch_sise: .*\n    fix: train_batch_size", said
        )
        assert run(named, "--recipes", "--fix", monkeypatch=monkeypatch) == 0
        fixed = json.loads((tmp_path / "ds.fixed.json").read_text())
        assert "optimizer" not in fixed and fixed["train_batch_size"] == "auto"

    def test_it_loads_neither_torch_nor_accelerate(self):
        code = "import check_config, sys; print({'torch', 'accelerate'} & {*sys.modules})"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO / "scripts"
        )
        assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("config", "by_itself", "with_recipes"),
    [
        (
            "fsdp2_full_shard",
            "computes and communicates in bf16",
            "computes in bf16, reduces gradients in fp32",
        ),
        (
            "deepspeed_zero2",
            "fp32 master weights in the optimizer",
            "gradients are reduced in fp32",
        ),
    ],
)
def test_what_the_recipes_reduce_in_is_said_of_the_recipes_alone(config, by_itself, with_recipes):
    file = check_config.load(CONFIGS / f"{config}.yaml")
    for recipes in (False, True):
        words = check_config.check_file(file, recipes=recipes)[1]
        assert (with_recipes in words["precision"]) == recipes
        assert by_itself in words["precision"] or recipes
