# SPDX-License-Identifier: Apache-2.0
"""What is meant by a flag that a recipe does not have.

Most such flags are those of other programs: transformers' TrainingArguments, TRL's configs and
`accelerate launch`, or the short names of common scripts. Their spelling says little about what
they mean (--deepspeed is near to --seed), so they are looked up first, and only then compared.
Names are without dashes.
"""

import difflib
import re
from collections.abc import Collection

NEARNESS = 0.75  # similarity, from 0 to 1, of names that may be meant; 0.75: seed and sede

# {flag of a recipe: what it is called elsewhere}
NAMES_ELSEWHERE = {
    "model_name_or_path": "model model_name model_id model_path base_model",
    "dtype": "torch_dtype model_dtype precision",
    "gradient_checkpointing": "activation_checkpointing grad_checkpointing",
    "use_liger_kernel": "use_liger liger_kernel",
    "dataset_name": "dataset data data_path dataset_path train_file train_data data_files",
    "dataset_train_split": "train_split",
    "dataset_test_split": "test_split",
    "dataset_config": "dataset_config_name",
    "eval_dataset_name": "eval_dataset eval_file validation_file eval_data test_file",
    "eval_split": "val_size validation_split validation_split_percentage",
    "text_column": "dataset_text_field text_field",
    "streaming": "dataset_streaming",
    "columns": "dataset_text_field text_field",
    "max_length": "max_seq_length max_seq_len seq_length seq_len cutoff_len block_size "
    "model_max_length max_prompt_length",
    "max_source_length": "max_length max_seq_length max_seq_len seq_length block_size",
    "per_device_train_batch_size": "batch_size train_batch_size micro_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "gradient_accumulation_steps": "grad_accum accumulation_steps",
    "num_train_epochs": "epochs num_epochs epoch",
    "max_steps": "steps num_steps max_train_steps num_train_steps",
    "learning_rate": "lr",
    "lr_scheduler_type": "scheduler lr_schedule lr_scheduler",
    "optim": "optimizer",
    "warmup_steps": "warmup num_warmup_steps",
    "max_grad_norm": "gradient_clipping grad_clip clip_grad_norm",
    "seed": "data_seed random_seed",
    "use_peft": "lora use_lora peft",
    "lora_r": "rank lora_rank",
    "lora_target_modules": "target_modules",
    "load_in_4bit": "load_4bit qlora use_4bit",
    "load_in_8bit": "load_8bit use_8bit",
    "eval_strategy": "evaluation_strategy do_eval",
    "output_dir": "output save_dir out_dir",
    "resume_from_checkpoint": "resume",
    "report_to": "tracker log_with",
    "dataset_num_proc": "preprocessing_num_workers num_proc",
    "dataloader_num_workers": "num_workers",
}

# Options of `accelerate launch`, which are often typed after the recipe instead of before it
LAUNCHER_OPTIONS = (
    "config_file",
    "num_processes",
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "gpu_ids",
    "multi_gpu",
    "cpu",
    "mixed_precision",
    "dynamo_backend",
    "num_cpu_threads_per_process",
    "use_deepspeed",
    "deepspeed_config_file",
    "use_fsdp",
    "zero_stage",
)
STARTS_OF_LAUNCHER_OPTIONS = ("fsdp_", "deepspeed_", "zero3_", "offload_", "dynamo_")
GOES_BEFORE = "goes before the recipe, to accelerate launch"

# {what to do instead: flags that no recipe has}
ADVICE = {
    "the YAML owns precision: pass --mixed_precision bf16 to accelerate launch, before the "
    "recipe": "bf16",
    "the YAML owns precision: pass --mixed_precision fp16 to accelerate launch, before the "
    "recipe": "fp16",
    "the YAML owns the strategy: pass --config_file accelerate_configs/fsdp.yaml to accelerate "
    "launch, before the recipe": "fsdp fsdp_config",
    "the YAML owns the strategy: pass --config_file accelerate_configs/deepspeed_zero2.yaml to "
    "accelerate launch, before the recipe": "deepspeed",
    "goes before the recipe, to accelerate launch, as --cpu": "no_cuda use_cpu",
    "nothing is uploaded: after the run, use hf upload OWNER/NAME OUTPUT_DIR": "push_to_hub "
    "hub_model_id hub_strategy hub_token",
    "--save_steps N saves after every N optimizer steps, and 0 only when the run is "
    "stopped": "save_strategy",
    "the same command continues from the newest checkpoint, and --resume_from_checkpoint none "
    "starts over": "overwrite_output_dir",
    "logs are in the --output_dir; --run_name names the run in a tracker": "logging_dir",
    "--logging_steps N logs every N optimizer steps": "logging_strategy logging_first_step",
    "--dry_run prints how to plan the memory that a --per_device_train_batch_size "
    "takes": "auto_find_batch_size",
    "use --train_sampling_strategy group_by_length": "group_by_length",
    "--gradient_checkpointing is enough: it is the kind without reentrant "
    "passes": "gradient_checkpointing_kwargs",
    "--warmup_steps below 1 is a share of all steps": "warmup_ratio",
    "this recipe evaluates only after steps: see --eval_strategy": "eval_on_start",
    "this recipe trains no quantized base: use recipes/llama.py": "load_in_4bit load_in_8bit",
    "only recipes/mixtral.py spreads experts over ranks: use it": "ep_size",
    "only recipes/llama_pipeline.py trains over a pipeline: use it": "pp_size",
    "the recipe always trains; leave it out": "do_train",
    "code from a model's repository is never run; leave it out": "trust_remote_code",
    "use --attn_implementation flash_attention_2": "flash_attn use_flash_attention_2",
    "use --no_completion_only_loss": "train_on_inputs train_on_prompt",
    "use --report_to wandb": "wandb",
}


def advice_on(name: str, known: Collection[str]) -> str | None:
    """Return what to do instead of passing a flag, or None if nothing is known about it.

    Args:
        known: the recipe's own flags. Advice to use one that it does not have is left out.
    """
    for advice, names in ADVICE.items():
        named = re.findall(r"--(\w+)", advice)
        is_possible = "accelerate launch" in advice or set(named) <= set(known)
        if name in names.split() and is_possible:
            return advice
    if name in LAUNCHER_OPTIONS or name.startswith(STARTS_OF_LAUNCHER_OPTIONS):
        return GOES_BEFORE
    return None


def flag_meant(name: str, known: Collection[str]) -> str | None:
    """Return the flag of a recipe that another one stands for or is nearest to, if there is one.

    Args:
        known: the recipe's own flags.
    """
    for flag, names in NAMES_ELSEWHERE.items():
        if flag in known and name in names.split():
            return flag
    return next(iter(difflib.get_close_matches(name, known, 1, NEARNESS)), None)


def hint_on(flag: str, known: Collection[str]) -> str | None:
    """Return a line about a flag that a recipe does not have, or None if nothing is known.

    Args:
        flag: as it was typed, with or without "=" and a value.
        known: as in `advice_on`.
    """
    written = flag.partition("=")[0]
    name = written.lstrip("-").replace("-", "_")
    hint = advice_on(name, known)
    meant = flag_meant(name, known)
    if hint is None and meant is not None:
        hint = f"did you mean --{meant}?"
    if hint is None:
        return None
    return f"{written}: {hint}"
