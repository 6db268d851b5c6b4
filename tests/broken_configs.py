# SPDX-License-Identifier: Apache-2.0
"""Configs that are wrong in one way each: what must be found, and what their author meant."""

from dataclasses import dataclass
from typing import Any

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
# A key that accelerate ignores, and what is said of it
TYPO = FSDP2 + "  fsdp_reshard_after_foward: false\n"
TYPO_SAID = (
    "config.yaml:7: fsdp_config.fsdp_reshard_after_foward: no such key: accelerate ignores it "
    "silently; fix: fsdp_reshard_after_forward"
)
# The number of shards follows.
MESH_OF = (
    "parallelism_config:\n  parallelism_config_{first}_size: 2\n"
    "  parallelism_config_{second}_size: 2\n"
)
MESH = (
    "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"
    "  parallelism_config_dp_shard_size: "
)
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
        severity: of the finding, in a file for the recipes.
        key: that it is about.
        words: of its reason, or of its fix.
        fixed: {key: value} of the fixed file; None where a person has to choose.
    """

    text: str
    severity: str
    key: str
    words: str
    fixed: dict[str, Any] | None = None


BROKEN: dict[str, Broken] = {}


def broken(
    name: str, text: str, severity: str, key: str, words: str, fixed: dict | None = None
) -> None:
    """Add a config to BROKEN."""
    BROKEN[name] = Broken(text, severity, key, words, fixed)


broken("no distributed_type", "num_processes: 8\n", "error", "distributed_type", "missing")
broken(
    "no distributed_type, but a section",
    FULL2.replace("distributed_type: FSDP\n", ""),
    "error",
    "distributed_type",
    "FSDP",
    fixed={"distributed_type": "FSDP"},
)
broken(
    "bare NO",
    "distributed_type: NO\nnum_processes: 1\n",
    "warning",
    "distributed_type",
    '"NO"',
    fixed={"distributed_type": "NO"},
)
broken(
    "bare no precision",
    DDP.replace("bf16", "no"),
    "error",
    "mixed_precision",
    "false in YAML",
    fixed={"mixed_precision": "no"},
)
broken(
    "misspelt engine",
    FULL2.replace("FSDP\n", "FDSP\n", 1),
    "error",
    "distributed_type",
    "FSDP",
    fixed={"distributed_type": "FSDP"},
)
broken(
    "engine in small letters",
    DDP.lower(),
    "error",
    "distributed_type",
    "MULTI_GPU",
    fixed={"distributed_type": "MULTI_GPU"},
)
broken(
    "DDP as an engine",
    DDP.replace("MULTI_GPU", "DDP"),
    "error",
    "distributed_type",
    "MULTI_GPU",
    fixed={"distributed_type": "MULTI_GPU"},
)
broken(
    "unknown precision",
    DDP.replace("bf16", "fp32"),
    "error",
    "mixed_precision",
    "no",
    fixed={"mixed_precision": "no"},
)
broken(
    "misspelt top-level key",
    DDP + "num_machine: 1\n",
    "error",
    "num_machine",
    "num_machines",
    fixed={"num_machines": 1},
)
broken(
    "misspelt section",
    FULL2.replace("fsdp_config", "fdsp_config"),
    "error",
    "fdsp_config",
    "fsdp_config",
    fixed={"fsdp_version": 2},
)
broken(
    "misspelt key in a section",
    FULL2 + "  fsdp_offload_param: true\n",
    "error",
    "fsdp_offload_param",
    "fsdp_offload_params",
    fixed={"fsdp_offload_params": True},
)
broken(
    "misspelt value",
    FSDP1 + "  fsdp_sharding_strategy: FULL_SHRAD\n",
    "error",
    "fsdp_sharding_strategy",
    "FULL_SHARD",
    fixed={"fsdp_sharding_strategy": "FULL_SHARD"},
)
broken(
    "misspelt wrap policy",
    FULL2.replace("TRANSFORMER_BASED", "TRANSFORMERS_BASED"),
    "error",
    "fsdp_auto_wrap_policy",
    "TRANSFORMER_BASED_WRAP",
    fixed={"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
)
broken(
    "value that is no boolean",
    FULL2 + "  fsdp_offload_params: maybe\n",
    "error",
    "fsdp_offload_params",
    "True, False",
)
broken(
    "key of JSON in the YAML",
    ZERO2 + "  stage3_max_live_parameters: 1e8\n",
    "error",
    "stage3_max_live_parameters",
    "only a DeepSpeed JSON has it, as zero_optimization.stage3_max_live_parameters",
    fixed={"zero_stage": 2},
)
broken(
    "section of JSON in the YAML",
    ZERO + "  zero_optimization:\n    stage: 1\n    offload_optimizer:\n      device: cpu\n",
    "error",
    "zero_optimization",
    "its keys are zero_stage",
    fixed={"zero_stage": 1, "offload_optimizer_device": "cpu", "zero_optimization": None},
)
broken(
    "section of JSON with more than the YAML has",
    ZERO + "  zero_optimization:\n    stage: 1\n    overlap_comm: true\n",
    "error",
    "zero_optimization",
    "deepspeed_config_file",
)
broken(
    "accumulation left to nobody",
    ZERO2 + "  gradient_accumulation_steps: auto\n",
    "error",
    "gradient_accumulation_steps",
    "Accelerator() needs a whole number",
    fixed={"zero_stage": 2, "gradient_accumulation_steps": None},
)
broken(
    "saving left open",
    ZERO + "  zero_stage: 3\n  zero3_save_16bit_model: auto\n",
    "error",
    "zero3_save_16bit_model",
    "takes all but true for false",
    fixed={"zero3_save_16bit_model": True},
)
broken(
    "former name of prefetching",
    FULL1 + "  fsdp_backward_prefetch_policy: BACKWARD_PRE\n",
    "error",
    "fsdp_backward_prefetch_policy",
    "fsdp_backward_prefetch",
    fixed={"fsdp_backward_prefetch": "BACKWARD_PRE"},
)
broken(
    "former name with a value that is none of the new one",
    FULL1 + "  fsdp_backward_prefetch_policy: NONE\n",
    "error",
    "fsdp_backward_prefetch_policy",
    "fsdp_backward_prefetch does not take NONE",
    fixed={"fsdp_version": 1, "fsdp_backward_prefetch": None},
)
broken(
    "processes in a section, and others at the top",
    ZERO2 + "  num_processes: 2\n",
    "error",
    "num_processes",
    "not in force: deepspeed_config.num_processes, which is 2, beats it",
    fixed={"num_processes": 2},
)
broken(
    "port in a section",
    ZERO2 + "  main_process_port: 29501\n",
    "warning",
    "main_process_port",
    "its place is the top level",
    fixed={"main_process_port": 29501},
)
broken(
    "engine as a flag in a section",
    DDP + "parallelism_config:\n  use_fsdp: true\n",
    "warning",
    "use_fsdp",
    "may contradict distributed_type",
)
broken(
    "FSDP key in the mesh",
    FSDP2 + MESH.replace("2", "1") + "8\n  fsdp_reshard_after_forward: true\n",
    "warning",
    "fsdp_reshard_after_forward",
    "its place is fsdp_config",
)
broken(
    "compiler under DeepSpeed",
    ZERO2 + "dynamo_config:\n  dynamo_backend: INDUCTOR\n",
    "error",
    "dynamo_config",
    "nothing is compiled",
    fixed={"zero_stage": 2, "dynamo_config": None},
)
broken(
    "CPUs without mpirun",
    DDP.replace("MULTI_GPU", "MULTI_CPU"),
    "error",
    "distributed_type",
    "one process runs, not 8",
)
broken("machines left empty", DDP + "num_machines:\n", "error", "num_machines", "a whole number")
broken(
    "machines in quotes",
    DDP + 'num_machines: "1"\n',
    "error",
    "num_machines",
    "num_machines: 1",
    fixed={"num_machines": 1},
)
broken(
    "port in quotes",
    DDP + 'main_process_port: "29501"\n',
    "error",
    "main_process_port",
    "main_process_port: 29501",
    fixed={"main_process_port": 29501},
)
broken(
    "debug in quotes",
    DDP + 'debug: "false"\n',
    "error",
    "debug",
    "debug mode is on",
    fixed={"debug": False},
)
broken(
    "old compiler key, a bare no",
    DDP + "dynamo_backend: no\n",
    "error",
    "dynamo_backend",
    "a bare no is false",
    fixed={"dynamo_backend": "NO"},
)
broken(
    "replicas of DDP that are not the processes",
    DDP + "parallelism_config:\n  parallelism_config_dp_replicate_size: 4\n",
    "error",
    "parallelism_config",
    "multiply to 4, num_processes is 8",
)
broken(
    "misspelt beside the right one",
    FULL2 + "  fsdp_offload_param: true\n  fsdp_offload_params: false\n",
    "error",
    "fsdp_offload_param",
    "fsdp_offload_params is written too",
)
broken(
    "incomplete beside the complete",
    FULL2 + "  offload_params: true\n  fsdp_offload_params: false\n",
    "error",
    "offload_params",
    "the last one counts",
)
broken(
    "misplaced beside another",
    FULL2.replace("bf16", "'no'") + "  mixed_precision: bf16\n",
    "error",
    "mixed_precision",
    "mixed_precision is written too",
)
broken(
    "misplaced, and again in its place",
    FULL2 + "  fsdp_offload_params: true\nfsdp_offload_params: true\n",
    "error",
    "fsdp_offload_params",
    "its place is fsdp_config; fsdp_offload_params is written too",
    fixed={"fsdp_offload_params": True},
)
broken(
    "no boolean for FSDP2",
    FSDP2 + "  fsdp_reshard_after_forward: ture\n",
    "error",
    "fsdp_reshard_after_forward",
    "ture: must be one of True, False",
    fixed={"fsdp_reshard_after_forward": True},
)
broken(
    "processes in words",
    FULL2.replace("num_processes: 8", "num_processes: two"),
    "error",
    "num_processes",
    "two: must be a whole number",
)
broken(
    "section of accelerate 1.12",
    DDP + "ipex_config:\n  ipex: true\n  use_xpu: false\n",
    "error",
    "ipex_config",
    "older versions knew",
    fixed={"num_processes": 8, "fp8_config": None, "ipex": None},
)
broken(
    "key of accelerate 1.12",
    DDP + "mpirun_config: {mpirun_ccl: '1', mpirun_hostfile: /h}\n",
    "error",
    "mpirun_ccl",
    "older versions knew",
    fixed={"mpirun_hostfile": "/h", "mpirun_ccl": None},
)
broken(
    "section of accelerate 1.6",
    DDP + "tp_config:\n  tp_size: 2\n",
    "error",
    "tp_config",
    "parallelism_config_tp_size",
)
broken(
    "section of another tool", DDP + "my_config:\n  a: 1\n", "error", "my_config", "its right name"
)
broken(
    "section that is none",
    FULL2.replace("fsdp_config:", "fsdp_config: true\nother:"),
    "error",
    "fsdp_config",
    "must be a mapping",
)
broken(
    "prefetch that FSDP2 does not know",
    FULL2 + "  fsdp_forward_prefetch: true\n",
    "warning",
    "fsdp_forward_prefetch",
    "nothing is prefetched",
    fixed={"fsdp_forward_prefetch": None},
)
broken(
    "number for FULL_SHARD under FSDP2",
    FSDP2 + "  fsdp_sharding_strategy: 1\n",
    "warning",
    "fsdp_sharding_strategy",
    "FULL_SHARD runs anyway",
    fixed={"fsdp_reshard_after_forward": True},
)
broken(
    "HYBRID_SHARD on a mesh",
    FSDP2.replace("8", "4") + "  fsdp_sharding_strategy: HYBRID_SHARD\n" + MESH + "2\n",
    "warning",
    "fsdp_sharding_strategy",
    "HYBRID_SHARD runs anyway",
    fixed={"fsdp_reshard_after_forward": True},
)
broken(
    "FULL_SHARD on a mesh",
    FSDP2.replace("8", "4") + "  fsdp_sharding_strategy: FULL_SHARD\n" + MESH + "2\n",
    "warning",
    "fsdp_sharding_strategy",
    "HYBRID_SHARD runs anyway",
    fixed={"fsdp_reshard_after_forward": True},
)
broken("empty value", FULL2 + "  fsdp_offload_params:\n", "error", "fsdp_offload_params", "empty")
broken(
    "layers as a list",
    FULL2 + "  fsdp_transformer_layer_cls_to_wrap: [LlamaDecoderLayer]\n",
    "error",
    "fsdp_transformer_layer_cls_to_wrap",
    "LlamaDecoderLayer",
    fixed={"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
)
broken(
    "key of another place",
    FULL2 + "  num_machines: 1\n",
    "error",
    "num_machines",
    "the top level",
    fixed={"num_machines": 1},
)
broken(
    "section key at the top level",
    FULL2 + "fsdp_offload_params: true\n",
    "error",
    "fsdp_offload_params",
    "in fsdp_config",
    fixed={"fsdp_offload_params": True},
)
broken(
    "DeepSpeed key for FSDP",
    FULL2 + "  zero_stage: 3\n",
    "error",
    "zero_stage",
    "FSDP does not read",
    fixed={"fsdp_version": 2},
)
broken(
    "mesh without the long prefix",
    FULL2.replace("8", "4") + MESH.replace("parallelism_config_dp_r", "dp_r") + "2\n",
    "error",
    "dp_replicate_size",
    "parallelism_config_dp_replicate_size",
    fixed={"parallelism_config_dp_replicate_size": 2},
)
broken(
    "accumulation in the file",
    ZERO2 + "  gradient_accumulation_steps: 4\n",
    "error",
    "gradient_accumulation_steps",
    "--gradient_accumulation_steps",
    fixed={"zero_stage": 2},
)
broken(
    "clipping at the top level",
    DDP + "gradient_clipping: 1.0\n",
    "error",
    "gradient_clipping",
    "accelerate refuses unknown keys here; a script sets it, the recipes here by --max_grad_norm",
    fixed={"num_processes": 8},
)
broken(
    "FSDP1 NO_SHARD under FSDP2's key",
    FSDP1 + "  fsdp_reshard_after_forward: NO_SHARD\n",
    "error",
    "fsdp_reshard_after_forward",
    "FULL_SHARD runs, not NO_SHARD",
    fixed={"fsdp_sharding_strategy": "NO_SHARD"},
)
broken(
    "FSDP1 SHARD_GRAD_OP under FSDP2's key",
    FSDP1 + "  fsdp_reshard_after_forward: SHARD_GRAD_OP\n",
    "error",
    "fsdp_reshard_after_forward",
    "FULL_SHARD runs",
    fixed={"fsdp_sharding_strategy": "SHARD_GRAD_OP"},
)
broken(
    "FSDP1 FULL_SHARD under FSDP2's key",
    FSDP1 + "  fsdp_reshard_after_forward: FULL_SHARD\n",
    "warning",
    "fsdp_reshard_after_forward",
    "FULL_SHARD runs anyway",
    fixed={"fsdp_sharding_strategy": "FULL_SHARD"},
)
broken(
    "FSDP2 NO_SHARD under FSDP1's key",
    FSDP2 + "  fsdp_sharding_strategy: NO_SHARD\n",
    "error",
    "fsdp_sharding_strategy",
    "FULL_SHARD runs, not NO_SHARD",
    fixed={"distributed_type": "MULTI_GPU", "fsdp_config": None},
)
broken(
    "FSDP2 SHARD_GRAD_OP under FSDP1's key",
    FSDP2 + "  fsdp_sharding_strategy: SHARD_GRAD_OP\n",
    "error",
    "fsdp_sharding_strategy",
    "FULL_SHARD runs",
    fixed={"fsdp_reshard_after_forward": False},
)
broken(
    "FSDP2 HYBRID_SHARD without a mesh",
    FSDP2 + "  fsdp_sharding_strategy: HYBRID_SHARD\n",
    "error",
    "fsdp_sharding_strategy",
    "fsdp2_hybrid_shard.yaml",
)
broken(
    "FSDP2 with a value of the key of FSDP1",
    FSDP2 + "  fsdp_reshard_after_forward: NO_SHARD\n",
    "error",
    "fsdp_reshard_after_forward",
    "DDP does the same",
    fixed={"distributed_type": "MULTI_GPU", "fsdp_config": None},
)
broken(
    "FSDP1 with a value of the key of FSDP2",
    FSDP1 + "  fsdp_sharding_strategy: true\n",
    "error",
    "fsdp_sharding_strategy",
    "True is a value of FSDP2's fsdp_reshard_after_forward",
    fixed={"fsdp_sharding_strategy": "FULL_SHARD"},
)
broken(
    "both sharding keys, apart",
    FULL2 + "  fsdp_sharding_strategy: NO_SHARD\n",
    "error",
    "fsdp_sharding_strategy",
    "FULL_SHARD runs, not NO_SHARD",
)
broken(
    "FSDP2 meant, no version",
    FSDP + "  fsdp_reshard_after_forward: false\n",
    "error",
    "fsdp_version",
    "FSDP1 runs",
    fixed={"fsdp_version": 2, "fsdp_reshard_after_forward": False},
)
broken(
    "FSDP1 meant, no version",
    FSDP + "  fsdp_sharding_strategy: FULL_SHARD\n",
    "warning",
    "fsdp_version",
    "FSDP1 runs",
    fixed={"fsdp_version": 1},
)
broken("no such version", FSDP + "  fsdp_version: 3\n", "error", "fsdp_version", "one of 1, 2")
broken(
    "no wrap policy",
    FULL2.replace("  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n", ""),
    "warning",
    "fsdp_auto_wrap_policy",
    "one unit",
    fixed={"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
)
broken(
    "shards of NO_SHARD",
    FSDP1 + "  fsdp_sharding_strategy: NO_SHARD\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n",
    "warning",
    "fsdp_state_dict_type",
    "no shards",
    fixed={"fsdp_state_dict_type": "FULL_STATE_DICT"},
)
broken(
    "FSDP2 LOCAL_STATE_DICT",
    FULL2 + "  fsdp_state_dict_type: LOCAL_STATE_DICT\n",
    "error",
    "fsdp_state_dict_type",
    "FSDP2 has none",
    fixed={"fsdp_state_dict_type": "SHARDED_STATE_DICT"},
)
broken(
    "FSDP1 without sync",
    FULL1 + "  fsdp_sync_module_states: false\n",
    "error",
    "fsdp_sync_module_states",
    "refuses",
    fixed={"fsdp_cpu_ram_efficient_loading": False},
)
broken(
    "FSDP2 without sync",
    FULL2 + "  fsdp_sync_module_states: false\n",
    "error",
    "fsdp_sync_module_states",
    "refuses",
    fixed={"fsdp_version": 2},
)
broken(
    "FSDP1 with flat parameters",
    FULL1 + "  fsdp_use_orig_params: false\n",
    "error",
    "fsdp_use_orig_params",
    "nothing is trained",
    fixed={"fsdp_use_orig_params": True},
)
broken(
    "offloaded checkpoints of FSDP1",
    FULL1 + "  fsdp_activation_checkpointing_offload: true\n",
    "error",
    "fsdp_activation_checkpointing_offload",
    "needs FSDP2",
)
broken(
    "FSDP section under DDP",
    FULL2.replace("FSDP", "MULTI_GPU", 1),
    "error",
    "distributed_type",
    "MULTI_GPU runs and does not read fsdp_config",
)
broken(
    "DeepSpeed section under FSDP",
    FULL2 + "deepspeed_config:\n  zero_stage: 3\n",
    "error",
    "deepspeed_config",
    "FSDP runs",
    fixed={"deepspeed_config": None, "distributed_type": "FSDP"},
)
broken(
    "many processes under NO",
    DDP.replace("MULTI_GPU", '"NO"'),
    "error",
    "distributed_type",
    "one process runs, not 8",
)
broken(
    "no number of processes",
    "distributed_type: MULTI_GPU\n",
    "warning",
    "num_processes",
    "--num_processes",
)
broken(
    "processes that do not spread",
    DDP + "num_machines: 3\nmain_process_ip: a\nmain_process_port: 1\n",
    "error",
    "num_processes",
    "6 run",
)
broken(
    "number in quotes",
    DDP.replace("8", '"8"'),
    "warning",
    "num_processes",
    "num_processes: 8",
    fixed={"num_processes": 8},
)
broken(
    "machines without an address",
    DDP + "num_machines: 2\n",
    "warning",
    "num_machines",
    "main_process_ip",
)
broken(
    "no machine",
    DDP + "num_machines: 0\n",
    "warning",
    "num_machines",
    "one machine runs",
    fixed={"num_machines": 1},
)
broken(
    "no machine, no processes",
    "distributed_type: MULTI_GPU\nnum_machines: 0\nnum_processes: many\n",
    "error",
    "num_processes",
    "a whole number",
)
broken(
    "rank of no machine",
    DDP + "num_machines: 2\nmain_process_ip: a\nmachine_rank: 2\n",
    "error",
    "machine_rank",
    "0 to 1",
)
broken(
    "DeepSpeed on machines without a hostfile",
    ZERO2 + "num_machines: 2\nmain_process_ip: a\nmain_process_port: 1\n",
    "error",
    "num_machines",
    "trains on this machine only",
)
broken(
    "rendezvous in the file",
    DDP + "num_machines: 2\nmain_process_ip: a\nmain_process_port: 1\nrdzv_backend: c10d\n",
    "warning",
    "rdzv_backend",
    "--rdzv_backend",
)
broken("GPU ids as a number", DDP + "gpu_ids: 0\n", "error", "gpu_ids", "not text")
broken("fewer GPUs than processes", DDP + "gpu_ids: 0,1\n", "error", "gpu_ids", "8 processes")
broken(
    "mesh and processes apart",
    FULL2 + MESH + "2\n",
    "error",
    "parallelism_config",
    "multiply to 4, num_processes is 8",
)
broken(
    "mesh for FSDP1",
    FULL1.replace("8", "4") + MESH + "2\n",
    "error",
    "parallelism_config",
    "FSDP1 takes no mesh",
)
broken(
    "mesh without FSDP",
    DDP.replace("8", "4") + MESH + "2\n",
    "error",
    "parallelism_config",
    "shards nothing",
)
broken(
    "mesh that shards nothing",
    FULL2.replace("8", "2") + MESH + "1\n",
    "error",
    "parallelism_config",
    "nothing to shard",
)
broken(
    "tensor parallel mesh under FSDP2",
    FULL2 + "parallelism_config:\n  parallelism_config_tp_size: 8\n",
    "error",
    "parallelism_config",
    "nothing to shard",
)
broken(
    "tensor parallel shards that rank 0 would load",
    FULL2.replace("8", "4") + MESH_OF.format(first="dp_shard", second="tp"),
    "error",
    "fsdp_cpu_ram_efficient_loading",
    "into whole weights",
    fixed={"fsdp_cpu_ram_efficient_loading": False},
)
broken(
    "replicas of tensor parallel groups",
    DDP.replace("8", "4") + MESH_OF.format(first="dp_replicate", second="tp"),
    "error",
    "parallelism_config_dp_replicate_size",
    "without shards",
)
broken(
    "tensor parallel groups that nothing averages",
    DDP.replace("8", "4") + MESH_OF.format(first="dp_shard", second="tp"),
    "error",
    "parallelism_config_dp_shard_size",
    "averages the gradients",
)
broken(
    "a step of no micro-batch",
    ZERO2 + "  gradient_accumulation_steps: 0\n",
    "error",
    "gradient_accumulation_steps",
    "at least one micro-batch",
    fixed={"zero_stage": 2},
)
broken(
    "a row split in two ways",
    FULL2.replace("8", "4") + MESH_OF.format(first="cp", second="sp"),
    "error",
    "parallelism_config_sp_size",
    "the same rows",
)
broken(
    "context parallelism without FSDP2",
    DDP.replace("8", "2") + "parallelism_config:\n  parallelism_config_cp_size: 2\n",
    "error",
    "parallelism_config_cp_size",
    "needs FSDP2",
)
broken(
    "sequence parallelism without DeepSpeed",
    DDP.replace("8", "2") + "parallelism_config:\n  parallelism_config_sp_size: 2\n",
    "error",
    "parallelism_config_sp_size",
    "nothing splits rows",
)
broken(
    "sequence parallelism that divides no processes",
    ZERO2.replace("8", "3") + "parallelism_config:\n  parallelism_config_sp_size: 2\n",
    "error",
    "parallelism_config",
    "launch 2 processes",
)
broken(
    "fp16 as it was",
    "distributed_type: MULTI_GPU\nnum_processes: 8\nfp16: true\n",
    "warning",
    "fp16",
    "old name",
    fixed={"mixed_precision": "fp16", "fp16": None},
)
broken(
    "fp8 of no backend", DDP.replace("bf16", "fp8"), "warning", "mixed_precision", "first installed"
)
broken(
    "no ZeRO stage",
    ZERO + "  zero3_init_flag: false\n",
    "warning",
    "zero_stage",
    "ZeRO-2 runs",
    fixed={"zero_stage": 2},
)
broken("no such ZeRO stage", ZERO + "  zero_stage: 4\n", "error", "zero_stage", "0, 1, 2, 3")
broken(
    "ZeRO-3 that cannot save",
    ZERO + "  zero_stage: 3\n",
    "warning",
    "zero3_save_16bit_model",
    "the recipes save without it",
    fixed={"zero3_save_16bit_model": True},
)
broken(
    "ZeRO-3 loaded whole",
    ZERO3 + "  zero3_init_flag: false\n",
    "warning",
    "zero3_init_flag",
    "whole model",
    fixed={"zero3_init_flag": True},
)
broken(
    "ZeRO-2 with parameters offloaded",
    ZERO2 + "  offload_param_device: cpu\n",
    "error",
    "offload_param_device",
    "ZeRO-2 does not offload",
)
broken(
    "no such device",
    ZERO3 + "  offload_param_device: gpu\n",
    "error",
    "offload_param_device",
    "none, cpu, nvme",
    fixed={"offload_param_device": "none"},
)
broken(
    "nvme, whose path is lost",
    ZERO3 + "  offload_param_device: nvme\n  offload_param_nvme_path: /fast\n",
    "error",
    "offload_param_device",
    "./none",
)
broken(
    "DeepSpeed file that is not there",
    ZERO.replace("mixed_precision: bf16\n", "") + "  deepspeed_config_file: no.json\n",
    "error",
    "deepspeed_config_file",
    "no JSON file",
)
broken(
    "settings beside a DeepSpeed file",
    ZERO2 + "  deepspeed_config_file: no.json\n",
    "error",
    "mixed_precision",
    "bf16.enabled",
)
broken("key written twice", DDP + "num_processes: 4\n", "error", "num_processes", "last one counts")
broken(
    "environment left empty",
    DDP + "compute_environment:\n",
    "error",
    "compute_environment",
    "LOCAL_MACHINE",
)
broken(
    "variable that nothing fills in",
    DDP.replace("8", "${NUM_GPUS}"),
    "error",
    "num_processes",
    "or the flag --num_processes",
)
broken(
    "address that nothing fills in",
    DDP + "num_machines: 2\nmain_process_ip: $MASTER_ADDR\nmain_process_port: 1\n",
    "error",
    "main_process_ip",
    "looks for a machine of this name",
)
broken(
    "processes that torchrun counts",
    DDP.replace("8", "auto"),
    "warning",
    "num_processes",
    "one process for each GPU",
)
broken(
    "version of FSDP left empty",
    FSDP + "  fsdp_version:\n  fsdp_reshard_after_forward: false\n",
    "error",
    "fsdp_version",
    "empty: must be one of 1, 2",
)
broken(
    "tensor parallelism as an engine",
    DDP.replace("MULTI_GPU", "TP"),
    "error",
    "distributed_type",
    "MULTI_GPU",
    fixed={"distributed_type": "MULTI_GPU"},
)
broken(
    "Trainer's flag of FSDP",
    FULL2 + "fsdp: full_shard auto_wrap\n",
    "error",
    "fsdp",
    "refuses unknown keys",
    fixed={"fsdp": None, "fsdp_version": 2},
)
broken(
    "classes in a list, under a short name",
    FULL2 + "  transformer_layer_cls_to_wrap: [A, B]\n",
    "error",
    "fsdp_transformer_layer_cls_to_wrap",
    "is not text",
    fixed={"transformer_layer_cls_to_wrap": "A,B", "fsdp_transformer_layer_cls_to_wrap": None},
)
broken(
    "a config inside a section",
    "accelerate:\n  distributed_type: FSDP\n  num_processes: 8\n",
    "error",
    "accelerate",
    "its keys at the top level",
)
broken(
    "size of a mesh where there is none",
    FULL2 + "  tp_size: 2\n",
    "error",
    "tp_size",
    "parallelism_config_tp_size there",
)
