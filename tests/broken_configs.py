# SPDX-License-Identifier: Apache-2.0
"""Configs that are wrong in one way each."""

from dataclasses import dataclass

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
        key: that is wrong.
    """

    text: str
    key: str


BROKEN = {
    "no distributed_type": Broken("num_processes: 8\n", "distributed_type"),
    "no distributed_type, but a section": Broken(
        FULL2.replace("distributed_type: FSDP\n", ""), "distributed_type"
    ),
    "bare NO": Broken("distributed_type: NO\nnum_processes: 1\n", "distributed_type"),
    "bare no precision": Broken(DDP.replace("bf16", "no"), "mixed_precision"),
    "misspelt engine": Broken(FULL2.replace("FSDP\n", "FDSP\n", 1), "distributed_type"),
    "engine in small letters": Broken(DDP.lower(), "distributed_type"),
    "DDP as an engine": Broken(DDP.replace("MULTI_GPU", "DDP"), "distributed_type"),
    "unknown precision": Broken(DDP.replace("bf16", "fp32"), "mixed_precision"),
    "misspelt top-level key": Broken(DDP + "num_machine: 1\n", "num_machine"),
    "misspelt section": Broken(FULL2.replace("fsdp_config", "fdsp_config"), "fdsp_config"),
    "misspelt key in a section": Broken(
        FULL2 + "  fsdp_offload_param: true\n", "fsdp_offload_param"
    ),
    "misspelt value": Broken(
        FSDP1 + "  fsdp_sharding_strategy: FULL_SHRAD\n", "fsdp_sharding_strategy"
    ),
    "misspelt wrap policy": Broken(
        FULL2.replace("TRANSFORMER_BASED", "TRANSFORMERS_BASED"), "fsdp_auto_wrap_policy"
    ),
    "value that is no boolean": Broken(
        FULL2 + "  fsdp_offload_params: maybe\n", "fsdp_offload_params"
    ),
    "key of JSON in the YAML": Broken(
        ZERO2 + "  stage3_max_live_parameters: 1e8\n", "stage3_max_live_parameters"
    ),
    "section of JSON in the YAML": Broken(
        ZERO + "  zero_optimization:\n    stage: 1\n    offload_optimizer:\n      device: cpu\n",
        "zero_optimization",
    ),
    "section of JSON with more than the YAML has": Broken(
        ZERO + "  zero_optimization:\n    stage: 1\n    overlap_comm: true\n", "zero_optimization"
    ),
    "accumulation left to nobody": Broken(
        ZERO2 + "  gradient_accumulation_steps: auto\n", "gradient_accumulation_steps"
    ),
    "saving left open": Broken(
        ZERO + "  zero_stage: 3\n  zero3_save_16bit_model: auto\n", "zero3_save_16bit_model"
    ),
    "former name of prefetching": Broken(
        FULL1 + "  fsdp_backward_prefetch_policy: BACKWARD_PRE\n", "fsdp_backward_prefetch_policy"
    ),
    "former name with a value that is none of the new one": Broken(
        FULL1 + "  fsdp_backward_prefetch_policy: NONE\n", "fsdp_backward_prefetch_policy"
    ),
    "processes in a section, and others at the top": Broken(
        ZERO2 + "  num_processes: 2\n", "num_processes"
    ),
    "port in a section": Broken(ZERO2 + "  main_process_port: 29501\n", "main_process_port"),
    "engine as a flag in a section": Broken(
        DDP + "parallelism_config:\n  use_fsdp: true\n", "use_fsdp"
    ),
    "FSDP key in the mesh": Broken(
        FSDP2 + MESH.replace("2", "1") + "8\n  fsdp_reshard_after_forward: true\n",
        "fsdp_reshard_after_forward",
    ),
    "compiler under DeepSpeed": Broken(
        ZERO2 + "dynamo_config:\n  dynamo_backend: INDUCTOR\n", "dynamo_config"
    ),
    "CPUs without mpirun": Broken(DDP.replace("MULTI_GPU", "MULTI_CPU"), "distributed_type"),
    "machines left empty": Broken(DDP + "num_machines:\n", "num_machines"),
    "machines in quotes": Broken(DDP + 'num_machines: "1"\n', "num_machines"),
    "port in quotes": Broken(DDP + 'main_process_port: "29501"\n', "main_process_port"),
    "debug in quotes": Broken(DDP + 'debug: "false"\n', "debug"),
    "old compiler key, a bare no": Broken(DDP + "dynamo_backend: no\n", "dynamo_backend"),
    "replicas of DDP that are not the processes": Broken(
        DDP + "parallelism_config:\n  parallelism_config_dp_replicate_size: 4\n",
        "parallelism_config",
    ),
    "misspelt beside the right one": Broken(
        FULL2 + "  fsdp_offload_param: true\n  fsdp_offload_params: false\n", "fsdp_offload_param"
    ),
    "incomplete beside the complete": Broken(
        FULL2 + "  offload_params: true\n  fsdp_offload_params: false\n", "offload_params"
    ),
    "misplaced beside another": Broken(
        FULL2.replace("bf16", "'no'") + "  mixed_precision: bf16\n", "mixed_precision"
    ),
    "misplaced, and again in its place": Broken(
        FULL2 + "  fsdp_offload_params: true\nfsdp_offload_params: true\n", "fsdp_offload_params"
    ),
    "no boolean for FSDP2": Broken(
        FSDP2 + "  fsdp_reshard_after_forward: ture\n", "fsdp_reshard_after_forward"
    ),
    "processes in words": Broken(
        FULL2.replace("num_processes: 8", "num_processes: two"), "num_processes"
    ),
    "section of accelerate 1.12": Broken(
        DDP + "ipex_config:\n  ipex: true\n  use_xpu: false\n", "ipex_config"
    ),
    "key of accelerate 1.12": Broken(
        DDP + "mpirun_config: {mpirun_ccl: '1', mpirun_hostfile: /h}\n", "mpirun_ccl"
    ),
    "section of accelerate 1.6": Broken(DDP + "tp_config:\n  tp_size: 2\n", "tp_config"),
    "section of another tool": Broken(DDP + "my_config:\n  a: 1\n", "my_config"),
    "section that is none": Broken(
        FULL2.replace("fsdp_config:", "fsdp_config: true\nother:"), "fsdp_config"
    ),
    "prefetch that FSDP2 does not know": Broken(
        FULL2 + "  fsdp_forward_prefetch: true\n", "fsdp_forward_prefetch"
    ),
    "number for FULL_SHARD under FSDP2": Broken(
        FSDP2 + "  fsdp_sharding_strategy: 1\n", "fsdp_sharding_strategy"
    ),
    "HYBRID_SHARD on a mesh": Broken(
        FSDP2.replace("8", "4") + "  fsdp_sharding_strategy: HYBRID_SHARD\n" + MESH + "2\n",
        "fsdp_sharding_strategy",
    ),
    "FULL_SHARD on a mesh": Broken(
        FSDP2.replace("8", "4") + "  fsdp_sharding_strategy: FULL_SHARD\n" + MESH + "2\n",
        "fsdp_sharding_strategy",
    ),
    "empty value": Broken(FULL2 + "  fsdp_offload_params:\n", "fsdp_offload_params"),
    "layers as a list": Broken(
        FULL2 + "  fsdp_transformer_layer_cls_to_wrap: [LlamaDecoderLayer]\n",
        "fsdp_transformer_layer_cls_to_wrap",
    ),
    "key of another place": Broken(FULL2 + "  num_machines: 1\n", "num_machines"),
    "section key at the top level": Broken(
        FULL2 + "fsdp_offload_params: true\n", "fsdp_offload_params"
    ),
    "DeepSpeed key for FSDP": Broken(FULL2 + "  zero_stage: 3\n", "zero_stage"),
    "mesh without the long prefix": Broken(
        FULL2.replace("8", "4") + MESH.replace("parallelism_config_dp_r", "dp_r") + "2\n",
        "dp_replicate_size",
    ),
    "accumulation in the file": Broken(
        ZERO2 + "  gradient_accumulation_steps: 4\n", "gradient_accumulation_steps"
    ),
    "clipping at the top level": Broken(DDP + "gradient_clipping: 1.0\n", "gradient_clipping"),
    "FSDP1 NO_SHARD under FSDP2's key": Broken(
        FSDP1 + "  fsdp_reshard_after_forward: NO_SHARD\n", "fsdp_reshard_after_forward"
    ),
    "FSDP1 SHARD_GRAD_OP under FSDP2's key": Broken(
        FSDP1 + "  fsdp_reshard_after_forward: SHARD_GRAD_OP\n", "fsdp_reshard_after_forward"
    ),
    "FSDP1 FULL_SHARD under FSDP2's key": Broken(
        FSDP1 + "  fsdp_reshard_after_forward: FULL_SHARD\n", "fsdp_reshard_after_forward"
    ),
    "FSDP2 NO_SHARD under FSDP1's key": Broken(
        FSDP2 + "  fsdp_sharding_strategy: NO_SHARD\n", "fsdp_sharding_strategy"
    ),
    "FSDP2 SHARD_GRAD_OP under FSDP1's key": Broken(
        FSDP2 + "  fsdp_sharding_strategy: SHARD_GRAD_OP\n", "fsdp_sharding_strategy"
    ),
    "FSDP2 HYBRID_SHARD without a mesh": Broken(
        FSDP2 + "  fsdp_sharding_strategy: HYBRID_SHARD\n", "fsdp_sharding_strategy"
    ),
    "FSDP2 with a value of the key of FSDP1": Broken(
        FSDP2 + "  fsdp_reshard_after_forward: NO_SHARD\n", "fsdp_reshard_after_forward"
    ),
    "FSDP1 with a value of the key of FSDP2": Broken(
        FSDP1 + "  fsdp_sharding_strategy: true\n", "fsdp_sharding_strategy"
    ),
    "both sharding keys, apart": Broken(
        FULL2 + "  fsdp_sharding_strategy: NO_SHARD\n", "fsdp_sharding_strategy"
    ),
    "FSDP2 meant, no version": Broken(
        FSDP + "  fsdp_reshard_after_forward: false\n", "fsdp_version"
    ),
    "FSDP1 meant, no version": Broken(
        FSDP + "  fsdp_sharding_strategy: FULL_SHARD\n", "fsdp_version"
    ),
    "no such version": Broken(FSDP + "  fsdp_version: 3\n", "fsdp_version"),
    "no wrap policy": Broken(
        FULL2.replace("  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n", ""),
        "fsdp_auto_wrap_policy",
    ),
    "shards of NO_SHARD": Broken(
        FSDP1 + "  fsdp_sharding_strategy: NO_SHARD\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n",
        "fsdp_state_dict_type",
    ),
    "FSDP2 LOCAL_STATE_DICT": Broken(
        FULL2 + "  fsdp_state_dict_type: LOCAL_STATE_DICT\n", "fsdp_state_dict_type"
    ),
    "FSDP1 without sync": Broken(
        FULL1 + "  fsdp_sync_module_states: false\n", "fsdp_sync_module_states"
    ),
    "FSDP2 without sync": Broken(
        FULL2 + "  fsdp_sync_module_states: false\n", "fsdp_sync_module_states"
    ),
    "FSDP1 with flat parameters": Broken(
        FULL1 + "  fsdp_use_orig_params: false\n", "fsdp_use_orig_params"
    ),
    "offloaded checkpoints of FSDP1": Broken(
        FULL1 + "  fsdp_activation_checkpointing_offload: true\n",
        "fsdp_activation_checkpointing_offload",
    ),
    "FSDP section under DDP": Broken(FULL2.replace("FSDP", "MULTI_GPU", 1), "distributed_type"),
    "DeepSpeed section under FSDP": Broken(
        FULL2 + "deepspeed_config:\n  zero_stage: 3\n", "deepspeed_config"
    ),
    "many processes under NO": Broken(DDP.replace("MULTI_GPU", '"NO"'), "distributed_type"),
    "no number of processes": Broken("distributed_type: MULTI_GPU\n", "num_processes"),
    "processes that do not spread": Broken(
        DDP + "num_machines: 3\nmain_process_ip: a\nmain_process_port: 1\n", "num_processes"
    ),
    "number in quotes": Broken(DDP.replace("8", '"8"'), "num_processes"),
    "machines without an address": Broken(DDP + "num_machines: 2\n", "num_machines"),
    "no machine": Broken(DDP + "num_machines: 0\n", "num_machines"),
    "no machine, no processes": Broken(
        "distributed_type: MULTI_GPU\nnum_machines: 0\nnum_processes: many\n", "num_processes"
    ),
    "rank of no machine": Broken(
        DDP + "num_machines: 2\nmain_process_ip: a\nmachine_rank: 2\n", "machine_rank"
    ),
    "DeepSpeed on machines without a hostfile": Broken(
        ZERO2 + "num_machines: 2\nmain_process_ip: a\nmain_process_port: 1\n", "num_machines"
    ),
    "rendezvous in the file": Broken(
        DDP + "num_machines: 2\nmain_process_ip: a\nmain_process_port: 1\nrdzv_backend: c10d\n",
        "rdzv_backend",
    ),
    "GPU ids as a number": Broken(DDP + "gpu_ids: 0\n", "gpu_ids"),
    "fewer GPUs than processes": Broken(DDP + "gpu_ids: 0,1\n", "gpu_ids"),
    "mesh and processes apart": Broken(FULL2 + MESH + "2\n", "parallelism_config"),
    "mesh for FSDP1": Broken(FULL1.replace("8", "4") + MESH + "2\n", "parallelism_config"),
    "mesh without FSDP": Broken(DDP.replace("8", "4") + MESH + "2\n", "parallelism_config"),
    "mesh that shards nothing": Broken(
        FULL2.replace("8", "2") + MESH + "1\n", "parallelism_config"
    ),
    "tensor parallel mesh under FSDP2": Broken(
        FULL2 + "parallelism_config:\n  parallelism_config_tp_size: 8\n", "parallelism_config"
    ),
    "tensor parallel shards that rank 0 would load": Broken(
        FULL2.replace("8", "4") + MESH_OF.format(first="dp_shard", second="tp"),
        "fsdp_cpu_ram_efficient_loading",
    ),
    "replicas of tensor parallel groups": Broken(
        DDP.replace("8", "4") + MESH_OF.format(first="dp_replicate", second="tp"),
        "parallelism_config_dp_replicate_size",
    ),
    "tensor parallel groups that nothing averages": Broken(
        DDP.replace("8", "4") + MESH_OF.format(first="dp_shard", second="tp"),
        "parallelism_config_dp_shard_size",
    ),
    "a step of no micro-batch": Broken(
        ZERO2 + "  gradient_accumulation_steps: 0\n", "gradient_accumulation_steps"
    ),
    "a row split in two ways": Broken(
        FULL2.replace("8", "4") + MESH_OF.format(first="cp", second="sp"),
        "parallelism_config_sp_size",
    ),
    "context parallelism without FSDP2": Broken(
        DDP.replace("8", "2") + "parallelism_config:\n  parallelism_config_cp_size: 2\n",
        "parallelism_config_cp_size",
    ),
    "sequence parallelism without DeepSpeed": Broken(
        DDP.replace("8", "2") + "parallelism_config:\n  parallelism_config_sp_size: 2\n",
        "parallelism_config_sp_size",
    ),
    "sequence parallelism that divides no processes": Broken(
        ZERO2.replace("8", "3") + "parallelism_config:\n  parallelism_config_sp_size: 2\n",
        "parallelism_config",
    ),
    "fp16 as it was": Broken("distributed_type: MULTI_GPU\nnum_processes: 8\nfp16: true\n", "fp16"),
    "fp8 of no backend": Broken(DDP.replace("bf16", "fp8"), "mixed_precision"),
    "no ZeRO stage": Broken(ZERO + "  zero3_init_flag: false\n", "zero_stage"),
    "no such ZeRO stage": Broken(ZERO + "  zero_stage: 4\n", "zero_stage"),
    "ZeRO-3 that cannot save": Broken(ZERO + "  zero_stage: 3\n", "zero3_save_16bit_model"),
    "ZeRO-3 loaded whole": Broken(ZERO3 + "  zero3_init_flag: false\n", "zero3_init_flag"),
    "ZeRO-2 with parameters offloaded": Broken(
        ZERO2 + "  offload_param_device: cpu\n", "offload_param_device"
    ),
    "no such device": Broken(ZERO3 + "  offload_param_device: gpu\n", "offload_param_device"),
    "nvme, whose path is lost": Broken(
        ZERO3 + "  offload_param_device: nvme\n  offload_param_nvme_path: /fast\n",
        "offload_param_device",
    ),
    "DeepSpeed file that is not there": Broken(
        ZERO.replace("mixed_precision: bf16\n", "") + "  deepspeed_config_file: no.json\n",
        "deepspeed_config_file",
    ),
    "settings beside a DeepSpeed file": Broken(
        ZERO2 + "  deepspeed_config_file: no.json\n", "mixed_precision"
    ),
    "key written twice": Broken(DDP + "num_processes: 4\n", "num_processes"),
    "environment left empty": Broken(DDP + "compute_environment:\n", "compute_environment"),
    "variable that nothing fills in": Broken(DDP.replace("8", "${NUM_GPUS}"), "num_processes"),
    "address that nothing fills in": Broken(
        DDP + "num_machines: 2\nmain_process_ip: $MASTER_ADDR\nmain_process_port: 1\n",
        "main_process_ip",
    ),
    "processes that torchrun counts": Broken(DDP.replace("8", "auto"), "num_processes"),
    "version of FSDP left empty": Broken(
        FSDP + "  fsdp_version:\n  fsdp_reshard_after_forward: false\n", "fsdp_version"
    ),
    "tensor parallelism as an engine": Broken(DDP.replace("MULTI_GPU", "TP"), "distributed_type"),
    "Trainer's flag of FSDP": Broken(FULL2 + "fsdp: full_shard auto_wrap\n", "fsdp"),
    "classes in a list, under a short name": Broken(
        FULL2 + "  transformer_layer_cls_to_wrap: [A, B]\n", "fsdp_transformer_layer_cls_to_wrap"
    ),
    "a config inside a section": Broken(
        "accelerate:\n  distributed_type: FSDP\n  num_processes: 8\n", "accelerate"
    ),
    "size of a mesh where there is none": Broken(FULL2 + "  tp_size: 2\n", "tp_size"),
}
