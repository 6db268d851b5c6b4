# SPDX-License-Identifier: Apache-2.0
"""Configs like those of public repositories: accelerate stops where the checker says so.

The files are made of the keys, values and mistakes that public files have, at random but always the
same. accelerate's launcher and plugins are the judges.
"""

import random

import pytest

from accelerate_judge import outcome, write
from components.config_files import find_faults, load
from components.config_findings import STOPS

pytestmark = pytest.mark.usefixtures("pretended_gpu")
FILES = 250

# The lines that are in nearly every file, each with the values that it has
COMMON = {
    "compute_environment": ["LOCAL_MACHINE"],
    "debug": ["false", "true", "'false'"],
    "downcast_bf16": ["'no'", "no", "auto", "fp16"],
    "enable_cpu_affinity": ["false", "true"],
    "gpu_ids": ["all", "'0,1,2,3'", "null"],
    "machine_rank": ["0", "1", "'0'"],
    "main_process_ip": ["null", "10.0.0.1"],
    "main_process_port": ["29501", "null", "'29501'"],
    "main_training_function": ["main"],
    "mixed_precision": ["bf16", "fp16", "'no'", "no"],
    "num_machines": ["1", "", "'1'"],
    "num_processes": ["8", "4", "'8'", "1", "0"],
    "rdzv_backend": ["static", "c10d"],
    "same_network": ["true", "false"],
    "tpu_env": ["[]"],
    "tpu_use_cluster": ["false"],
    "tpu_use_sudo": ["false"],
    "use_cpu": ["false", "'no'"],
    "dynamo_backend": ["'NO'", "no", "INDUCTOR"],
    "fp16": ["true", "false"],
    "main_training_port": ["29500"],
    "downcase_fp16": ["'NO'"],
    "use_parallelism_config": ['"true"'],
    "zero_stage": ["3"],
}
# Keys that are right or at least usual, of which a file always or mostly has one value
MOSTLY = ("compute_environment", "num_processes", "num_machines", "mixed_precision")
SECTIONS = {
    "fsdp_config": {
        "fsdp_auto_wrap_policy": ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"],
        "fsdp_backward_prefetch": ["BACKWARD_PRE", "NO_PREFETCH"],
        "fsdp_backward_prefetch_policy": ["BACKWARD_PRE", "NONE", "NO_PREFETCH"],
        "fsdp_cpu_ram_efficient_loading": ["true", "false"],
        "fsdp_forward_prefetch": ["false", "true"],
        "fsdp_min_num_params": ["2000", "1e8"],
        "fsdp_offload_params": ["false", "true", "'false'"],
        "fsdp_reshard_after_forward": ["true", "FULL_SHARD", "false"],
        "fsdp_sharding_strategy": ["FULL_SHARD", "1", "SHARD_GRAD_OP", "HYBRID_SHARD"],
        "fsdp_state_dict_type": ["SHARDED_STATE_DICT", "FULL_STATE_DICT"],
        "fsdp_sync_module_states": ["true", "false"],
        "fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer", "[A, B]"],
        "fsdp_use_orig_params": ["true", "false"],
        "fsdp_version": ["1", "2", '"2"'],
        "fsdp_activation_checkpointing": ["true", "false"],
        "limit_all_gathers": ["true"],
        "offload_params": ["false"],
        "timeout": ["1800"],
    },
    "deepspeed_config": {
        "deepspeed_multinode_launcher": ["standard", "pdsh"],
        "gradient_accumulation_steps": ["1", "auto", "'4'", "null"],
        "gradient_clipping": ["1.0", "auto", "null"],
        "offload_optimizer_device": ["none", "cpu", "null"],
        "offload_param_device": ["none", "cpu"],
        "offload_optimizer": ["cpu"],
        "zero3_init_flag": ["true", "false"],
        "zero3_save_16bit_model": ["true", "false", "auto"],
        "zero_stage": ["0", "1", "2", "3", "'2'"],
        "stage3_max_live_parameters": ["1e8"],
        "train_batch_size": ["64"],
        "zero_optimization": ["{stage: 1}", "{stage: 2, overlap_comm: true}"],
        "fp16": ["{enabled: true}"],
        "main_process_port": ["29502"],
        "num_processes": ["2"],
        "mixed_precision": ["bf16"],
        "rdzv_backend": ["c10d"],
    },
    "parallelism_config": {
        "parallelism_config_dp_replicate_size": ["1", "2"],
        "parallelism_config_dp_shard_size": ["1", "4"],
        "parallelism_config_tp_size": ["1"],
        "parallelism_config_cp_size": ["1"],
    },
    "dynamo_config": {
        "dynamo_backend": ["INDUCTOR", "'NO'"],
        "dynamo_mode": ["default"],
        "dynamo_use_fullgraph": ["false"],
    },
    "megatron_lm_config": {
        "megatron_lm_tp_degree": ["2"],
        "megatron_lm_learning_rate_decay_iters": ["320000"],
    },
    "mpirun_config": {"mpirun_ccl": ["'1'"], "mpirun_hostfile": ["/hosts"]},
    "fp8_config": {"backend": ["TE"], "margin": ["0"]},
}
SECTION_OF = {
    "FSDP": "fsdp_config",
    "DEEPSPEED": "deepspeed_config",
    "MULTI_GPU": None,
    "'NO'": None,
}
ENGINES = ["FSDP", "FSDP", "DEEPSPEED", "DEEPSPEED", "MULTI_GPU", "'NO'", "no", "MULTI_CPU"]


def public_file(chosen: random.Random) -> str:
    """Return the text of a config as people write them."""
    engine = chosen.choice(ENGINES)
    lines = [f"distributed_type: {engine}"]
    for key, values in COMMON.items():
        share = 0.97 if key in MOSTLY else 0.25
        if key in ("main_training_port", "downcase_fp16", "use_parallelism_config", "zero_stage"):
            share = 0.04
        if chosen.random() < share:
            lines.append(f"{key}: {likely(values, chosen)}")
    chosen.shuffle(lines)
    for section, known in SECTIONS.items():
        if section == SECTION_OF.get(engine) or chosen.random() < 0.05:
            lines += section_of(section, known, chosen)
    return "".join(f"{line}\n" for line in lines)


def likely(values: list[str], chosen: random.Random) -> str:
    """Return mostly the first value."""
    return values[0] if chosen.random() < 0.7 else chosen.choice(values)


def section_of(section: str, known: dict[str, list[str]], chosen: random.Random) -> list[str]:
    """Return the lines of a section, or of an empty one."""
    names = chosen.sample(sorted(known), chosen.randint(0, min(6, len(known))))
    if not names:
        return [f"{section}: {{}}"]
    return [f"{section}:", *(f"  {name}: {likely(known[name], chosen)}" for name in names)]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Many configs, always the same."""
    chosen = random.Random(2026)
    return [public_file(chosen) for _ in range(FILES)]


def test_accelerate_stops_where_the_checker_says_so_and_nowhere_else(texts, tmp_path):
    for text in texts:
        findings, _ = find_faults(load(write(tmp_path, text)))
        says_so = [item.dotted_path for item in findings if item.kind == STOPS]
        stopped = outcome(tmp_path, text).stopped
        # Too few GPUs stop later, and a missing number may come from the command line.
        if says_so == ["gpu_ids"] or "manually pass in `--num_processes`" in stopped:
            continue
        assert bool(says_so) == bool(stopped), (text, says_so, stopped)
