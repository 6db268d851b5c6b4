# SPDX-License-Identifier: Apache-2.0
"""The keys of a DeepSpeed JSON, and how accelerate reads those that its YAML also has.

Sources: deepspeed 0.19 `runtime/config.py`, `runtime/precision_config.py`, `runtime/zero/` and the
models that `runtime/config.py` imports;
accelerate 1.15 `utils/deepspeed.py` and `utils/dataclasses.py` (DeepSpeedPlugin).
tests/unit/components/test_deepspeed_keys.py compares the tables with the installed packages.
"""

# Kinds of values. DeepSpeed reads them by pydantic, which takes true, "yes" and 1 as true, and
# 5e8 as a whole number. It leaves out every "auto".
BOOL = "true or false"
INT = "a whole number"
FLOAT = "a number"
ANYTHING = "anything"

# DeepSpeed ignores any other key at the top level.
TOP_LEVEL = (
    "activation_checkpointing",
    "aio",
    "autotuning",
    "bf16",
    "bfloat16",
    "checkpoint",
    "comet",
    "comms_logger",
    "communication_data_type",
    "compile",
    "csv_monitor",
    "data_efficiency",
    "data_types",
    "dataloader_drop_last",
    "datastates_ckpt",
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "expert_parallel",
    "flops_profiler",
    "fp16",
    "gradient_accumulation_steps",
    "gradient_allreduce_op",
    "gradient_clipping",
    "gradient_predivide_factor",
    "hybrid_engine",
    "log_level",
    "managed_gradient_accumulation",
    "memory_breakdown",
    "optimizer",
    "pipeline",
    "prescale_gradients",
    "scheduler",
    "seq_parallel_communication_data_type",
    "steps_per_print",
    "tensor_parallel",
    "tensorboard",
    "timers",
    "torch_autocast",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "use_data_before_expert_parallelism",
    "vocabulary_size",
    "wall_clock_breakdown",
    "wandb",
    "weight_quantization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization",
)
ZERO: dict[str, str] = {
    "stage": ANYTHING,
    "contiguous_gradients": BOOL,
    "reduce_scatter": BOOL,
    "reduce_bucket_size": INT,
    "use_multi_rank_bucket_allreduce": BOOL,
    "allgather_partitions": BOOL,
    "allgather_bucket_size": INT,
    "overlap_comm": BOOL,
    "compute_grad_norm": BOOL,
    "load_from_fp32_weights": BOOL,
    "elastic_checkpoint": BOOL,
    "offload_param": ANYTHING,
    "offload_optimizer": ANYTHING,
    "zenflow": ANYTHING,
    "sub_group_size": INT,
    "cpu_offload_param": BOOL,
    "cpu_offload_use_pin_memory": BOOL,
    "cpu_offload": BOOL,
    "stage3_prefetch_bucket_size": INT,
    "stage3_param_persistence_threshold": INT,
    "stage3_model_persistence_threshold": INT,
    "stage3_max_live_parameters": INT,
    "stage3_max_reuse_distance": INT,
    "stage3_gather_16bit_weights_on_model_save": BOOL,
    "stage3_module_granularity_threshold": INT,
    "stage3_use_all_reduce_for_fetch_params": BOOL,
    "stage3_allgather_sequential": BOOL,
    "stage3_gather_fp16_weights_on_model_save": BOOL,
    "ignore_unused_parameters": BOOL,
    "legacy_stage1": BOOL,
    "round_robin_gradients": BOOL,
    "parameter_alignment": BOOL,
    "zero_hpz_partition_size": INT,
    "zero_quantized_weights": BOOL,
    "zero_quantized_nontrainable_weights": BOOL,
    "zero_quantized_gradients": BOOL,
    "memory_efficient_linear": BOOL,
    "pipeline_loading_checkpoint": BOOL,
    "override_module_apply": BOOL,
    "log_trace_cache_warnings": BOOL,
    "enable_sanity_checks": BOOL,
    "save_muon_momentum_buffer_in_memory": BOOL,
    "leaf_module": ANYTHING,
}
OFFLOAD_PARAM: dict[str, str] = {
    "device": ANYTHING,
    "nvme_path": ANYTHING,
    "buffer_count": INT,
    "buffer_size": INT,
    "max_in_cpu": INT,
    "pin_memory": BOOL,
}
OFFLOAD_OPTIMIZER: dict[str, str] = {
    "device": ANYTHING,
    "nvme_path": ANYTHING,
    "buffer_count": INT,
    "pin_memory": BOOL,
    "pipeline_read": BOOL,
    "pipeline_write": BOOL,
    "fast_init": BOOL,
    "ratio": FLOAT,
    "super_offload": BOOL,
    "cpuadam_cores_perc": FLOAT,
}
BF16: dict[str, str] = {
    "enabled": BOOL,
    "immediate_grad_update": BOOL,
    "check_grad_overflow": BOOL,
    "bf16_master_weights_and_grads": BOOL,
    "bf16_optimizer_states": BOOL,
}
FP16: dict[str, str] = {
    "enabled": BOOL,
    "auto_cast": BOOL,
    "loss_scale": FLOAT,
    "initial_scale_power": INT,
    "loss_scale_window": INT,
    "hysteresis": INT,
    "consecutive_hysteresis": BOOL,
    "min_loss_scale": INT,
    "fp16_master_weights_and_grads": BOOL,
}
COMPILE: dict[str, str] = {
    "deepcompile": BOOL,
    "autoep_non_moe": BOOL,
    "free_activation": BOOL,
    "free_activation_threshold": INT,
    "offload_activation": BOOL,
    "offload_activation_pin_memory": BOOL,
    "offload_opt_states": BOOL,
    "double_buffer": BOOL,
    "symmetric_memory": BOOL,
    "debug_log": BOOL,
    "offload_parameters": BOOL,
    "sync_before_reduce": BOOL,
    "sync_after_reduce": BOOL,
    "sync_before_allgather": BOOL,
    "sync_after_allgather": BOOL,
    "keep_int_input_tensors": BOOL,
    "keep_all_input_tensors": BOOL,
    "passes": ANYTHING,
}
COMMS_LOGGER: dict[str, str] = {
    "enabled": BOOL,
    "prof_all": BOOL,
    "prof_ops": ANYTHING,
    "verbose": BOOL,
    "debug": BOOL,
}
TENSORBOARD: dict[str, str] = {
    "enabled": BOOL,
    "output_path": ANYTHING,
    "job_name": ANYTHING,
}
WANDB: dict[str, str] = {
    "enabled": BOOL,
    "group": ANYTHING,
    "team": ANYTHING,
    "project": ANYTHING,
}
CSV_MONITOR: dict[str, str] = {
    "enabled": BOOL,
    "output_path": ANYTHING,
    "job_name": ANYTHING,
}
COMET: dict[str, str] = {
    "enabled": BOOL,
    "samples_log_interval": INT,
    "project": ANYTHING,
    "workspace": ANYTHING,
    "api_key": ANYTHING,
    "experiment_name": ANYTHING,
    "experiment_key": ANYTHING,
    "online": BOOL,
    "mode": ANYTHING,
}
TENSOR_PARALLEL: dict[str, str] = {
    "dtype": ANYTHING,
    "autotp_size": INT,
    "tp_overlap_comm": BOOL,
    "vocab_parallel_lm_head": BOOL,
    "vocab_parallel_ce_backend": ANYTHING,
    "tp": ANYTHING,
    "injection_policy_tuple": ANYTHING,
    "partition_config": ANYTHING,
    "preset_model": ANYTHING,
    "keep_module_on_host": BOOL,
    "kernel_inject": BOOL,
}
HYBRID_ENGINE: dict[str, str] = {
    "enabled": BOOL,
    "max_out_tokens": INT,
    "inference_tp_size": INT,
    "release_inference_cache": BOOL,
    "pin_parameters": BOOL,
    "tp_gather_partition_size": INT,
    "enable_cuda_graph": BOOL,
}
# Sections in which DeepSpeed says nothing to other keys
AIO = (
    "block_size",
    "queue_depth",
    "intra_op_parallelism",
    "single_submit",
    "overlap_events",
    "use_gds",
)
ACTIVATION_CHECKPOINTING = (
    "partition_activations",
    "contiguous_memory_optimization",
    "cpu_checkpointing",
    "number_checkpoints",
    "profile",
    "synchronize_checkpoint_boundary",
)
FLOPS_PROFILER = (
    "enabled",
    "recompute_fwd_factor",
    "profile_step",
    "module_depth",
    "top_modules",
    "detailed",
    "output_file",
)
# The sections in which DeepSpeed refuses other keys, and values of other kinds
STRICT_SECTIONS: dict[tuple[str, ...], dict[str, str]] = {
    ("zero_optimization",): ZERO,
    ("zero_optimization", "offload_param"): OFFLOAD_PARAM,
    ("zero_optimization", "offload_optimizer"): OFFLOAD_OPTIMIZER,
    ("bf16",): BF16,
    ("fp16",): FP16,
    ("compile",): COMPILE,
    ("comms_logger",): COMMS_LOGGER,
    ("tensorboard",): TENSORBOARD,
    ("wandb",): WANDB,
    ("csv_monitor",): CSV_MONITOR,
    ("comet",): COMET,
    ("tensor_parallel",): TENSOR_PARALLEL,
    ("hybrid_engine",): HYBRID_ENGINE,
}
KEYS: dict[tuple[str, ...], tuple[str, ...]] = {
    (): TOP_LEVEL,
    **{section: tuple(known) for section, known in STRICT_SECTIONS.items()},
    ("aio",): AIO,
    ("activation_checkpointing",): ACTIVATION_CHECKPOINTING,
    ("flops_profiler",): FLOPS_PROFILER,
}
# {name in accelerate's YAML: switch of older versions, which DeepSpeed still takes}
FORMER_SWITCHES = {
    "offload_optimizer_device": "cpu_offload",
    "offload_param_device": "cpu_offload_param",
}
# {alias: the names of the field, which DeepSpeed takes in its place}. It refuses two at once.
OTHER_NAMES = {
    "stage3_gather_16bit_weights_on_model_save": (
        "gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    ),
}
# DeepSpeed refuses these keys of older versions
REMOVED = (
    "nebula",
    "compression_training",
    "amp",
    "quantize_training",
    "sparse_gradients",
    "eigenvalue",
    "sparse_attention",
    "elasticity",
    "graph_harvesting",
    "curriculum_learning",
    "progressive_layer_drop",
)

# accelerate or DeepSpeed stops if one of these is not a section
MUST_BE_SECTIONS = (
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
    "bf16",
    "fp16",
    "activation_checkpointing",
    "aio",
    "autotuning",
    "checkpoint",
    "comet",
    "comms_logger",
    "compile",
    "csv_monitor",
    "data_efficiency",
    "data_types",
    "expert_parallel",
    "flops_profiler",
    "hybrid_engine",
    "optimizer",
    "pipeline",
    "scheduler",
    "tensor_parallel",
    "tensorboard",
    "torch_autocast",
    "wandb",
    "weight_quantization",
)
# The sections that may also be null
MAY_BE_NULL = (
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
    "bf16",
    "aio",
    "expert_parallel",
)
# The keys of sections whose values may be null
MAY_BE_NULL_IN_SECTIONS = (
    "zero_optimization.overlap_comm",
    "zero_optimization.cpu_offload_param",
    "zero_optimization.cpu_offload_use_pin_memory",
    "zero_optimization.cpu_offload",
    "tensor_parallel.vocab_parallel_lm_head",
    "comet.online",
)
# Keys of numbers at which DeepSpeed refuses true and false, which pydantic takes as 1 and 0
TAKE_NO_TRUTH = ("fp16.loss_scale", "fp16.loss_scale_window", "fp16.min_loss_scale")
# The keys at which accelerate replaces "auto" with a value
AUTO_IS_FILLED_IN = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16.enabled",
    "fp16.enabled",
    "zero_optimization.stage",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_param.nvme_path",
)

# {key of accelerate's YAML: its name in the JSON}. Beside a JSON, accelerate refuses these keys
# in the YAML (DeepSpeedPlugin._deepspeed_config_checks).
IN_JSON = {
    "mixed_precision": "bf16.enabled",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
# What DeepSpeed assumes if the JSON lacks the key. For "auto" accelerate fills in its own defaults.
WHEN_MISSING = {"zero_stage": 0, "offload_optimizer_device": "none", "offload_param_device": "none"}
