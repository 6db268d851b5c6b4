# SPDX-License-Identifier: Apache-2.0
"""The keys of accelerate's YAML file, the values they take, and how accelerate reads those.

Sources: accelerate 1.15 `commands/config/config_args.py` (ClusterConfig), `commands/launch.py` (the
options of the launcher, which the sections of a file set), `utils/launch.py` (what the launcher
passes on) and `utils/dataclasses.py` (what reads it).
"""

from typing import Any

# The kinds of values; instead of one of these, a tuple lists the choices.
BOOL = "true or false"
INT = "a whole number"
TEXT = "text"
LIST = "a list"
NUMBER = "a number"
STRATEGY = "a sharding strategy"
ANYTHING = "anything"
Kind = str | tuple

# Words that accelerate's str_to_bool takes
TRUE_WORDS = ("y", "yes", "t", "true", "on", "1")
FALSE_WORDS = ("n", "no", "f", "false", "off", "0")
TRUTHS = dict.fromkeys(TRUE_WORDS, True) | dict.fromkeys(FALSE_WORDS, False)
# FSDP1 also accepts them by number, starting at 1.
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")

ENVIRONMENTS = ("LOCAL_MACHINE", "AMAZON_SAGEMAKER")
ENGINES = (
    "NO",
    "MULTI_GPU",
    "FSDP",
    "DEEPSPEED",
    "MULTI_CPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "MULTI_HPU",
    "MULTI_NEURON",
    "XLA",
    "MEGATRON_LM",
)
PRECISIONS = ("no", "fp16", "bf16", "fp8")
WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
STATE_DICT_TYPES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
OFFLOAD_DEVICES = ("none", "cpu", "nvme")
MULTINODE_LAUNCHERS = ("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm")
DYNAMO_BACKENDS = (
    "NO",
    "EAGER",
    "AOT_EAGER",
    "INDUCTOR",
    "AOT_TS_NVFUSER",
    "NVPRIMS_NVFUSER",
    "CUDAGRAPHS",
    "OFI",
    "FX2TRT",
    "ONNXRT",
    "TENSORRT",
    "AOT_TORCHXLA_TRACE_ONCE",
    "TORCHXLA_TRACE_ONCE",
    "TVM",
    "HPU_BACKEND",
    "NEURON",
)

TOP_LEVEL = {
    "compute_environment": ENVIRONMENTS,
    "distributed_type": ENGINES,
    "mixed_precision": PRECISIONS,
    "use_cpu": BOOL,
    "debug": BOOL,
    "enable_cpu_affinity": BOOL,
    "gpu_ids": TEXT,
    "num_processes": INT,
    "machine_rank": INT,
    "num_machines": INT,
    "main_process_ip": TEXT,
    "main_process_port": INT,
    "rdzv_backend": TEXT,
    "same_network": BOOL,
    "main_training_function": TEXT,
    "downcast_bf16": BOOL,
    "tpu_name": TEXT,
    "tpu_zone": TEXT,
    "tpu_use_cluster": BOOL,
    "tpu_use_sudo": BOOL,
    "command_file": TEXT,
    "commands": LIST,
    "tpu_vm": LIST,
    "tpu_env": LIST,
    # Keys of older versions, which accelerate converts
    "fp16": BOOL,
    "dynamo_backend": DYNAMO_BACKENDS,
}
FSDP = {
    "fsdp_version": (1, 2),
    "fsdp_sharding_strategy": STRATEGY,
    "fsdp_reshard_after_forward": STRATEGY,
    "fsdp_auto_wrap_policy": WRAP_POLICIES,
    "fsdp_transformer_layer_cls_to_wrap": TEXT,
    "fsdp_min_num_params": INT,
    "fsdp_backward_prefetch": PREFETCHES,
    "fsdp_state_dict_type": STATE_DICT_TYPES,
    "fsdp_offload_params": BOOL,
    "fsdp_forward_prefetch": BOOL,
    "fsdp_use_orig_params": BOOL,
    "fsdp_cpu_ram_efficient_loading": BOOL,
    "fsdp_sync_module_states": BOOL,
    "fsdp_activation_checkpointing": BOOL,
    "fsdp_activation_checkpointing_offload": BOOL,
    # The launcher has no option of this name, but passes the key on.
    "fsdp_ignored_modules": TEXT,
}
DEEPSPEED = {
    "deepspeed_config_file": TEXT,
    "zero_stage": (0, 1, 2, 3),
    "offload_optimizer_device": OFFLOAD_DEVICES,
    "offload_param_device": OFFLOAD_DEVICES,
    "offload_optimizer_nvme_path": TEXT,
    "offload_param_nvme_path": TEXT,
    "gradient_accumulation_steps": INT,
    "gradient_clipping": NUMBER,
    "zero3_init_flag": BOOL,
    "zero3_save_16bit_model": BOOL,
    "deepspeed_moe_layer_cls_names": TEXT,
    "deepspeed_multinode_launcher": MULTINODE_LAUNCHERS,
    "deepspeed_hostfile": TEXT,
    "deepspeed_exclusion_filter": TEXT,
    "deepspeed_inclusion_filter": TEXT,
}
MESH = {
    "parallelism_config_dp_replicate_size": INT,
    "parallelism_config_dp_shard_size": INT,
    "parallelism_config_tp_size": INT,
    "parallelism_config_cp_size": INT,
    "parallelism_config_sp_size": INT,
    "parallelism_config_cp_backend": ("torch",),
    "parallelism_config_sp_backend": ("deepspeed",),
    "parallelism_config_cp_comm_strategy": ("allgather", "alltoall"),
    "parallelism_config_sp_seq_length": INT,
    "parallelism_config_sp_seq_length_is_variable": BOOL,
    "parallelism_config_sp_attn_implementation": TEXT,
}
# The flag of the launcher only takes the first three, a file all that torch has.
DYNAMO_MODES = (
    "default",
    "reduce-overhead",
    "max-autotune",
    "max-autotune-no-cudagraphs",
    "lite",
)
DYNAMO = {
    "dynamo_backend": DYNAMO_BACKENDS,
    "dynamo_mode": DYNAMO_MODES,
    "dynamo_use_fullgraph": BOOL,
    "dynamo_use_dynamic": BOOL,
    "dynamo_use_regional_compilation": BOOL,
}
FP8 = {
    "fp8_backend": ("AO", "TE", "MSAMP"),
    "fp8_format": ("HYBRID", "E4M3", "E5M2"),
    "fp8_use_autocast_during_eval": BOOL,
    "fp8_margin": INT,
    "fp8_interval": INT,
    "fp8_amax_history_len": INT,
    "fp8_amax_compute_algo": ("max", "most_recent"),
    "fp8_override_linear_precision": LIST,
    "fp8_opt_level": ("O1", "O2"),
    "fp8_enable_fsdp_float8_all_gather": BOOL,
    "fp8_pad_inner_dim": BOOL,
    # The launcher has no option of this name, but passes the key on.
    "fp8_use_mxfp8_block_scaling": BOOL,
}
MEGATRON_LM_NAMES = (
    "megatron_lm_tp_degree",
    "megatron_lm_pp_degree",
    "megatron_lm_use_custom_fsdp",
    "megatron_lm_no_load_optim",
    "megatron_lm_no_save_optim",
    "megatron_lm_eod_mask_loss",
    "megatron_lm_optimizer_cpu_offload",
    "megatron_lm_overlap_cpu_optimizer_d2h_h2d",
    "megatron_lm_use_precision_aware_optimizer",
    "megatron_lm_decoder_last_pipeline_num_layers",
    "megatron_lm_num_micro_batches",
    "megatron_lm_sequence_parallelism",
    "megatron_lm_recompute_activations",
    "megatron_lm_recompute_granularity",
    "megatron_lm_recompute_method",
    "megatron_lm_recompute_num_layers",
    "megatron_lm_use_distributed_optimizer",
    "megatron_lm_gradient_clipping",
    "megatron_lm_attention_backend",
    "megatron_lm_attention_dropout",
    "megatron_lm_hidden_dropout",
    "megatron_lm_attention_softmax_in_fp32",
    "megatron_lm_expert_model_parallel_size",
    "megatron_lm_expert_tensor_parallel_size",
    "megatron_lm_context_parallel_size",
    "megatron_lm_calculate_per_token_loss",
    "megatron_lm_use_rotary_position_embeddings",
)
SECTIONS: dict[str, dict[str, Kind]] = {
    "fsdp_config": FSDP,
    "deepspeed_config": DEEPSPEED,
    "parallelism_config": MESH,
    "dynamo_config": DYNAMO,
    "fp8_config": FP8,
    "megatron_lm_config": dict.fromkeys(MEGATRON_LM_NAMES, ANYTHING),
    "mpirun_config": {"mpirun_hostfile": TEXT},
}
SECTION_OF_ENGINE = {
    "FSDP": "fsdp_config",
    "DEEPSPEED": "deepspeed_config",
    "MEGATRON_LM": "megatron_lm_config",
}

# The launcher copies each key of each section to its option of the same name. In these sections,
# to whose keys it adds no prefix, any option of the launcher therefore works, and beats the key of
# the top level.
OPEN_SECTIONS = ("deepspeed_config", "parallelism_config", "megatron_lm_config", "mpirun_config")
# Later sections beat earlier ones.
SECTIONS_IN_ORDER_OF_READING = (
    "fp8_config",
    "deepspeed_config",
    "fsdp_config",
    "parallelism_config",
    "megatron_lm_config",
    "mpirun_config",
    "dynamo_config",
)
# Keys of the top level that are no options of the launcher
NO_OPTIONS = ("compute_environment", "distributed_type", "fp16", "command_file", "commands")
# Options of the launcher that have no key of their own in a file
ONLY_OPTIONS = (
    "cpu",
    "env",
    "log_dir",
    "max_restarts",
    "module",
    "monitor_interval",
    "multi_gpu",
    "no_python",
    "num_cpu_threads_per_process",
    "quiet",
    "rdzv_conf",
    "role",
    "tee",
    "tpu",
    "use_deepspeed",
    "use_fsdp",
    "use_megatron_lm",
    "use_parallelism_config",
    "vm",
)
FLAGS_OF_ENGINES = ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")
# The launchers of these engines start one process by themselves, or mpirun.
WITHOUT_TORCHRUN = ("NO", "MULTI_CPU")
# What torchrun takes as the number of processes on a machine: as many as it has GPUs or cores
COUNTS_OF_TORCHRUN = ("auto", "cpu", "gpu", "xpu")
# Keys that only the launcher of TPUs reads
FOR_TPUS = ("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_vm", "tpu_env")
FOR_TPUS += ("command_file", "commands", "main_training_function")

# Keys that `accelerate config` wrote up to accelerate 1.12, and what replaces them
REMOVED = {
    ("ipex_config",): None,
    ("mpirun_config", "mpirun_ccl"): None,
    ("tp_config",): "parallelism_config_tp_size in parallelism_config",
}
# The launcher puts the prefix before a key of these sections that lacks it.
ADDED_PREFIXES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_", "fp8_config": "fp8_"}
CASE_MATTERS = ("compute_environment", "distributed_type", "fp8_backend")
# The launcher compares num_machines with a number, and takes a file whose compute_environment is
# empty for one of SageMaker.
MUST_NOT_BE_EMPTY = ("compute_environment", "num_machines")
# No value of these keys stops: any text is true, or all but the word true is false.
READ_AS_ANYTHING = ("debug", "fp16", "zero3_save_16bit_model")
# The keys of other sections than deepspeed_config that may be empty. There, all may be.
MAY_BE_EMPTY = (
    "fsdp_auto_wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_backward_prefetch",
    "fsdp_state_dict_type",
    "fsdp_ignored_modules",
    "dynamo_backend",
)
# The launcher reads these from its command line only: its own defaults are not None, so those of
# the file never count. Each is listed with the value that has no effect.
COMMAND_LINE_ONLY = {
    "rdzv_backend": "static",
    "same_network": None,
    "enable_cpu_affinity": False,
    "downcast_bf16": False,
    "tpu_use_sudo": False,
}
# Keys that only one version of FSDP reads, and that version
READ_BY_ONE_VERSION = {
    "fsdp_sharding_strategy": 1,
    "fsdp_backward_prefetch": 1,
    "fsdp_forward_prefetch": 1,
    "fsdp_use_orig_params": 1,
    "fsdp_sync_module_states": 1,
    "fsdp_reshard_after_forward": 2,
}
# The plugin also takes the numbers of torch's BackwardPrefetch and StateDictType, from 1.
BY_NUMBER = {
    "fsdp_backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST"),
    "fsdp_state_dict_type": ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
}
# Keys of deepspeed_config that only DeepSpeed's launchers of several machines read
FOR_SEVERAL_MACHINES = (
    "deepspeed_multinode_launcher",
    "deepspeed_hostfile",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
)
# Settings that belong on the command line of a recipe, and their flags
OWNED_BY_THE_RECIPE = {
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
    "gradient_clipping": "--max_grad_norm",
    "train_micro_batch_size_per_gpu": "--per_device_train_batch_size",
    "optimizer": "--optim and --learning_rate",
    "train_batch_size": "--per_device_train_batch_size",
    "scheduler": "--lr_scheduler_type",
}

# The defaults of the launcher and the plugins that the rules need
TOP_LEVEL_DEFAULTS = {
    "num_machines": 1,
    "machine_rank": 0,
    "gpu_ids": "all",
    "mixed_precision": "no",
}
FSDP_DEFAULTS = {
    "fsdp_version": 1,
    "fsdp_auto_wrap_policy": "NO_WRAP",
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_reshard_after_forward": "FULL_SHARD",
    "fsdp_cpu_ram_efficient_loading": True,
}
DEEPSPEED_DEFAULTS = {
    "zero_stage": 2,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "deepspeed_multinode_launcher": "pdsh",
}


def full_name(section: str, key: Any) -> str:
    """Return a key as the launcher knows it: in three sections it adds a missing prefix."""
    name = str(key)
    prefix = ADDED_PREFIXES.get(section, "")
    if name.startswith(prefix.removesuffix("_")):
        return name
    return prefix + name


def choices_of(kind: Kind) -> tuple:
    """Return the values that a kind of key accepts, or () if there is no list of them."""
    if isinstance(kind, tuple):
        return kind
    if kind == STRATEGY:
        return STRATEGIES
    if kind == BOOL:
        return (True, False)
    return ()


def read_value(key: str, value: Any, kind: Kind) -> Any:
    """Return a value as accelerate reads it. Raises ValueError if accelerate cannot read it."""
    if kind in (LIST, ANYTHING):
        return value
    if kind == TEXT:
        return read_text(key, value)
    if kind == INT:
        return read_whole_number(value)
    if kind == NUMBER:
        return read_number(value)
    if key in READ_AS_ANYTHING:
        return read_anything(key, value)
    if kind == BOOL:
        return read_bool(value)
    if kind == STRATEGY:
        return read_strategy(key, value)
    if key in BY_NUMBER and str(value).isdigit() and 1 <= int(value) <= len(BY_NUMBER[key]):
        return BY_NUMBER[key][int(value) - 1]
    return read_choice(key, value, choices_of(kind))


def read_text(key: str, value: Any) -> Any:
    """Return a value that is not a list; gpu_ids, which the launcher splits, has to be text."""
    if isinstance(value, list) or (key == "gpu_ids" and not isinstance(value, str)):
        raise ValueError(f"{value} is not text")
    return value


def read_whole_number(value: Any) -> int:
    """Return a whole number, which may be written as text."""
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a number")
    return int(str(value))


def read_number(value: Any) -> Any:
    """Return a number, which may be written as text, or "auto"."""
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a number")
    if value == "auto":
        return value
    return float(str(value))


def read_bool(value: Any) -> bool:
    """Return what accelerate's str_to_bool makes of a value."""
    word = str(value).lower()
    if word not in TRUTHS:
        raise ValueError(f"{value} is neither true nor false")
    return TRUTHS[word]


def read_anything(key: str, value: Any) -> bool:
    """Return the truth of a value that accelerate reads whatever it is."""
    if key == "zero3_save_16bit_model":
        return str(value).lower() == "true"
    return bool(value)


def read_strategy(key: str, value: Any) -> str:
    """Return the name of a sharding strategy from its name, its number, or FSDP2's true or false.

    Each version of FSDP accepts other forms, which the rules of fsdp_config distinguish.
    """
    word = str(value).lower()
    if word in TRUTHS:
        return "FULL_SHARD" if TRUTHS[word] else "SHARD_GRAD_OP"
    if word in ("2", "3", "4", "5"):
        return STRATEGIES[int(word) - 1]
    return read_choice(key, value, STRATEGIES)


def read_choice(key: str, value: Any, choices: tuple) -> Any:
    """Return the choice that a value names; for most keys, case does not matter."""
    word = str(value)
    for choice in choices:
        if word == str(choice):
            return choice
        if word.lower() == str(choice).lower() and key not in CASE_MATTERS:
            return choice
    raise ValueError(f"{value} is none of {choices}")


def is_readable(key: str, value: Any, kind: Kind) -> bool:
    """Return whether accelerate can read a value."""
    try:
        read_value(key, value, kind)
    except ValueError:
        return False
    return True
