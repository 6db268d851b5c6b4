# SPDX-License-Identifier: Apache-2.0
"""The keys of a DeepSpeed JSON, and how accelerate reads those that its YAML also has.

Sources: deepspeed 0.19 `runtime/config.py`, `runtime/precision_config.py`, `runtime/zero/` and the
models that `runtime/config.py` imports;
accelerate 1.15 `utils/deepspeed.py` and `utils/dataclasses.py` (DeepSpeedPlugin).
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
    "sequence_parallel_size",
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
    "stage": "anything",
    "contiguous_gradients": "true or false",
    "reduce_scatter": "true or false",
    "reduce_bucket_size": "a whole number",
    "use_multi_rank_bucket_allreduce": "true or false",
    "allgather_partitions": "true or false",
    "allgather_bucket_size": "a whole number",
    "overlap_comm": "true or false",
    "compute_grad_norm": "true or false",
    "load_from_fp32_weights": "true or false",
    "elastic_checkpoint": "true or false",
    "offload_param": "anything",
    "offload_optimizer": "anything",
    "zenflow": "anything",
    "sub_group_size": "a whole number",
    "cpu_offload_param": "true or false",
    "cpu_offload_use_pin_memory": "true or false",
    "cpu_offload": "true or false",
    "stage3_prefetch_bucket_size": "a whole number",
    "stage3_param_persistence_threshold": "a whole number",
    "stage3_model_persistence_threshold": "a whole number",
    "stage3_max_live_parameters": "a whole number",
    "stage3_max_reuse_distance": "a whole number",
    "stage3_gather_16bit_weights_on_model_save": "true or false",
    "stage3_module_granularity_threshold": "a whole number",
    "stage3_use_all_reduce_for_fetch_params": "true or false",
    "stage3_allgather_sequential": "true or false",
    "stage3_gather_fp16_weights_on_model_save": "true or false",
    "ignore_unused_parameters": "true or false",
    "legacy_stage1": "true or false",
    "round_robin_gradients": "true or false",
    "parameter_alignment": "true or false",
    "zero_hpz_partition_size": "a whole number",
    "zero_quantized_weights": "true or false",
    "zero_quantized_nontrainable_weights": "true or false",
    "zero_quantized_gradients": "true or false",
    "memory_efficient_linear": "true or false",
    "pipeline_loading_checkpoint": "true or false",
    "override_module_apply": "true or false",
    "log_trace_cache_warnings": "true or false",
    "enable_sanity_checks": "true or false",
    "save_muon_momentum_buffer_in_memory": "true or false",
    "leaf_module": "anything",
}
OFFLOAD_PARAM: dict[str, str] = {
    "device": "anything",
    "nvme_path": "anything",
    "buffer_count": "a whole number",
    "buffer_size": "a whole number",
    "max_in_cpu": "a whole number",
    "pin_memory": "true or false",
}
OFFLOAD_OPTIMIZER: dict[str, str] = {
    "device": "anything",
    "nvme_path": "anything",
    "buffer_count": "a whole number",
    "pin_memory": "true or false",
    "pipeline_read": "true or false",
    "pipeline_write": "true or false",
    "fast_init": "true or false",
    "ratio": "a number",
    "super_offload": "true or false",
    "cpuadam_cores_perc": "a number",
}
BF16: dict[str, str] = {
    "enabled": "true or false",
    "immediate_grad_update": "true or false",
    "check_grad_overflow": "true or false",
    "bf16_master_weights_and_grads": "true or false",
    "bf16_optimizer_states": "true or false",
}
FP16: dict[str, str] = {
    "enabled": "true or false",
    "auto_cast": "true or false",
    "loss_scale": "a number",
    "initial_scale_power": "a whole number",
    "loss_scale_window": "a whole number",
    "hysteresis": "a whole number",
    "consecutive_hysteresis": "true or false",
    "min_loss_scale": "a whole number",
    "fp16_master_weights_and_grads": "true or false",
}
COMPILE: dict[str, str] = {
    "deepcompile": "true or false",
    "autoep_non_moe": "true or false",
    "free_activation": "true or false",
    "free_activation_threshold": "a whole number",
    "offload_activation": "true or false",
    "offload_activation_pin_memory": "true or false",
    "offload_opt_states": "true or false",
    "double_buffer": "true or false",
    "symmetric_memory": "true or false",
    "debug_log": "true or false",
    "offload_parameters": "true or false",
    "sync_before_reduce": "true or false",
    "sync_after_reduce": "true or false",
    "sync_before_allgather": "true or false",
    "sync_after_allgather": "true or false",
    "keep_int_input_tensors": "true or false",
    "keep_all_input_tensors": "true or false",
    "passes": "anything",
}
COMMS_LOGGER: dict[str, str] = {
    "enabled": "true or false",
    "prof_all": "true or false",
    "prof_ops": "anything",
    "verbose": "true or false",
    "debug": "true or false",
}
TENSORBOARD: dict[str, str] = {
    "enabled": "true or false",
    "output_path": "anything",
    "job_name": "anything",
}
WANDB: dict[str, str] = {
    "enabled": "true or false",
    "group": "anything",
    "team": "anything",
    "project": "anything",
}
CSV_MONITOR: dict[str, str] = {
    "enabled": "true or false",
    "output_path": "anything",
    "job_name": "anything",
}
COMET: dict[str, str] = {
    "enabled": "true or false",
    "samples_log_interval": "a whole number",
    "project": "anything",
    "workspace": "anything",
    "api_key": "anything",
    "experiment_name": "anything",
    "experiment_key": "anything",
    "online": "true or false",
    "mode": "anything",
}
TENSOR_PARALLEL: dict[str, str] = {
    "dtype": "anything",
    "autotp_size": "a whole number",
    "tp_overlap_comm": "true or false",
    "vocab_parallel_lm_head": "true or false",
    "vocab_parallel_ce_backend": "anything",
    "tp": "anything",
    "injection_policy_tuple": "anything",
    "partition_config": "anything",
    "preset_model": "anything",
    "keep_module_on_host": "true or false",
    "kernel_inject": "true or false",
}
HYBRID_ENGINE: dict[str, str] = {
    "enabled": "true or false",
    "max_out_tokens": "a whole number",
    "inference_tp_size": "a whole number",
    "release_inference_cache": "true or false",
    "pin_parameters": "true or false",
    "tp_gather_partition_size": "a whole number",
    "enable_cuda_graph": "true or false",
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
# Numbers that have to be above 0, at least 0, or from 0 to 1
POSITIVE = ("zero_optimization.reduce_bucket_size", "hybrid_engine.max_out_tokens")
NOT_NEGATIVE = (
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.sub_group_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_model_persistence_threshold",
    "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.stage3_max_reuse_distance",
    "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.offload_param.buffer_count",
    "zero_optimization.offload_param.buffer_size",
    "zero_optimization.offload_param.max_in_cpu",
    "zero_optimization.offload_optimizer.buffer_count",
    "fp16.loss_scale",
)
SHARES = (
    "zero_optimization.offload_optimizer.ratio",
    "zero_optimization.offload_optimizer.cpuadam_cores_perc",
)
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
