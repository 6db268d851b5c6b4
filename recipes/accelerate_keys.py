"""The keys that accelerate and DeepSpeed read, and what they take: data for `check_config.py`, no imports.

Sources: accelerate 1.15 `commands/config/config_args.py` (ClusterConfig), `commands/launch.py` (the launcher's options
that the sections of a file set), `utils/launch.py` (what it hands on) and `utils/dataclasses.py` (who reads it);
deepspeed 0.19 `runtime/config.py`, `runtime/precision_config.py` and `runtime/zero/`.
`tests/unit/test_check_config.py` holds every list against the installed packages.
"""

BOOL, INT, NUMBER, TEXT, LIST = "true or false", "a whole number", "a number", "text", "a list"
STRATEGY = "a sharding strategy"
TRUTHS = {
    "y": True,
    "yes": True,
    "t": True,
    "true": True,
    "on": True,
    "1": True,
    "n": False,
    "no": False,
    "f": False,
    "false": False,
    "off": False,
    "0": False,
}  # accelerate's str_to_bool
STRATEGIES = (
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "HYBRID_SHARD",
    "HYBRID_SHARD_ZERO2",
)  # or number 1 to 5

TOP_LEVEL = {
    "compute_environment": ("LOCAL_MACHINE", "AMAZON_SAGEMAKER"),
    "distributed_type": (
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
    ),
    "mixed_precision": ("no", "fp16", "bf16", "fp8"),
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
    "fp16": BOOL,
    "dynamo_backend": TEXT,  # of older versions, converted
}
SECTIONS = {
    "fsdp_config": {
        "fsdp_version": (1, 2),
        "fsdp_sharding_strategy": STRATEGY,
        "fsdp_reshard_after_forward": STRATEGY,
        "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
        "fsdp_transformer_layer_cls_to_wrap": TEXT,
        "fsdp_min_num_params": INT,
        "fsdp_backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
        "fsdp_state_dict_type": ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
        "fsdp_offload_params": BOOL,
        "fsdp_forward_prefetch": BOOL,
        "fsdp_use_orig_params": BOOL,
        "fsdp_cpu_ram_efficient_loading": BOOL,
        "fsdp_sync_module_states": BOOL,
        "fsdp_activation_checkpointing": BOOL,
        "fsdp_activation_checkpointing_offload": BOOL,
        "fsdp_ignored_modules": TEXT,  # no argument of the launcher, but handed on
    },
    "deepspeed_config": {
        "deepspeed_config_file": TEXT,
        "zero_stage": (0, 1, 2, 3),
        "offload_optimizer_device": ("none", "cpu", "nvme"),
        "offload_param_device": ("none", "cpu", "nvme"),
        "offload_optimizer_nvme_path": TEXT,
        "offload_param_nvme_path": TEXT,
        "gradient_accumulation_steps": TEXT,
        "gradient_clipping": TEXT,
        "zero3_init_flag": BOOL,
        "zero3_save_16bit_model": BOOL,
        "deepspeed_moe_layer_cls_names": TEXT,
        "deepspeed_multinode_launcher": (
            "pdsh",
            "standard",
            "openmpi",
            "mvapich",
            "mpich",
            "nossh",
            "slurm",
        ),
        "deepspeed_hostfile": TEXT,
        "deepspeed_exclusion_filter": TEXT,
        "deepspeed_inclusion_filter": TEXT,
    },
    "parallelism_config": {
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
    },
    "dynamo_config": {
        "dynamo_backend": (
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
        ),
        "dynamo_mode": ("default", "reduce-overhead", "max-autotune"),
        "dynamo_use_fullgraph": BOOL,
        "dynamo_use_dynamic": BOOL,
        "dynamo_use_regional_compilation": BOOL,
    },
    "fp8_config": {
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
        "fp8_use_mxfp8_block_scaling": BOOL,  # no argument of the launcher, but handed on
    },
    "megatron_lm_config": dict.fromkeys(
        "megatron_lm_" + name
        for name in (
            "tp_degree pp_degree use_custom_fsdp no_load_optim no_save_optim eod_mask_loss optimizer_cpu_offload "
            "overlap_cpu_optimizer_d2h_h2d use_precision_aware_optimizer decoder_last_pipeline_num_layers "
            "num_micro_batches sequence_parallelism recompute_activations recompute_granularity recompute_method "
            "recompute_num_layers use_distributed_optimizer gradient_clipping attention_backend attention_dropout "
            "hidden_dropout attention_softmax_in_fp32 expert_model_parallel_size expert_tensor_parallel_size "
            "context_parallel_size calculate_per_token_loss use_rotary_position_embeddings"
        ).split()
    ),
    "mpirun_config": {"mpirun_hostfile": TEXT},
}
REMOVED = {  # what older versions' `accelerate config` wrote (up to 1.12); and where it is said now
    ("ipex_config",): "",
    ("mpirun_config", "mpirun_ccl"): "",
    ("tp_config",): "parallelism_config_tp_size in parallelism_config",
}
ADDED_PREFIXES = {
    "fsdp_config": "fsdp_",
    "dynamo_config": "dynamo_",
    "fp8_config": "fp8_",
}  # by the launcher
CASE_MATTERS = {"compute_environment", "distributed_type", "fp8_backend"}
SECTION_OF = {
    "FSDP": "fsdp_config",
    "DEEPSPEED": "deepspeed_config",
    "MEGATRON_LM": "megatron_lm_config",
}

MAY_BE_EMPTY = {
    "fsdp_auto_wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_backward_prefetch",
    "fsdp_state_dict_type",
    "fsdp_ignored_modules",
}  # in fsdp_config; in deepspeed_config all may
DEFAULTS = {  # of the launcher and the plugins, where the check needs them
    "num_machines": 1,
    "machine_rank": 0,
    "gpu_ids": "all",
    "mixed_precision": "no",
    "fsdp_config": {
        "fsdp_version": 1,
        "fsdp_auto_wrap_policy": "NO_WRAP",
        "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_reshard_after_forward": "FULL_SHARD",
        "fsdp_cpu_ram_efficient_loading": True,
    },
    "deepspeed_config": {
        "zero_stage": 2,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "deepspeed_multinode_launcher": "pdsh",
    },
}
# The launcher takes these from the command line alone: its own defaults are not None, so the file's never count
COMMAND_LINE_ONLY = {
    "rdzv_backend": "static",
    "same_network": None,
    "enable_cpu_affinity": False,
    "downcast_bf16": False,
    "tpu_use_sudo": False,
}  # and the value that asks for nothing
READ_BY_ONE_VERSION = {  # of FSDP
    "fsdp_sharding_strategy": 1,
    "fsdp_backward_prefetch": 1,
    "fsdp_forward_prefetch": 1,
    "fsdp_use_orig_params": 1,
    "fsdp_sync_module_states": 1,
    "fsdp_reshard_after_forward": 2,
}
REFUSED_BESIDE_A_FILE = {  # by DeepSpeedPlugin._deepspeed_config_checks; and what they are in the file
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
READ_FROM_JSON = {
    "zero_stage": (2, 0),
    "offload_optimizer_device": ("none", "none"),
    "offload_param_device": ("none", "none"),
}  # and what accelerate makes of "auto", and of nothing

# Settings of the recipes' command line, and their flags
OWNED_BY_THE_RECIPE = {
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
    "gradient_clipping": "--max_grad_norm",
    "train_micro_batch_size_per_gpu": "--per_device_train_batch_size",
    "optimizer": "--optim and --learning_rate",
    "train_batch_size": "--per_device_train_batch_size",
    "scheduler": "--lr_scheduler_type",
}

DEEPSPEED_JSON = {  # sections of a DeepSpeed JSON; deepspeed refuses unknown keys in all but the first
    (): """activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type
        compile csv_monitor data_efficiency data_types dataloader_drop_last datastates_ckpt disable_allgather
        disable_python_gc dump_state expert_parallel flops_profiler fp16 gradient_accumulation_steps
        gradient_allreduce_op gradient_clipping gradient_predivide_factor hybrid_engine log_level
        managed_gradient_accumulation memory_breakdown optimizer pipeline prescale_gradients scheduler
        seq_parallel_communication_data_type steps_per_print tensor_parallel tensorboard timers torch_autocast
        train_batch_size train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size
        wall_clock_breakdown wandb weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
        zero_optimization""".split(),
    ("zero_optimization",): """stage contiguous_gradients reduce_scatter reduce_bucket_size
        use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm
        load_from_fp32_weights elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size
        cpu_offload_param cpu_offload_use_pin_memory cpu_offload stage3_prefetch_bucket_size
        stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters
        stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
        stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential stage3_gather_fp16_weights_on_model_save
        ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment zero_hpz_partition_size
        zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear
        pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks
        save_muon_momentum_buffer_in_memory leaf_module""".split(),
    (
        "zero_optimization",
        "offload_param",
    ): "device nvme_path buffer_count buffer_size max_in_cpu pin_memory".split(),
    (
        "zero_optimization",
        "offload_optimizer",
    ): """device nvme_path buffer_count pin_memory pipeline_read
        pipeline_write fast_init ratio super_offload cpuadam_cores_perc""".split(),
    ("bf16",): """enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads
        bf16_optimizer_states""".split(),
    ("fp16",): """enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis
        consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads""".split(),
}
REMOVED_FROM_DEEPSPEED = """nebula compression_training amp quantize_training sparse_gradients eigenvalue
    sparse_attention elasticity graph_harvesting curriculum_learning progressive_layer_drop""".split()  # refused
DEEPSPEED_SECTIONS = """zero_optimization zero_optimization.offload_optimizer zero_optimization.offload_param
    bf16 fp16 activation_checkpointing aio autotuning checkpoint comet comms_logger compile csv_monitor data_efficiency
    data_types expert_parallel flops_profiler hybrid_engine optimizer pipeline scheduler tensor_parallel tensorboard
    torch_autocast wandb weight_quantization""".split()  # accelerate or DeepSpeed stops at any other value
MAY_BE_NULL = {
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
    "bf16",
    "aio",
    "expert_parallel",
}  # of these
FILLED_IN_JSON = """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
    bf16.enabled fp16.enabled zero_optimization.stage zero_optimization.reduce_bucket_size
    zero_optimization.stage3_prefetch_bucket_size zero_optimization.stage3_param_persistence_threshold
    zero_optimization.stage3_gather_16bit_weights_on_model_save zero_optimization.offload_optimizer.device
    zero_optimization.offload_optimizer.nvme_path zero_optimization.offload_param.device
    zero_optimization.offload_param.nvme_path""".split()  # where accelerate knows what "auto" is
