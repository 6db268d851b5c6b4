"""Instruction tuning of any causal language model, Llama as the example: full, LoRA or QLoRA, under any strategy.

The YAML file owns the strategy, the command line everything about learning:

    accelerate launch --config_file accelerate_configs/fsdp.yaml recipes/llama.py
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 recipes/llama.py \
        --model_name_or_path meta-llama/Llama-3.2-1B --dataset_name rows.jsonl --use_peft --learning_rate 2e-4
    accelerate launch --config_file accelerate_configs/deepspeed_zero3.yaml --num_processes 8 recipes/llama.py --use_peft

A good run prints a summary with one row as the model sees it, a loss that falls, and the folder that `from_pretrained`
loads. The same command again goes on from the newest checkpoint. Exit codes: 0 done, 64 usage, 65 data, 69 no hub,
70 not finite, 73 cannot write, 75 stopped and saved. To make it yours: grep EDIT.
"""

import argparse
import difflib
import json
import math
import os
import shutil
import sys
import time
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import numpy as np
import torch
import xxhash
from accelerate import Accelerator, DistributedType
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, InitProcessGroupKwargs, set_seed
from accelerate.utils.other import extract_model_from_parallel
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, DataCollatorForSeq2Seq, get_scheduler

try:
    import fault_tolerance  # beside this file: checkpoints, resume, signals, dead ranks
except ModuleNotFoundError:
    fault_tolerance = None  # this file was copied alone: it trains without them

ROW_FORMATS = {"prompt": "completion", "instruction": "output", "question": "answer"}  # besides messages
FILE_TYPES = {".jsonl": {"path": "text", "encoding": "latin-1"}, ".json": {"path": "json"}, ".parquet": {"path": "parquet"},
              ".csv": {"path": "csv", "keep_default_na": False, "converters": dict.fromkeys([*ROW_FORMATS, *ROW_FORMATS.values(), "input"], str)}}
REHEARSE = "without GPUs, rehearse: python scripts/rehearse.py --config_file YAML recipes/llama.py ..."
HUB_HELP = "Offline: python scripts/make_tiny_model.py runs/tiny, then --model_name_or_path runs/tiny/model --dataset_name runs/tiny/data/train.jsonl"
DEFAULT_CHAT_TEMPLATE = ("{{ bos_token or '' }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] }}{{ eos_token if message['role'] == 'assistant' }}"
    "{{ '\n' }}{% endfor %}{{ '<|assistant|>\n' if add_generation_prompt }}")  # for tokenizers that bring none


def stop(code, *problems):
    """Print the problems on rank 0 and end this process with `code`; the launcher then ends the other ranks."""
    if int(os.environ.get("RANK", 0)) > 0:
        time.sleep(10)  # rank 0 meets the same problem: let it speak first
    if fault_tolerance:
        fault_tolerance.set_status("failed", code, problems[0])  # ends with 75 where a stop was asked for
    print("\n".join(f"error: {problem}" for problem in problems), file=sys.stderr, flush=True)
    sys.exit(code)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    # Model
    parser.add_argument("--model_name_or_path", default="HuggingFaceTB/SmolLM2-135M", help="hub id or folder")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="of the weights; bfloat16 halves a frozen base")
    parser.add_argument("--attn_implementation", default="sdpa", help="eager, sdpa, flex_attention, flash_attention_2, _3, _4, or a hub kernel id")
    parser.add_argument("--gradient_checkpointing", action="store_true", help="recompute activations in the backward pass: much less memory, about a third more compute")
    # Adapters, and the quantized base under them (bitsandbytes)
    parser.add_argument("--load_in_8bit", action="store_true", help="LLM.int8")
    parser.add_argument("--load_in_4bit", action="store_true", help="QLoRA")
    parser.add_argument("--bnb_4bit_quant_type", default="nf4", choices=["nf4", "fp4"], help="4-bit number format")
    parser.add_argument("--bnb_4bit_use_double_quant", action="store_true", help="quantize the scales too: 0.37 bit a parameter less")
    parser.add_argument("--use_peft", action="store_true", help="train LoRA adapters on a frozen base")
    parser.add_argument("--lora_r", type=int, default=16, help="rank")
    parser.add_argument("--lora_alpha", type=float, default=32, help="scale: alpha / r, or alpha / sqrt(r) with --use_rslora")
    parser.add_argument("--lora_dropout", type=float, default=0.0, help="on the input of the adapters")
    parser.add_argument("--lora_target_modules", nargs="+", default=["all-linear"], help="names of the layers that get adapters")
    parser.add_argument("--use_rslora", action="store_true", help="rank-stabilised scale")
    parser.add_argument("--use_dora", action="store_true", help="weight-decomposed LoRA")
    # Data
    parser.add_argument("--dataset_name", default="HuggingFaceTB/smoltalk", help="hub id, folder, or .json, .jsonl, .csv, .parquet file")  # EDIT: yours (this one: Apache-2.0, 2,260 rows)
    parser.add_argument("--dataset_config", help="configuration of a hub data set [everyday-conversations of the default one]")
    parser.add_argument("--dataset_train_split", default="train", help="split to train on")
    parser.add_argument("--dataset_test_split", default="test", help="split to evaluate on, if there is one")
    parser.add_argument("--eval_dataset_name", help="evaluate on this file or data set instead")
    parser.add_argument("--max_length", type=int, default=1024, help="tokens a row; longer rows lose their end")
    parser.add_argument("--skip_bad_rows", action="store_true", help="leave out and count the rows that cannot be used")
    parser.add_argument("--train_sampling_strategy", default="random", choices=["random", "sequential"], help="order of the rows")
    parser.add_argument("--dataset_num_proc", type=int, help="processes that tokenise")
    parser.add_argument("--dataloader_num_workers", type=int, default=0, help="processes a rank that make batches")
    # Learning
    parser.add_argument("--per_device_train_batch_size", type=int, default=8, help="rows a rank and micro-batch")
    parser.add_argument("--per_device_eval_batch_size", type=int, default=8, help="rows a rank")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1, help="micro-batches an optimizer step")
    parser.add_argument("--num_train_epochs", type=float, default=3.0, help="passes over the data")
    parser.add_argument("--max_steps", type=int, default=-1, help="optimizer steps, instead of epochs, if positive")
    parser.add_argument("--optim", default="adamw_torch_fused", choices=["adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"], help="AdamW of torch, or of bitsandbytes")
    parser.add_argument("--learning_rate", type=float, default=2e-5, help="peak; adapters want about ten times more")
    parser.add_argument("--lr_scheduler_type", default="linear", choices=["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"], help="schedule after the warm-up")
    parser.add_argument("--warmup_steps", type=float, default=0, help="optimizer steps; below 1 a share of all steps")
    parser.add_argument("--weight_decay", type=float, default=0.0, help="not on biases and norms")
    parser.add_argument("--max_grad_norm", type=float, default=1.0, help="clip the global norm of the gradient; 0: do not")
    parser.add_argument("--seed", type=int, default=42, help="of adapters, dropout and the order of the rows")
    # Evaluation, logs, result
    parser.add_argument("--eval_strategy", default="epoch", choices=["no", "steps", "epoch"], help="when to evaluate")
    parser.add_argument("--eval_steps", type=int, default=500, help="optimizer steps between evaluations")
    parser.add_argument("--logging_steps", type=int, default=1, help="optimizer steps between lines of metrics.jsonl")
    parser.add_argument("--report_to", default="none", choices=["none", "all", "tensorboard", "wandb", "trackio", "comet_ml", "mlflow", "clearml", "dvclive", "swanlab", "aim"], help="tracker")
    parser.add_argument("--output_dir", default="runs/llama", help="folder of the result")
    parser.add_argument("--ddp_timeout", type=int, default=1800, help="seconds that ranks wait for each other; then each prints its stacks and ends")
    # Checkpoints
    parser.add_argument("--save_steps", type=int, default=500, help="optimizer steps between checkpoints; 0: only when the run is stopped")
    parser.add_argument("--save_total_limit", type=int, default=2, help="newest checkpoints kept")
    parser.add_argument("--resume_from_checkpoint", default="auto", help="auto (the newest that verifies), none (start anew) or a checkpoint's folder")
    parser.add_argument("--allow_change", nargs="+", default=[], type=lambda name: name.lstrip("-"), help="arguments that may differ from the checkpoint's although they change the run")
    parser.add_argument("--nonfinite", default="stop", choices=["stop", "skip"], help="at a step whose loss or gradient is not finite; it never changes the weights")
    parser.add_argument("--nonfinite_budget", type=int, default=10, help="steps that --nonfinite skip may leave out")
    parser.error = lambda message: stop(64, message, *(f"did you mean {flag}?" for flag in difflib.get_close_matches(message.split()[2].split("=")[0], parser._option_string_actions, 1)))
    args = parser.parse_args()
    args.dataset_config = args.dataset_config or {"HuggingFaceTB/smoltalk": "everyday-conversations"}.get(args.dataset_name)
    return args


def make_accelerator(args):
    """Return the Accelerator, which must exist before the model loads; stop with 64 if it cannot run what the launcher asks."""
    try:
        return Accelerator(
            gradient_accumulation_plugin=GradientAccumulationPlugin(args.gradient_accumulation_steps, sync_with_dataloader=False),
            dataloader_config=DataLoaderConfiguration(even_batches=False, non_blocking=True),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=max(args.ddp_timeout, 1) + 60))],  # the watch over the ranks speaks first
            log_with=None if args.report_to == "none" else args.report_to, project_dir=args.output_dir)
    except (RuntimeError, ValueError, ImportError) as error:
        stop(64, f"accelerate cannot run what the launcher was asked for: {str(error).splitlines()[0]}", REHEARSE)


def strategy_in_force(accelerator):
    """Return (name, FSDP version or 0, ZeRO stage or -1) of what accelerate really runs, whatever it was asked for."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"DeepSpeed ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}", 0, accelerator.state.deepspeed_plugin.zero_stage
    if accelerator.distributed_type != DistributedType.FSDP:
        return "one process" if accelerator.num_processes == 1 else "DDP", 0, -1
    plugin, hybrid = accelerator.state.fsdp_plugin, getattr(accelerator.parallelism_config, "dp_replicate_size", 1) > 1
    how = (("FULL_SHARD", "SHARD_GRAD_OP"), ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2"))[hybrid][not plugin.reshard_after_forward]
    return f"FSDP{plugin.fsdp_version} {plugin.sharding_strategy.name if plugin.fsdp_version == 1 else how}", plugin.fsdp_version, -1


def check_strategy(accelerator):
    """Return what the launcher was asked for and accelerate dropped without a word, as problems (huggingface/accelerate#2741)."""
    env, (name, fsdp, zero), runs = os.environ, strategy_in_force(accelerator), str(accelerator.num_processes)
    several = "ACCELERATE_USE_CPU" in env and (env.get("MASTER_ADDR"), env.get("MASTER_PORT")) == ("127.0.0.1", "29500")  # its only trace of a number above 1
    dropped = env.get("ACCELERATE_USE_FSDP") == "true" and not fsdp or zero >= 0 and accelerator.state.backend is None or env.get("WORLD_SIZE", "several" if several else "1") != runs
    key = {1: "fsdp_reshard_after_forward", 2: "fsdp_sharding_strategy"}.get(fsdp, "")  # the one of two that this version ignores; its default means FULL_SHARD
    asked = {"true": "FULL_SHARD", "1": "FULL_SHARD", "false": "SHARD_GRAD_OP"}.get(env.get(key.upper()), env.get(key.upper(), "FULL_SHARD").upper())
    problems = [f"the launcher was asked for more than accelerate runs here, which is {name} on {runs} x {accelerator.device.type}; {REHEARSE}"] * dropped
    problems += [f"{key} {asked} has no effect, accelerate runs {name}"] * (asked not in ("FULL_SHARD", name.split()[-1]))
    return [f"{problem}; what the YAML really does: python scripts/check_config.py YAML" for problem in problems]


def validate_args(args, accelerator):
    """Stop with 64 and all problems at once: in values, in pairs of them, and in what accelerate runs against what was asked."""
    zero_is_fine = "warmup_steps weight_decay max_grad_norm seed lora_dropout dataloader_num_workers save_steps nonfinite_budget".split()
    problems = [f"--{name} {value}: must be {'0 or more' if name in zero_is_fine else 'above 0'}" for name, value in vars(args).items()
                if type(value) in (int, float) and name != "max_steps" and not (0 < value < math.inf or value == 0 and name in zero_is_fine)]
    (name, fsdp, zero), of_deepspeed = strategy_in_force(accelerator), getattr(accelerator.state.deepspeed_plugin, "deepspeed_config", {})
    env, model, on_cpu = os.environ, Path(args.model_name_or_path), accelerator.device.type == "cpu"
    sharded, needs_peft = fsdp or zero >= 0, args.load_in_8bit or args.load_in_4bit or args.use_rslora or args.use_dora
    computes_in = {"bf16": "bfloat16", "fp16": "float16"}.get(accelerator.mixed_precision, args.dtype)
    rules = [
        (args.load_in_8bit and args.load_in_4bit, "--load_in_8bit and --load_in_4bit: choose one"),
        (needs_peft and not args.use_peft, "a quantized base cannot be trained itself, and --use_rslora and --use_dora are for adapters: add --use_peft"),
        (args.lora_dropout >= 1, f"--lora_dropout {args.lora_dropout}: must be below 1"),
        (args.dtype == "float16" and not args.use_peft, "float16 weights cannot be trained, for want of an fp32 master copy: use --dtype float32 with mixed_precision: fp16 in the YAML"),
        (model.exists() and not (model / "config.json").is_file(), f"--model_name_or_path {model}: no config.json in it"),
        (Path(args.output_dir).is_file(), f"--output_dir {args.output_dir}: is a file"),
        (args.resume_from_checkpoint not in ("auto", "none") and not Path(args.resume_from_checkpoint).is_dir(), f"--resume_from_checkpoint {args.resume_from_checkpoint}: neither auto nor none nor a folder"),
        (unknown := set(args.allow_change) - set(vars(args)) - {"data"}, f"--allow_change {' '.join(sorted(unknown))}: not the name of an argument"),
        (env.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE") == "cpu" and "DS_ACCELERATOR" not in env and not (shutil.which("ninja") and shutil.which("c++")), "DeepSpeed compiles its CPU optimizer at first use: put ninja (pip install ninja) and a C++ compiler (g++) on the PATH"),
        (args.load_in_8bit and fsdp, f"{name} cannot shard int8 weights: use --load_in_4bit, or int8 with ddp.yaml"),
        (args.load_in_4bit and sharded and args.dtype != computes_in, f"{name} would cast, and so destroy, 4-bit weights that are not stored in what it computes in: use --dtype {computes_in}"),
        (any(int(env.get(f"PARALLELISM_CONFIG_{kind}_SIZE", 1)) > 1 for kind in ["TP", "CP", "SP"] + ["DP_SHARD"] * (fsdp != 2)), f"{name} shards no mesh of this kind: set tp_size, cp_size and sp_size to 1, and dp_shard_size too without FSDP2"),
        (fsdp == 1 and not accelerator.state.fsdp_plugin.use_orig_params, "FSDP1 with fsdp_use_orig_params: false trains nothing, since the optimizer is made before its flat parameters: set it to true"),
        (zero == 3 and of_deepspeed["zero_optimization"].get("stage3_gather_16bit_weights_on_model_save") is not True, f"{name} could not save the weights in the end: set zero3_save_16bit_model: true in the YAML, or stage3_gather_16bit_weights_on_model_save in the DeepSpeed config"),
        (doubled := [key for key in "gradient_accumulation_steps gradient_clipping train_batch_size train_micro_batch_size_per_gpu optimizer scheduler".split() if of_deepspeed.get(key, "auto") != "auto"], f"the command line owns {', '.join(doubled)}: delete that from the YAML, or set it to auto in the DeepSpeed config"),
        (args.use_peft and name == "FSDP1 NO_SHARD", f"{name} loses frozen weights when adapters are saved: use ddp.yaml, which holds the same"),
        (args.load_in_4bit and fsdp == 1 and name.endswith(("SHARD_GRAD_OP", "ZERO2")), f"{name} cannot hold a 4-bit base: use fsdp2_shard_grad_op.yaml or fsdp1_full_shard.yaml"),
        (on_cpu and (args.attn_implementation.startswith("fl") or "/" in args.attn_implementation), f"--attn_implementation {args.attn_implementation} needs a GPU: use sdpa"),
        (on_cpu and args.optim.startswith("paged"), f"--optim {args.optim} pages between GPU and host: use adamw_8bit or adamw_torch_fused"),
        (args.optim.endswith("bit") and sharded, f"--optim {args.optim} cannot hold the shards of {name}: use adamw_torch_fused"),
    ]
    if problems := problems + check_strategy(accelerator) + [problem for broken, problem in rules if broken]:
        stop(64, *problems)
    of_deepspeed.update(gradient_clipping=args.max_grad_norm, train_micro_batch_size_per_gpu=args.per_device_train_batch_size)  # the loop's own calls do not reach its engine (huggingface/accelerate#1970)


def row_to_messages(row):
    """Return a row as a list of {"role", "content"}, or raise a ValueError that says why not. EDIT: your own columns."""
    messages, pair = row.get("messages"), next((pair for pair in ROW_FORMATS.items() if set(pair) <= set(row)), None)
    if not messages and pair:
        ask = "\n\n".join([row[pair[0]], row["input"]]) if pair[0] == "instruction" and row.get("input") else row[pair[0]]
        messages = ask + row[pair[1]] if isinstance(ask, list) else [{"role": "user", "content": ask}, {"role": "assistant", "content": row[pair[1]]}]
    if not isinstance(messages, list):
        raise ValueError(f"has the columns {', '.join(row)[:80] or 'none'}; needs messages | {' | '.join(map(', '.join, ROW_FORMATS.items()))}; messages is a list")
    if odd := [m for m in messages if not (isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str))]:
        raise ValueError(f"has a message without role or text: {str(odd[0])[:80]}")
    said = [message["role"] for message in messages if message["content"].strip()]
    if "user" not in said or "assistant" not in said[said.index("user"):] or messages[0]["role"] == "assistant":
        raise ValueError(f"has no answer to learn from, after a user's text; its texts are by {', '.join(said)[:80] or 'nobody'}")
    return messages


def tokenize_row(row, tokenizer, max_length):
    """Return input_ids, labels (-100 except on what the assistant says, its end of turn included) and whether the row was cut."""
    messages, spans = row_to_messages(row), []
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    for i in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
        before = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
        after = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False).rstrip()
        if text.startswith(before) and text.startswith(after) and len(after) > len(before):  # some templates rewrite answers before the last
            spans.append((len(before), len(after)))
    if spans and messages[-1]["role"] == "assistant" and not text.rstrip().endswith(tuple(tokenizer.get_added_vocab())):  # left open
        text, spans[-1] = text.rstrip() + tokenizer.eos_token, (spans[-1][0], math.inf)
    encoded = tokenizer(text.encode().decode(), add_special_tokens=False, return_offsets_mapping=True)  # encode: no lone surrogates
    learn = [any(first <= start < last for first, last in spans) for start, _ in encoded["offset_mapping"]]  # by place, since the pad token may end turns (huggingface/trl#976)
    labels = [token if learned else -100 for token, learned in zip(encoded["input_ids"], learn, strict=True)]
    if max(labels[1:max_length], default=-100) == -100:  # the first token is never predicted
        raise ValueError(f"has no answer within --max_length {max_length}: {labels.count(-100)} tokens are prompt")
    return {"input_ids": encoded["input_ids"][:max_length], "labels": labels[:max_length], "truncated": len(labels) > max_length}


def load_split(name, config, split, tokenizer, args):
    """Return the rows of a file, folder or hub id, as input_ids, labels and number (row), and their counts; stop with 65 or 69."""
    files = [Path(name)] if Path(name).suffix in FILE_TYPES else sorted(f for f in Path(name).glob(f"{split}*") if f.suffix in FILE_TYPES)
    unit = "line" if files and files[0].suffix == ".jsonl" else "row"
    def tokenize(row, max_length=args.max_length):  # not args: the cache knows a function by all that it refers to
        try:
            if unit == "line":  # read as bytes: columns may differ, and a bad line has its number
                line = row["text"].encode("latin-1").decode("utf-8-sig")
                if not isinstance(row := json.loads(line, object_pairs_hook=lambda pairs: dict(pairs) if len(dict(pairs)) == len(pairs) else pairs), dict):
                    raise ValueError("is not a JSON object with each key once")
            return {**tokenize_row(row, tokenizer, max_length), "problem": ""}
        except json.JSONDecodeError as error:
            problem = f"is not JSON: {error.msg} at column {error.colno}" if error.doc.strip() else "is blank"
        except Exception as error:  # a template raises what it likes
            problem = str(error) if type(error) is ValueError else f"cannot be used: {type(error).__name__}: {error}"
        return {"input_ids": [], "labels": [], "truncated": False, "problem": " ".join(problem.encode(errors="backslashreplace").decode().split())[:200]}
    try:
        if odd := [file.name for file in files if file.suffix != files[0].suffix or not file.stat().st_size]:
            stop(65, f"{name}: {', '.join(odd)[:200]}: empty, or of a second file type")
        rows = load_dataset(**FILE_TYPES[files[0].suffix], data_files=[*map(str, files)], split="train") if files else load_dataset(name, config).get(split)
        if not rows:
            return stop(65, f"{name}: no rows in split {split}") if split == args.dataset_train_split or args.eval_dataset_name else (None, "none")
        done = rows.map(tokenize, remove_columns=rows.column_names, num_proc=args.dataset_num_proc, desc=f"Tokenising {name}")
    except Exception as error:  # so do the readers of files
        stop(*((69, f"{name}: {error}", HUB_HELP) if isinstance(error, ConnectionError) else (65, f"{name}: {' '.join(str(error.__cause__ or error).split())[:300]}")))
    kept = done.add_column("row", np.arange(1, len(done) + 1)).select([i for i, problem in enumerate(done["problem"]) if not problem])
    bad = [f"{files[0] if len(files) == 1 else name}, {unit} {i}: {problem}" for i, problem in enumerate(done["problem"], 1) if problem and (problem != "is blank" or not kept)]
    if not kept or (bad and not args.skip_bad_rows):
        stop(65, *bad[:3], f"{name}: {len(bad)} of {len(rows)} {unit}s cannot be used: mend them, or leave them out with --skip_bad_rows")
    return kept.select_columns(["input_ids", "labels", "row"]), f"{len(kept)}, {sum(done['truncated'])} truncated to --max_length, {len(bad)} left out"


def load_data(args, tokenizer):
    """Return the training rows, the evaluation rows or None, and the counts of both. EDIT: filters, mixtures, sources."""
    train_rows, counts = load_split(args.dataset_name, args.dataset_config, args.dataset_train_split, tokenizer, args)
    name, config = (args.eval_dataset_name, None) if args.eval_dataset_name else (args.dataset_name, args.dataset_config)
    wanted = args.eval_strategy != "no" and (args.eval_dataset_name or not Path(name).exists() or any(Path(name).rglob(f"{args.dataset_test_split}*")))
    eval_rows, eval_counts = load_split(name, config, args.dataset_test_split, tokenizer, args) if wanted else (None, "none")
    return train_rows, eval_rows, {"train rows": counts, "eval rows": eval_counts}


def global_batches(num_rows, batch_size, window, num_epochs=1, seed=None):
    """Return the batches of a whole run, for all ranks and in order, as lists of row numbers: a function of seed and epoch.
    accelerate deals batch j to rank j % ranks. Empty batches fill each epoch up to whole windows (accumulation x ranks)."""
    batches = []
    for epoch in range(num_epochs):
        order = np.arange(num_rows) if seed is None else np.random.default_rng((seed, epoch)).permutation(num_rows)
        batches += [order[start : start + batch_size].tolist() for start in range(0, num_rows, batch_size)]
        batches += [[]] * (-len(batches) % window)
    return batches


def load_tokenizer(name):
    """Return the tokenizer, in any case with a chat template and a pad token; stop with 64 or 69 if there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="right", trust_remote_code=False)
    except (OSError, ValueError) as error:
        stop(64 if Path(name).exists() or name.startswith((".", "/")) else 69, f"{name}: no tokenizer: {str(error).splitlines()[0]}", HUB_HELP)
    tokenizer.chat_template = tokenizer.chat_template or DEFAULT_CHAT_TEMPLATE
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def load_model(args, accelerator):
    """Return the model, quantized and with adapters as asked for; stop with 64 if it cannot be loaded."""
    quantization = BitsAndBytesConfig(load_in_8bit=True) if args.load_in_8bit else None
    if args.load_in_4bit:  # the library's own defaults are fp4, float32 and uint8: always say all four
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=args.bnb_4bit_quant_type, bnb_4bit_compute_dtype=args.dtype, bnb_4bit_use_double_quant=args.bnb_4bit_use_double_quant, bnb_4bit_quant_storage=args.dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            args.model_name_or_path, dtype=args.dtype, attn_implementation=args.attn_implementation, quantization_config=quantization, trust_remote_code=False)
    except Exception as error:  # each reader of weights has its own; pickles are never run
        stop(64, f"{args.model_name_or_path}: {type(error).__name__}: {str(error)[:500]}")
    if args.gradient_checkpointing:  # called gradient_checkpointing_enable in older transformers
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.apply(lambda module: setattr(module, "support_avx512bf16_for_cpu", False))  # else a CPU repacks 4-bit weights at the first evaluation, and gradients stop there
    if args.use_peft:
        model = get_peft_model(model, LoraConfig(
            task_type="CAUSAL_LM", r=args.lora_r, lora_alpha=args.lora_alpha, lora_dropout=args.lora_dropout, target_modules="all-linear" if args.lora_target_modules == ["all-linear"] else args.lora_target_modules, use_rslora=args.use_rslora, use_dora=args.use_dora))
        if strategy_in_force(accelerator)[1] == 1:  # else FSDP1 keeps gradients for the frozen base (pytorch#104690)
            accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    return model


def make_optimizer(model, args):
    """Return AdamW over what is trained, without weight decay on biases and norms."""
    groups = [{"params": [], "weight_decay": args.weight_decay}, {"params": [], "weight_decay": 0.0}]
    for name, weight in model.named_parameters():
        groups["norm" in name or name.endswith("bias")]["params"] += [weight] * weight.requires_grad
    groups = [group for group in groups if group["params"]]  # DeepSpeed drops an empty one, and the schedule then fails
    if args.optim.startswith("adamw_torch"):
        return torch.optim.AdamW(groups, lr=args.learning_rate, fused=args.optim == "adamw_torch_fused")
    from bitsandbytes import optim  # AdamW8bit, PagedAdamW8bit, PagedAdamW32bit
    return getattr(optim, args.optim.replace("paged_", "Paged").replace("adamw_", "AdamW"))(groups, lr=args.learning_rate)


def summed_loss(model, batch):
    """Return the cross-entropy summed over a batch's supervised tokens, in nats and fp32; FSDP2 returns the model's own in bf16."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits[:, :-1].flatten(0, 1).float()
    return torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum")


@torch.no_grad()
def evaluate(accelerator, model, loader, step):
    """Return the loss, in nats a supervised token, and the perplexity, over exactly the evaluation rows; None: asked to stop."""
    model.eval()
    total = torch.zeros(2, device=accelerator.device)
    for batch in loader:
        total += torch.stack([summed_loss(model, batch), (batch["labels"][:, 1:] != -100).sum()])
        if fault_tolerance and fault_tolerance.stop_asked(accelerator):
            return None
    model.train()
    loss, num_tokens = accelerator.reduce(total).tolist()
    return {"step": step, "eval_loss": loss / num_tokens, "eval_perplexity": math.exp(min(loss / num_tokens, 700))}


def export_model(accelerator, model, tokenizer, output_dir):
    """Write the folder that `from_pretrained` (adapters: peft) loads. Every rank takes part, rank 0 writes."""
    weights = accelerator.get_state_dict(model)
    model = extract_model_from_parallel(model, recursive=True)  # peft finds no adapters inside of FSDP1's wrappers
    model.save_pretrained(output_dir, state_dict=weights, is_main_process=accelerator.is_main_process)
    if accelerator.is_main_process:
        tokenizer.save_pretrained(output_dir)


def report_start(accelerator, args, model, tokenizer, rows, counts, steps, facts):
    """Print what is really in force and one row with its supervised part in [[ ]]; write it all to run.json."""
    total, trained = np.sum([(size := getattr(weight, "ds_numel", weight.numel()), size * weight.requires_grad) for weight in model.parameters()], axis=0)
    batch, quantization = facts["rows_per_step"], "int8" if args.load_in_8bit else args.bnb_4bit_quant_type if args.load_in_4bit else "no"
    parts = groupby(zip(rows[0]["input_ids"], rows[0]["labels"], strict=True), lambda pair: pair[1] != -100)  # learnt or not
    summary = {
        "model": f"{args.model_name_or_path}, {total:,} parameters, {trained:,} trained ({trained / total:.2%})",
        "strategy": f"{strategy_in_force(accelerator)[0]}, {accelerator.num_processes} x {accelerator.device.type}",
        "precision": f"weights {args.dtype}, mixed precision {accelerator.mixed_precision}, quantization {quantization}",
        "attention": model.config._attn_implementation,
        "batch": f"{batch} rows, about {batch * sum(map(len, rows['input_ids'])) // len(rows):,} tokens; {steps} steps",
        "checkpoints": f"every {args.save_steps} steps" if fault_tolerance else "none: fault_tolerance.py is not beside this recipe",
        **counts,
        "sample": "".join("[[" * learnt + tokenizer.decode([token for token, _ in pairs]) + "]]" * learnt for learnt, pairs in parts)}
    if accelerator.is_main_process:
        print("\n".join(f"{name:>11}: {text}" for name, text in summary.items()), flush=True)
        run = {"summary": summary, "arguments": vars(args), **facts, "launch": {key: value for key, value in os.environ.items() if key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_")) and not any(word in key for word in ("TOKEN", "KEY", "SECRET", "PASS"))}}
        run["versions"] = {name: sys.modules[name].__version__ for name in "torch accelerate transformers datasets peft bitsandbytes deepspeed".split() if name in sys.modules}
        Path(args.output_dir, "run.json").write_text(json.dumps(run, indent=2))


def main():
    args = parse_args()
    if fault_tolerance:
        fault_tolerance.start_run(args)
    # ---- Accelerator and seed ----
    accumulation, output_dir = args.gradient_accumulation_steps, Path(args.output_dir)
    accelerator = make_accelerator(args)
    validate_args(args, accelerator)
    set_seed(args.seed)
    output_dir.mkdir(parents=True, exist_ok=True)
    checkpoint, progress = None, {"step": 0, "schedule_steps": 0, "num_input_tokens_seen": 0, "nonfinite_steps": 0, "evaluated": True}
    if fault_tolerance:
        fault_tolerance.watch_ranks(accelerator, args)
        checkpoint, progress = fault_tolerance.find_checkpoint(accelerator, args, progress)

    # ---- Tokenizer and data ----
    tokenizer = load_tokenizer(args.model_name_or_path)
    with accelerator.local_main_process_first():  # the others read its cache
        train_rows, eval_rows, counts = load_data(args, tokenizer)
    window = accumulation * accelerator.num_processes  # micro-batches of one optimizer step
    facts = {"rows_per_step": args.per_device_train_batch_size * window, "data": xxhash.xxh3_128_hexdigest(np.concatenate(train_rows.with_format("numpy")["input_ids"][:]))}
    if checkpoint:
        fault_tolerance.check_changes(accelerator, args, progress, facts)
    steps_per_epoch = math.ceil(len(train_rows) / facts["rows_per_step"])
    total_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch)
    batches = global_batches(len(train_rows), args.per_device_train_batch_size, window, math.ceil(total_steps / steps_per_epoch), args.seed if args.train_sampling_strategy == "random" else None)
    # Pad on the right. A rank without rows gets one unsupervised token: it still takes part in every collective call
    options = {"collate_fn": lambda rows: DataCollatorForSeq2Seq(tokenizer)(rows or [{"input_ids": [0], "labels": [-100], "row": 0}]), "num_workers": args.dataloader_num_workers, "worker_init_fn": lambda _: os.setsid()}  # a signal to the group is not for workers
    train_loader = DataLoader(train_rows, batch_sampler=batches[progress["step"] * window : total_steps * window], **options)
    eval_loader = eval_rows and accelerator.prepare(DataLoader(eval_rows, batch_sampler=global_batches(len(eval_rows), args.per_device_eval_batch_size, accelerator.num_processes), **options))

    # ---- Model ----
    model = load_model(args, accelerator)
    if (largest := max(tokenizer.pad_token_id, *map(max, train_rows["input_ids"]))) >= model.get_input_embeddings().num_embeddings:
        stop(64, f"the rows have a token {largest}, but the model has no embedding for it: resize its embeddings first")
    report_start(accelerator, args, model, tokenizer, train_rows, counts, total_steps, facts)

    # ---- Optimizer and schedule ----
    optimizer = make_optimizer(model, args)
    if fault_tolerance:
        fault_tolerance.check_gradients(accelerator, optimizer)
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, math.ceil(args.warmup_steps * total_steps) if args.warmup_steps < 1 else int(args.warmup_steps), total_steps)

    # ---- Prepare ----
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)  # not the schedule, which would step once per process (huggingface/accelerate#2926)
    accelerator.init_trackers("llama", {key: str(value) for key, value in vars(args).items()})

    # ---- Resume ----
    if checkpoint:
        fault_tolerance.resume(accelerator, model, optimizer, schedule, args, checkpoint, progress)

    # ---- Train ----
    eval_every = {"no": total_steps, "steps": args.eval_steps, "epoch": steps_per_epoch}[args.eval_strategy]
    metrics_file = open(output_dir / "metrics.jsonl" if accelerator.is_main_process else os.devnull, "a" if checkpoint else "w", buffering=1)
    bar = tqdm(desc="Training", total=total_steps, initial=progress["step"], unit="step", disable=not accelerator.is_main_process)
    model.train()
    step, num_tokens_seen = progress["step"], progress["num_input_tokens_seen"]
    loader, start, tokens_before = iter(train_loader), time.perf_counter(), num_tokens_seen
    while True:  # here `step` steps are done
        progress |= {"step": step, "evaluated": step == progress["step"] and progress["evaluated"], "schedule_steps": schedule.state_dict()["last_epoch"], "num_input_tokens_seen": int(num_tokens_seen), "arguments": vars(args) | facts, "strategy": strategy_in_force(accelerator)[0]}
        if eval_rows and not progress["evaluated"] and (step % eval_every == 0 or step == total_steps):
            if metrics := evaluate(accelerator, model, eval_loader, step):
                metrics_file.write(json.dumps(metrics) + "\n")
                accelerator.log(metrics, step=step)
                if accelerator.is_main_process:
                    bar.write("step {step}: loss {eval_loss:.4f}, perplexity {eval_perplexity:.2f} on held-out rows".format(**metrics))
            progress["evaluated"] = metrics is not None
        if fault_tolerance:
            fault_tolerance.keep(accelerator, model, optimizer, args, progress, bar)
        if step >= total_steps:
            break
        step += 1
        micro_batches, losses = [next(loader) for _ in range(accumulation)], []
        torch.manual_seed(int(np.random.SeedSequence((args.seed, step, accelerator.process_index)).generate_state(1)[0]))  # for dropout; no random state to save. After next, whose first call draws a number
        counted = [torch.stack([(b["labels"][:, 1:] != -100).sum(), b["attention_mask"].sum()]) for b in micro_batches]
        num_supervised, num_tokens = accelerator.reduce(sum(counted))  # of the whole window, over all ranks
        for batch in micro_batches:
            with accelerator.accumulate(model):
                loss = summed_loss(model, batch) / num_supervised
                losses.append(loss.detach())
                # Backends average over ranks, accelerate divides by the accumulation steps: undo both. 0 * loss is no 0
                # where the loss is not finite: then the gradient, which all ranks share, is not finite either
                accelerator.backward(loss * (window + 0 * losses[-1]))
                if accelerator.sync_gradients:
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
                    if grad_norm is not None and not math.isfinite(grad_norm):
                        optimizer.zero_grad()  # without gradients the optimizer changes nothing
                optimizer.step()
                optimizer.zero_grad()
        num_tokens_seen += num_tokens
        finite = not accelerator.optimizer_step_was_skipped and (grad_norm is None or math.isfinite(grad_norm))
        if not finite and fault_tolerance:
            fault_tolerance.handle_nonfinite(accelerator, model, optimizer, args, progress, micro_batches, losses)
        elif not finite and accelerator.mixed_precision != "fp16":
            stop(70, f"a loss or gradient of step {step} is not finite; no weight was changed, and none is saved without fault_tolerance.py")
        if step % args.logging_steps == 0 or step == total_steps:
            loss = accelerator.reduce(sum(losses)).item()
            metrics = {
                "step": step, "epoch": step / steps_per_epoch, "loss": loss if math.isfinite(loss) else None,
                "grad_norm": float(grad_norm) if finite and grad_norm is not None else None, "learning_rate": schedule.get_last_lr()[0],
                "num_input_tokens_seen": int(num_tokens_seen), "tokens_per_second": int(num_tokens_seen - tokens_before) / (time.perf_counter() - start),
                "peak_memory_gib": (torch.cuda.max_memory_allocated() or getrusage(RUSAGE_SELF).ru_maxrss * 1024) / 2**30}
            metrics_file.write(json.dumps(metrics) + "\n")
            accelerator.log({name: value for name, value in metrics.items() if value is not None}, step=step)
            bar.set_postfix(loss=f"{loss:.4f}")
        if finite:
            schedule.step()
        bar.update()

    # ---- Evaluate and save ----
    bar.close()
    export_model(accelerator, model, tokenizer, output_dir)
    if fault_tolerance:
        fault_tolerance.conclude(accelerator, "done", 0)
    accelerator.print(f'Trained in {time.perf_counter() - start:.0f} s; the model is in {output_dir}. To go on:\n  python scripts/generate.py {output_dir} --prompt "..."\n  python scripts/plot_loss.py {output_dir}')
    accelerator.end_training()


if __name__ == "__main__":
    main()
