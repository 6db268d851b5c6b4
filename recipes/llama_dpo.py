"""Preference tuning of any causal language model from chosen and rejected answers: DPO, IPO, hinge, ORPO; full, LoRA or QLoRA.

The YAML file owns the strategy, the command line everything about learning:

    accelerate launch --config_file accelerate_configs/fsdp.yaml recipes/llama_dpo.py --skip_bad_rows
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 recipes/llama_dpo.py --dataset_name pairs.jsonl --use_peft
    accelerate launch --config_file accelerate_configs/deepspeed_zero3.yaml recipes/llama_dpo.py --dataset_name pairs.jsonl --loss_type orpo

A good run prints a summary with one pair as the model sees it, an accuracy and a margin of rewards that rise, and the folder that
`from_pretrained` loads. The same command goes on from the newest checkpoint. Exit codes: 0 done, 64 usage, 65 data, 69 no hub, 70 not
finite, 73 cannot write, 75 stopped and saved. To make it yours: grep EDIT.
"""

import argparse
import gc
import json
import logging
import math
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from unittest import mock

COPY_ALL = 'copy all files that the section "Your own recipe" of README.md names, and install requirements.txt, or copy none'
try:  # beside this file: how a run is called and what becomes of it; workarounds for other libraries
    import run_status
    import upstream
except ModuleNotFoundError as error:
    run_status = upstream = None  # this file was copied alone
    beside = [
        path.name
        for path in Path(__file__).parent.glob("*.py")
        if path.stem
        in ("fault_tolerance", "head_loss", "model_weights", "preflight", "run_status", "upstream")
    ]
    if beside:
        print(
            f"error: {beside[0]} lies beside this recipe, and the module {error.name} is missing: {COPY_ALL}",
            file=sys.stderr,
        )
        sys.exit(64)


def stop(code, *problems):
    """Print the problems and end this process with `code`; the launcher then ends the other ranks."""
    if run_status:
        run_status.fail(code, *problems)
    print("\n".join(f"error: {problem}" for problem in problems), file=sys.stderr, flush=True)
    sys.exit(code)


def full_name_of_dtype(name):
    """Return torch's name of a dtype, of which accelerate knows three as bf16, fp16 and fp32."""
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, name)


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Model
    parser.add_argument(
        "--model_name_or_path",
        default="Qwen/Qwen2.5-0.5B-Instruct",
        help="hub id or folder; also the reference",
    )  # the default one: Apache-2.0
    parser.add_argument(
        "--dtype",
        type=full_name_of_dtype,
        default="float32",
        choices=["float32", "bfloat16", "float16"],
        help="of the weights; bfloat16 halves a frozen base",
    )
    parser.add_argument(
        "--no_master_weights",
        action="store_true",
        help="with --dtype bfloat16 and without --use_peft: train weights of which there is no fp32 copy, as single.yaml "
        "and ddp.yaml would have it; they take half the memory, and updates below 1/256 of a weight are lost",
    )
    parser.add_argument(
        "--attn_implementation",
        default="sdpa",
        help="eager, sdpa, flex_attention, varlen (torch's own FlashAttention), flash_attention_2, _3, _4, or a hub kernel id",
    )
    parser.add_argument(
        "--gradient_checkpointing",
        action="store_true",
        help="recompute activations in the backward pass: much less memory, about a third more compute",
    )
    parser.add_argument(
        "--torch_compile",
        action="store_true",
        help="compile each kind of layer once; a minute at the start (not with FlashAttention)",
    )
    parser.add_argument(
        "--use_liger_kernel",
        action="store_true",
        help="Liger's Triton kernels for norms, rotary positions and MLPs",
    )
    parser.add_argument("--tf32", action="store_true", help="multiply fp32 matrices in TF32")
    parser.add_argument(
        "--max_logits_mib",
        type=float,
        help="fp32 logits at a time; the loss of more is computed in pieces [a 64th of the GPU's whole memory, 256 on a CPU]",
    )
    # Adapters, and the quantized base under them (bitsandbytes)
    parser.add_argument("--load_in_8bit", action="store_true", help="LLM.int8")
    parser.add_argument("--load_in_4bit", action="store_true", help="QLoRA")
    parser.add_argument(
        "--bnb_4bit_quant_type", default="nf4", choices=["nf4", "fp4"], help="4-bit number format"
    )
    parser.add_argument(
        "--bnb_4bit_use_double_quant",
        action="store_true",
        help="quantize the scales too: 0.37 bit a parameter less",
    )
    parser.add_argument(
        "--use_peft", action="store_true", help="train LoRA adapters on a frozen base"
    )
    parser.add_argument("--lora_r", type=int, default=16, help="rank")
    parser.add_argument(
        "--lora_alpha",
        type=float,
        default=32,
        help="scale: alpha / r, or alpha / sqrt(r) with --use_rslora",
    )
    parser.add_argument(
        "--lora_dropout",
        type=float,
        default=0.0,
        help="on the input of the adapters; all other dropout is off",
    )
    parser.add_argument(
        "--lora_target_modules",
        nargs="+",
        default=["all-linear"],
        help="names of the layers that get adapters",
    )
    parser.add_argument("--use_rslora", action="store_true", help="rank-stabilised scale")
    parser.add_argument("--use_dora", action="store_true", help="weight-decomposed LoRA")
    # Data
    parser.add_argument(
        "--dataset_name",
        default="trl-lib/ultrafeedback_binarized",
        help="hub id, folder, or .json, .jsonl, .csv, .parquet file",
    )  # EDIT: yours (this one: about 62,100 rows, of UltraFeedback, MIT; long prompts want --skip_bad_rows)
    parser.add_argument("--dataset_config", help="configuration of a hub data set")
    parser.add_argument("--dataset_train_split", default="train", help="split to train on")
    parser.add_argument(
        "--dataset_test_split", default="test", help="split to evaluate on, if there is one"
    )
    parser.add_argument("--eval_dataset_name", help="evaluate on this file or data set instead")
    parser.add_argument(
        "--max_length",
        type=int,
        default=1024,
        help="tokens of a prompt with an answer; longer ones lose their end",
    )
    parser.add_argument(
        "--skip_bad_rows",
        action="store_true",
        help="leave out and count the rows that cannot be used",
    )
    parser.add_argument(
        "--train_sampling_strategy",
        default="random",
        choices=["random", "sequential", "group_by_length"],
        help="order of the rows; group_by_length pads less",
    )
    parser.add_argument("--dataset_num_proc", type=int, help="processes that tokenise")
    parser.add_argument(
        "--dataloader_num_workers", type=int, default=0, help="processes a rank that make batches"
    )
    # Learning
    parser.add_argument(
        "--loss_type",
        default="sigmoid",
        choices=["sigmoid", "sigmoid_norm", "ipo", "hinge", "orpo"],
        help="sigmoid: DPO; sigmoid_norm: the same by token; orpo: without reference, and likely chosen answers too",
    )
    parser.add_argument(
        "--beta",
        type=float,
        default=0.1,
        help="how near the reference the model stays; tau of ipo, lambda of orpo",
    )
    parser.add_argument(
        "--precompute_ref_log_probs",
        action="store_true",
        help="run the reference once before training, not in each step; always so without adapters",
    )
    parser.add_argument(
        "--per_device_train_batch_size", type=int, default=8, help="pairs a rank and micro-batch"
    )
    parser.add_argument("--per_device_eval_batch_size", type=int, default=8, help="pairs a rank")
    parser.add_argument(
        "--gradient_accumulation_steps", type=int, default=1, help="micro-batches an optimizer step"
    )
    parser.add_argument("--num_train_epochs", type=float, default=3.0, help="passes over the data")
    parser.add_argument(
        "--max_steps", type=int, default=-1, help="optimizer steps, instead of epochs, if positive"
    )
    parser.add_argument(
        "--optim",
        default="adamw_torch_fused",
        choices=[
            "adamw_torch_fused",
            "adamw_torch",
            "adamw_8bit",
            "paged_adamw_8bit",
            "paged_adamw_32bit",
        ],
        help="AdamW of torch, or of bitsandbytes",
    )
    parser.add_argument(
        "--learning_rate", type=float, default=1e-6, help="peak; adapters want about ten times more"
    )
    parser.add_argument(
        "--lr_scheduler_type",
        default="linear",
        choices=["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"],
        help="schedule after the warm-up",
    )
    parser.add_argument(
        "--warmup_steps",
        type=float,
        default=0,
        help="optimizer steps; below 1 a share of all steps",
    )
    parser.add_argument("--weight_decay", type=float, default=0.0, help="not on biases and norms")
    parser.add_argument(
        "--max_grad_norm",
        type=float,
        default=1.0,
        help="clip the global norm of the gradient; 0: do not",
    )
    parser.add_argument(
        "--seed", type=int, default=42, help="of adapters, dropout and the order of the rows"
    )
    # Evaluation, logs, result
    parser.add_argument(
        "--eval_strategy",
        default="epoch",
        choices=["no", "steps", "epoch"],
        help="when to evaluate",
    )
    parser.add_argument(
        "--eval_steps", type=int, default=500, help="optimizer steps between evaluations"
    )
    parser.add_argument(
        "--logging_steps",
        type=int,
        default=1,
        help="optimizer steps between lines of metrics.jsonl; in between nothing waits for the device",
    )
    parser.add_argument(
        "--report_to",
        default="none",
        choices=[
            "none",
            "all",
            "tensorboard",
            "wandb",
            "trackio",
            "comet_ml",
            "mlflow",
            "clearml",
            "dvclive",
            "swanlab",
            "aim",
        ],
        help="tracker",
    )
    parser.add_argument("--output_dir", default="runs/llama_dpo", help="folder of the result")
    parser.add_argument(
        "--ddp_timeout",
        type=int,
        default=1800,
        help=(
            "seconds that ranks wait for each other, also while one prepares the rows or writes a"
            " checkpoint; then each prints its stacks and ends. If preparing the rows takes longer, first"
            " run the same command with --num_processes 1 and --dry_run, which fills the cache"
        ),
    )
    if run_status:
        run_status.add_arguments(parser)
    parser.error = lambda message: stop(
        64, message, *(run_status.meant(message, parser) if run_status else [])
    )
    args = parser.parse_args()
    if args.attn_implementation == "varlen" and not run_status:
        stop(
            64,
            "--attn_implementation varlen needs preflight.py, varlen.py and what they import beside this file",
        )
    return args


if __name__ == "__main__":
    parse_args()  # a wrong flag is told at once: the imports that follow take seconds
    gc.disable()  # a fifth of them is spent looking for garbage, of which imports make none
if upstream:
    upstream.start_faster()

import numpy as np
import torch
import xxhash
from accelerate import (
    Accelerator,
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
)
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, set_seed
from accelerate.utils.dataclasses import TorchDynamoPlugin
from accelerate.utils.other import extract_model_from_parallel
from datasets import concatenate_datasets, load_dataset
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import fsdp_auto_wrap_policy
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, get_scheduler
from transformers.integrations.liger import apply_liger_kernel

try:  # what keeps a run from being lost; what is refused and told at its start; reading of rows, bad ones named
    import fault_tolerance
    import head_loss
    import model_weights
    import preflight
    import rows
except ModuleNotFoundError as error:
    fault_tolerance = head_loss = model_weights = preflight = rows = None  # it trains without them
    if run_status:
        stop(
            64,
            f"run_status.py lies beside this recipe, and the module {error.name} is missing: {COPY_ALL}",
        )

BAD_PAIR = {
    "prompt_ids": [],
    "chosen_ids": [],
    "rejected_ids": [],
    "truncated": False,
    "length": 0,
    "largest": 0,
    "hash": 0,
}
METRICS = "rewards/chosen rewards/rejected rewards/margins rewards/accuracies logps/chosen logps/rejected".split()  # as in TRL
LOGITS_SHARE = (
    1 / 64
)  # of a GPU's memory, for fp32 logits at a time: 1.25 GiB of 80; the loss takes about three times that for a moment
SUPERVISED = {}  # positions and targets of the batch at hand: the way to the output head that leads past the model's forward
DEFAULT_CHAT_TEMPLATE = (
    "{{ bos_token or '' }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}"  # for tokenizers that bring none
    "{{ eos_token if m.role == 'assistant' }}{{ '\n' }}{% endfor %}{{ '<|assistant|>\n' if add_generation_prompt }}"
)


def make_accelerator(args):
    """Return the Accelerator, which must exist before the model loads; stop with 64 if it cannot run what launcher and arguments ask."""
    try:
        accelerator = Accelerator(
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                args.gradient_accumulation_steps, sync_with_dataloader=False
            ),
            dataloader_config=DataLoaderConfiguration(even_batches=False, non_blocking=True),
            dynamo_plugin=TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
            if args.torch_compile
            else None,
            kwargs_handlers=[
                DistributedDataParallelKwargs(
                    gradient_as_bucket_view=True
                ),  # else DDP holds gradients twice
                InitProcessGroupKwargs(timeout=timedelta(seconds=max(args.ddp_timeout, 1) + 60)),
            ],  # the watch over the ranks speaks first
            log_with=None if args.report_to == "none" else args.report_to,
            project_dir=args.output_dir,
        )
    except (RuntimeError, ValueError, ImportError) as error:
        stop(
            64,
            f"accelerate cannot run what the launcher was asked for: {str(error).splitlines()[0]}",
            *([preflight.REHEARSE] if preflight else []),
        )
    if preflight and (problems := preflight.find_problems(args, accelerator)):
        stop(64, *problems)
    fsdp = (
        accelerator.state.fsdp_plugin
        if accelerator.distributed_type == DistributedType.FSDP
        else None
    )
    if fsdp and (
        accelerator.is_fsdp2 or fsdp.sharding_strategy.name != "NO_SHARD"
    ):  # no_sync would hold whole gradients (huggingface/accelerate#2531)
        accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
    reduce_in_fp32(accelerator)
    if (
        zero := accelerator.state.deepspeed_plugin
    ):  # the loop's own calls do not reach its engine (huggingface/accelerate#1970)
        zero.deepspeed_config.update(
            gradient_clipping=args.max_grad_norm,
            train_micro_batch_size_per_gpu=args.per_device_train_batch_size,
        )
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = args.tf32  # torch allows it for convolutions by default
    return accelerator


def reduce_in_fp32(accelerator):
    """Under mixed precision, keep in fp32 what upstream would round: reduced gradients, FSDP1's buffers, FSDP2's outputs.

    accelerate and DeepSpeed reduce gradients between ranks in the type that is computed in, and ZeRO adds micro-batches
    in it too. Each addition then keeps 8 bits in bf16. In fp32 a reduction takes twice the traffic, and ZeRO-2 and 3
    keep 2 more bytes per gradient element. DeepSpeed refuses to add in fp32 under ZeRO-0, turns ZeRO-1 into another
    optimizer (engine.py, _do_optimizer_sanity_check) and keeps a second copy on the GPU under ZeRO-2 with offload
    (stage_1_and_2.py, _use_compact_grad_partition_buffer): these add micro-batches in the type that is computed in."""
    fsdp = (
        accelerator.state.fsdp_plugin
        if accelerator.distributed_type == DistributedType.FSDP
        else None
    )
    if fsdp and fsdp.mixed_precision_policy and accelerator.is_fsdp2:
        # Without output_dtype=None the loss, which is a sum, would be rounded
        policy = replace(fsdp.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None)
        fsdp.mixed_precision_policy = policy
    elif fsdp and fsdp.mixed_precision_policy:
        # Without buffer_dtype=None the frequencies of rotary positions would be rounded: 0.4 % in bf16
        policy = replace(fsdp.mixed_precision_policy, reduce_dtype=torch.float32, buffer_dtype=None)
        fsdp.mixed_precision_policy = policy
    zero = accelerator.state.deepspeed_plugin
    if zero:
        zero.deepspeed_config.setdefault("communication_data_type", "fp32")
        offload = zero.deepspeed_config.get("zero_optimization", {}).get("offload_optimizer") or {}
        offloads = offload.get("device", "none") != "none"
        if zero.zero_stage == 3 or (zero.zero_stage == 2 and not offloads):
            zero.deepspeed_config.setdefault("data_types", {"grad_accum_dtype": "fp32"})


def shared_length(*sequences):
    """Return how many items the sequences have in common at their beginning."""
    return next(
        (
            i
            for i, items in enumerate(zip(*sequences, strict=False))
            if any(item != items[0] for item in items)
        ),
        min(map(len, sequences)),
    )


def row_to_pair(row):
    """Return a row's prompt, chosen and rejected answer, all texts or all lists of {"role", "content"}; with rows.py a ValueError says why
    it has none. Without a prompt of their kind both answers begin with it, and it ends where they part. EDIT: your own columns."""
    prompt, chosen, rejected = (
        rows.checked_pair(row)
        if rows
        else (row.get(name) for name in ("prompt", "chosen", "rejected"))
    )
    if not rows:
        messages = [
            message
            for part in (prompt, chosen, rejected)
            if isinstance(part, list)
            for message in part
        ]
        others = [
            key
            for message in messages
            for key in message
            if key not in ("role", "content") and message[key]
        ]
        others += [column for column in ("tools", "functions") if row.get(column)]
        if others:  # the chat template may drop them: rows.py finds that out
            raise ValueError(
                f"a row has {', '.join(others)}: remove them, or copy all files beside this recipe that README.md names"
            )
    if type(prompt) is not type(chosen):
        end = min(
            shared_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1
        )  # each keeps an answer
        end -= chosen[end - 1 : end] == " "  # tokens mostly begin with a space
        prompt, chosen, rejected = chosen[:end], chosen[end:], rejected[end:]
    return prompt, chosen, rejected


def tokenize_answers(row, tokenizer, max_length):
    """Return prompt_ids, chosen_ids and rejected_ids as TRL's DPOTrainer makes them, whether one was cut, tokens of the longer one with
    its prompt, largest and hash of all tokens. A ValueError says why a row cannot be used."""
    prompt, chosen, rejected = row_to_pair(row)
    if isinstance(prompt, str):
        end = tokenizer.eos_token
        whole = [
            tokenizer(text)["input_ids"]
            for text in (
                prompt,
                *(prompt + answer.removesuffix(end) + end for answer in (chosen, rejected)),
            )
        ]
    else:
        if rows:
            for answer in (chosen, rejected):
                rows.check_keys(row, prompt + answer, tokenizer)
        ids_of = partial(tokenizer.apply_chat_template, return_dict=False)
        whole = [
            ids_of(prompt, add_generation_prompt=True),
            ids_of(prompt + chosen),
            ids_of(prompt + rejected),
        ]
    start, longest = (
        shared_length(*whole),
        max(map(len, whole)),
    )  # tokens of prompt and answer may merge, and templates rewrite a prompt's end
    prompt, chosen, rejected = (
        whole[0][:start],
        whole[1][start:max_length],
        whole[2][start:max_length],
    )
    if not (prompt and chosen and rejected) or chosen == rejected:
        raise ValueError(
            f"has no prompt, or no two different answers to it within --max_length {max_length}: {start} tokens are prompt"
        )
    return {
        "prompt_ids": prompt,
        "chosen_ids": chosen,
        "rejected_ids": rejected,
        "length": min(longest, max_length),
        "truncated": longest > max_length,
        "largest": max(map(max, whole)),
        "hash": xxhash.xxh3_64_intdigest(np.array([*prompt, -1, *chosen, -1, *rejected])) >> 1,
    }


def load_data(args, tokenizer):
    """Return the training pairs, the evaluation pairs or None, and what to tell of both. EDIT: filters, mixtures, sources."""
    tokenize = partial(tokenize_answers, tokenizer=tokenizer, max_length=args.max_length)

    def load(name, config, split, required):
        if rows:
            return rows.read_split(name, config, split, tokenize, args, required, BAD_PAIR)
        file_type = Path(name).suffix.removeprefix(".").replace("jsonl", "json")
        found = (
            load_dataset(file_type, data_files=name, split="train")
            if Path(name).is_file()
            else load_dataset(name, config).get(split)
        )
        done = found and found.map(
            tokenize, remove_columns=found.column_names, num_proc=args.dataset_num_proc
        )
        return done and done.add_column("row", np.arange(1, len(done) + 1)).with_format(
            "numpy"
        ), str(len(done or []))

    train_rows, counts = load(
        args.dataset_name, args.dataset_config, args.dataset_train_split, True
    )
    name, config = (
        (args.eval_dataset_name, None)
        if args.eval_dataset_name
        else (args.dataset_name, args.dataset_config)
    )
    wanted = args.eval_strategy != "no" and (
        args.eval_dataset_name
        or not Path(name).exists()
        or any(Path(name).rglob(f"{args.dataset_test_split}*"))
    )
    eval_rows, eval_counts = (
        load(name, config, args.dataset_test_split, args.eval_dataset_name)
        if wanted
        else (None, "none")
    )
    sample = "{}[[{}]] rather than [[{}]]".format(
        *(
            tokenizer.decode(train_rows[0][f"{part}_ids"])
            for part in ("prompt", "chosen", "rejected")
        )
    )
    return train_rows, eval_rows, {"train rows": counts, "eval rows": eval_counts, "sample": sample}


def global_batches(num_lines, batch_size, window, num_epochs=1, seed=None, lengths=None):
    """Return the batches of a whole run as lists of line numbers, a function of seed and epoch; accelerate deals batch j to rank
    j % ranks. Empty ones fill an epoch up to whole windows (accumulation x ranks). With lengths each 50 windows are sorted."""
    batches = []
    for epoch in range(num_epochs):
        order = (
            np.arange(num_lines)
            if seed is None
            else np.random.default_rng((seed, epoch)).permutation(num_lines)
        )
        if lengths is not None:
            parts = np.split(
                order, range(50 * batch_size * window, num_lines, 50 * batch_size * window)
            )
            order = np.concatenate(
                [part[np.argsort(-lengths[part], kind="stable")] for part in parts]
            )
        batches += [
            order[start : start + batch_size].tolist() for start in range(0, num_lines, batch_size)
        ]
        batches += [[]] * (-len(batches) % window)
    return batches


def wants_one_line(args):
    """Return whether the rows of a batch are to lie in one line without padding: FlashAttention is told where each ends, or it would
    read that from the device in every layer."""
    return "flash" in args.attn_implementation or args.attn_implementation == "varlen"


def ends_of_rows(lengths):
    """Return what attention has to know of rows of these lengths that lie in one line, as arguments of the model: made here, so that no
    layer has to read it from the device."""
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    longest = int(max(lengths))
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def collate_answers(numbers, source, pad_token_id, learn_prompts, varlen=False):
    """Return the pairs of `source` with these numbers, n of them, as a batch of 2 n lines: first the chosen, then the rejected ones.
    inputs: input_ids, [lines, tokens], padded on the right, where no token looks; with varlen all in one line without padding, for FlashAttention
    pairs: the numbers. row: those in the file, from 1, on the host
    positions: in the flattened batch, whose next token is learnt, and that token, targets, [m]; with learn_prompts all of chosen lines
    cells: where that token would be in the padded lines, flattened, and longest: tokens of the longest of these, on the host
    starts: tokens of each line's prompt. lengths: of the answers, [2, n]. counts: n, tokens learnt of chosen lines, tokens without padding"""
    found = source.__getitems__(numbers) if numbers else []  # a rank without rows still takes part
    lines = [
        (row["prompt_ids"], row[answer])
        for answer in ("chosen_ids", "rejected_ids")
        for row in found
    ] or [([pad_token_id], [])]
    starts, lengths = torch.tensor([(len(prompt), len(answer)) for prompt, answer in lines]).T
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(prompt + answer) for prompt, answer in lines],
        batch_first=True,
        padding_value=pad_token_id,
    )
    first = torch.tensor(
        [1 if learn_prompts and i < len(found) else start for i, start in enumerate(starts)]
    )  # nothing comes before token 0
    places = torch.arange(ids.shape[1])
    filled = places < (starts + lengths)[:, None]
    learnt = (places >= first[:, None]) & filled
    cells = learnt.flatten().nonzero()[:, 0]
    targets, longest, after, inputs = ids.flatten()[cells], ids.shape[1], cells, {"input_ids": ids}
    if varlen:
        after = filled.flatten().cumsum(0)[cells] - 1  # as many tokens are before it
        inputs = {
            "input_ids": ids[filled][None],
            "position_ids": places.expand_as(ids)[filled][None],
        } | ends_of_rows((starts + lengths).tolist())
    return {
        "inputs": inputs,
        "positions": after - 1,
        "targets": targets,
        "cells": cells,
        "longest": longest,
        "starts": starts,
        "lengths": lengths[: 2 * len(found)].view(2, -1),
        "pairs": torch.tensor(numbers, dtype=torch.long),
        "row": [int(row["row"]) for row in found],
        "counts": torch.tensor(
            [len(found), learnt[: len(found)].sum(), (starts + lengths).sum() if found else 0]
        ),
    }


def load_tokenizer(name):
    """Return the tokenizer, in any case with a chat template and a pad token; preflight stops with 64 or 69 if there is none."""
    with preflight.loading("tokenizer", name) if preflight else nullcontext():
        tokenizer = AutoTokenizer.from_pretrained(
            name, padding_side="right", trust_remote_code=False
        )
    tokenizer.chat_template = tokenizer.chat_template or DEFAULT_CHAT_TEMPLATE
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def compute_dtype(args, accelerator):
    """Return the name of the dtype of matrix products: mixed precision's, or else the weights' own."""
    return {"bf16": "bfloat16", "fp16": "float16"}.get(accelerator.mixed_precision, args.dtype)


def cast_for_zero3(model, accelerator):
    """Under ZeRO-3 in bf16 or fp16, cast what peft has made to the dtype that is computed in.

    DeepSpeed casts the whole model in its other stages, and makes fp32 master weights of what is
    trained. With ZeRO-3 it leaves out models that were loaded into it, so that adapters and copied
    heads would stay in fp32: inputs of adapters are then cast twice, and a copied head fails.
    """
    zero = accelerator.state.deepspeed_plugin
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    if not zero or zero.zero_stage != 3 or dtype is None:
        return
    for weight in model.parameters():
        if weight.requires_grad and not hasattr(weight, "ds_id"):
            weight.data = weight.data.to(dtype)


def leave_casts_to_autocast(model, args, accelerator):
    """Stop peft from casting the inputs of adapters where autocast casts them anyway.

    peft casts the input of each adapter to the dtype of its weights, fp32, and autocast casts that
    copy back to bf16 or fp16. Both copies are needless, and the second is kept for the backward
    pass: query, key and value share one input, but each keeps a copy of its own. Loss and gradients
    are bit for bit the same without these copies; with --lora_dropout they agree to a rounding,
    since dropout then computes in the dtype of the input.

    The cast stays in two cases. FSDP2 and DeepSpeed do not autocast but cast the weights, adapters
    included: there it does nothing where the types agree, and is needed where they do not. DoRA
    takes the norms of whole weights in the dtype of this input, so that its results would change.
    """
    autocasts = accelerator.native_amp and not accelerator.is_fsdp2
    if not autocasts or args.use_dora:
        return
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):  # peft's layers; those of experts ignore it
            module.cast_input_dtype_enabled = False


def load_model(args, accelerator):
    """Return the model, quantized and with adapters as asked for; preflight stops with 64 if it cannot be loaded."""
    quantization = BitsAndBytesConfig(load_in_8bit=True) if args.load_in_8bit else None
    if (
        args.load_in_4bit
    ):  # the library's own defaults are fp4, float32 and uint8: always say all four
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=args.bnb_4bit_quant_type,
            bnb_4bit_quant_storage=args.dtype,
            bnb_4bit_compute_dtype=compute_dtype(args, accelerator),
            bnb_4bit_use_double_quant=args.bnb_4bit_use_double_quant,
        )
    read = AutoModelForCausalLM.from_pretrained
    if model_weights:
        read = partial(model_weights.load_pretrained, AutoModelForCausalLM, accelerator)
    with preflight.loading("model", args.model_name_or_path, args) if preflight else nullcontext():
        model = read(
            args.model_name_or_path,
            dtype=args.dtype,
            attn_implementation=args.attn_implementation,
            quantization_config=quantization,
            trust_remote_code=False,
        )
    if args.gradient_checkpointing:  # called gradient_checkpointing_enable in older transformers
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(
            {"use_reentrant": False}
        )
    if args.load_in_8bit:  # in bf16 bitsandbytes warns in each layer and pass that it uses float16
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    model.apply(
        lambda module: setattr(module, "support_avx512bf16_for_cpu", False)
    )  # else a CPU repacks 4-bit weights, and gradients stop there
    if args.use_liger_kernel:  # not its loss, which is that of loss_in_head
        apply_liger_kernel(model, {"fused_linear_cross_entropy": False, "cross_entropy": False})
    if args.use_peft:
        if preflight:
            preflight.check_adapters(model, args.lora_target_modules)
        model = get_peft_model(
            model,
            LoraConfig(
                task_type="CAUSAL_LM",
                r=args.lora_r,
                lora_alpha=args.lora_alpha,
                lora_dropout=args.lora_dropout,
                use_rslora=args.use_rslora,
                use_dora=args.use_dora,
                target_modules="all-linear"
                if args.lora_target_modules == ["all-linear"]
                else args.lora_target_modules,
            ),
        )
        leave_casts_to_autocast(model, args, accelerator)
        cast_for_zero3(model, accelerator)
        if (
            accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2
        ):  # else FSDP1 keeps gradients for the frozen base (pytorch#104690)
            accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    return model


def keep_embeddings_in_32_bits(model):
    """Have bitsandbytes' 8-bit optimizers keep 32-bit state for embeddings, as it advises and transformers' Trainer
    does: the gradients of rare tokens are too uneven for 8 bits. To be called before the optimizer is made."""
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    manager.initialize()  # it is one for the process, and knows weights by their place in an optimizer's groups
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


def make_optimizer(model, args):
    """Return AdamW over what is trained, without weight decay on biases and norms."""
    groups = [
        {"params": [], "weight_decay": args.weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            spared = "norm" in name.lower() or ".ln_" in name or name.endswith("bias")
            groups[int(spared)]["params"].append(weight)
    # DeepSpeed drops an empty one, and the schedule then fails
    groups = [group for group in groups if group["params"]]
    if args.optim.startswith("adamw_torch"):
        return torch.optim.AdamW(
            groups, lr=args.learning_rate, fused=args.optim == "adamw_torch_fused"
        )
    from bitsandbytes import optim  # AdamW8bit, PagedAdamW8bit, PagedAdamW32bit

    if args.optim.endswith("8bit"):
        keep_embeddings_in_32_bits(model)
    return getattr(optim, args.optim.replace("paged_", "Paged").replace("adamw_", "AdamW"))(
        groups, lr=args.learning_rate
    )


def logits_mib(args, device):
    """Return how many MiB of fp32 logits are computed at a time: --max_logits_mib, or a share of the GPU's memory, or 256 on a CPU.

    The share is of the whole memory, not of what is free, so that a run that resumes and scripts/plan_memory.py find the same."""
    if args.max_logits_mib is not None:
        return args.max_logits_mib
    if device.type != "cuda":
        return 256
    return LOGITS_SHARE * torch.cuda.get_device_properties(device).total_memory / 2**20


def loss_in_head(model, max_logits_mib):
    """Make the model's output head return the cross-entropy of each token that SUPERVISED names, in nats and fp32, [tokens], and never more
    logits than max_logits_mib. Return how, as text. Inside the head every strategy has its weight whole, and gathers it once.

    A model that changes its logits after its head (Gemma 2, Granite, Cohere) gets those of these tokens instead, [tokens, vocabulary]."""
    inner, head, vocab = (
        getattr(model, "get_base_model", lambda: model)(),
        model.get_output_embeddings(),
        model.get_input_embeddings().num_embeddings,
    )
    piece, logits_of, own = (
        max(int(max_logits_mib * 2**20 / (4 * vocab)), 1),
        head.forward,
        torch.zeros(1, 1, 1),
    )
    with (
        mock.patch.object(
            inner.base_model, "forward", lambda *_, **__: mock.MagicMock(last_hidden_state=own)
        ),
        mock.patch.object(head, "forward", lambda _: own),
    ):
        comes_last = (
            inner(input_ids=torch.zeros(1, 1, dtype=torch.long)).logits is own
        )  # Gemma 2, Granite and Cohere cap or scale logits
    plain = type(head) is torch.nn.Linear  # else it has adapters, or is quantized

    def losses_of(hidden, targets):
        return cross_entropy(logits_of(hidden).float(), targets, reduction="none")

    @torch.compiler.disable
    def forward(hidden):
        hidden, targets = hidden.flatten(0, 1)[SUPERVISED["positions"]], SUPERVISED["targets"]
        if not comes_last:
            return logits_of(hidden)
        if len(targets) <= piece:
            return losses_of(hidden, targets)
        if (
            head_loss and plain
        ):  # what FSDP makes of the weight during the forward pass, so it is read here
            return head_loss.LossInPieces.apply(hidden, head.weight, head.bias, targets, piece)
        parts = zip(hidden.split(piece), targets.split(piece), strict=True)
        return torch.cat([recompute(losses_of, *part, use_reentrant=False) for part in parts])

    head.forward = forward
    return f"logits of learnt tokens alone, {f'{piece:,} at a time' if comes_last else 'which the model changes after its head'}"


def losses_in_output(logits):
    """Return the cross-entropy of each token that SUPERVISED names, [tokens], from what a model with loss_in_head has put out."""
    return (
        logits
        if logits.dim() == 1
        else cross_entropy(logits.float(), SUPERVISED["targets"], reduction="none")
    )


def answer_logps(model, batch):
    """Return log-probabilities of a batch's answers in nats and fp32, [2, pairs], chosen ones first, and the sum of those of prompts, if learnt."""
    SUPERVISED.update(positions=batch["positions"], targets=batch["targets"])
    logps = -losses_in_output(model(**batch["inputs"], use_cache=False).logits)
    shape = len(batch["starts"]), batch["longest"]
    by_token = (
        torch.zeros(math.prod(shape), device=logps.device)
        .index_put((batch["cells"],), logps)
        .view(shape)
    )
    of_answer = torch.arange(shape[1], device=logps.device) >= batch["starts"][:, None]
    return (by_token * of_answer).sum(1)[: batch["lengths"].numel()].view_as(batch["lengths"]), (
        by_token * ~of_answer
    ).sum()


def preference_losses(scores, lengths, loss_type, beta):
    """Return the loss of each pair, as TRL's DPOTrainer and ORPOTrainer. scores: log-probabilities of chosen and rejected answers, less those of
    the reference, [2, pairs]; of orpo, which has none, means by token. lengths: tokens of the answers."""
    if loss_type == "orpo":  # arXiv 2403.07691: odds are p / (1 - p)
        odds = scores - torch.log(-torch.expm1(scores))
        return -beta * torch.nn.functional.logsigmoid(odds[0] - odds[1])
    if loss_type in ("ipo", "sigmoid_norm"):
        scores = scores / lengths
    margins = scores[0] - scores[1]
    if loss_type == "ipo":  # arXiv 2310.12036, equation 17
        return (margins - 1 / (2 * beta)) ** 2
    if loss_type == "hinge":  # arXiv 2305.10425
        return torch.relu(1 - beta * margins)
    return -torch.nn.functional.logsigmoid(beta * margins)  # arXiv 2305.18290


def compare_answers(model, batch, known, args):
    """Return sums over a batch's pairs in fp32, [8]: of the loss, of orpo's negative log-likelihood of chosen lines, and of METRICS.
    known: log-probabilities of all rows by the reference, [rows, 2]; None: the model without its adapters is asked."""
    orpo, reference = args.loss_type == "orpo", 0
    if known is not None:
        reference = known[batch["pairs"]].T
    elif not orpo:  # before the forward that backward belongs to; peft's disable_adapter changes requires_grad, of which shards keep a record
        with torch.no_grad(), mock.patch.object(BaseTunerLayer, "disable_adapters", True):
            reference = answer_logps(model, batch)[0]
    logps, of_prompts = answer_logps(model, batch)
    likelihood = -(logps[0].sum() + of_prompts) * orpo
    logps = logps / batch["lengths"] if orpo else logps
    losses, rewards = (
        preference_losses(logps - reference, batch["lengths"], args.loss_type, args.beta),
        args.beta * (logps - reference).detach(),
    )
    margins = rewards[0] - rewards[1]
    return torch.stack(
        [
            losses.sum(),
            likelihood,
            *rewards.sum(1),
            margins.sum(),
            (margins > 0).float().sum(),
            *logps.detach().sum(1),
        ]
    )


@torch.no_grad()
def run_reference(accelerator, model, loader):
    """Return the log-probabilities of all rows of a loader, [rows, 2], by the model, which is the reference as long as it is untrained."""
    table = torch.zeros(len(loader.dataset), 2, device=accelerator.device)
    for batch in tqdm(loader, "Reference", disable=not accelerator.is_main_process):
        table[batch["pairs"]] = answer_logps(model, batch)[0].T
    return accelerator.reduce(table)  # each row was with one rank


@torch.no_grad()
def evaluate_pairs(accelerator, model, loader, known, step, args):
    """Return loss and METRICS, as in training, over exactly the evaluation rows; None: asked to stop."""
    model.eval()
    total = 0
    for batch in loader:
        total = total + torch.cat([compare_answers(model, batch, known, args), batch["counts"][:2]])
        if fault_tolerance and fault_tolerance.stop_asked(accelerator):
            return None
    model.train()
    *sums, num_pairs, num_learnt = accelerator.reduce(total).tolist()
    means = {
        f"eval_{name}": total / num_pairs for name, total in zip(METRICS, sums[2:], strict=True)
    }
    return {"step": step, "eval_loss": sums[0] / num_pairs + sums[1] / num_learnt} | means


def export_model(accelerator, model, tokenizer, output_dir):
    """Write the folder that `from_pretrained` (adapters: peft) loads. Every rank takes part, rank 0, which has the whole weights, writes."""
    if model_weights:
        weights = model_weights.whole_weights(accelerator, model)
    else:
        weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        model = extract_model_from_parallel(model, keep_torch_compile=False)
        for module in list(model.modules()):  # peft finds nothing inside of FSDP1's wrappers
            module._modules.update(
                {
                    name: child.module
                    for name, child in module.named_children()
                    if "_fsdp_wrapped_module" in child._modules
                }
            )
        tied, clean = (
            getattr(model, "all_tied_weights_keys", {}),
            lambda name: name.replace("_orig_mod.", "").removeprefix("module."),
        )
        model.save_pretrained(
            output_dir,
            state_dict={
                clean(name): weight for name, weight in weights.items() if name not in tied
            },
        )  # tied ones once
        tokenizer.save_pretrained(output_dir)


def leave_process_group(worker_id):
    """Give a process that makes batches a process group of its own: signals to the rank's group are
    not for it. No lambda, since Python 3.14 does not fork workers but pickles what they are given."""
    os.setsid()


def main():
    gc.freeze()  # all that was imported stays
    gc.enable()
    args = parse_args()
    if fault_tolerance:
        fault_tolerance.start_run(args)
    if preflight:
        preflight.check_launch(args)
    # ---- Accelerator and seed ----
    accumulation, output_dir = args.gradient_accumulation_steps, Path(args.output_dir)
    accelerator = make_accelerator(args)
    set_seed(args.seed)
    checkpoint, progress = (
        None,
        {
            "step": 0,
            "schedule_steps": 0,
            "num_input_tokens_seen": 0,
            "nonfinite_steps": 0,
            "evaluated": True,
        },
    )
    if fault_tolerance:
        fault_tolerance.watch_ranks(accelerator, args)
        fault_tolerance.make_output_dir(accelerator, args)
        checkpoint, progress = fault_tolerance.find_checkpoint(accelerator, args, progress)
    else:
        output_dir.mkdir(parents=True, exist_ok=True)

    # ---- Tokenizer and data ----
    tokenizer = load_tokenizer(args.model_name_or_path)
    with accelerator.local_main_process_first():  # the others read its cache
        train_rows, eval_rows, told = load_data(args, tokenizer)
    lengths, window = (
        train_rows["length"][:],
        accumulation * accelerator.num_processes,
    )  # window: micro-batches of an optimizer step
    facts = {
        "rows_per_step": args.per_device_train_batch_size * window,
        "data": xxhash.xxh3_128_hexdigest(train_rows["hash"][:].tobytes()),
    }
    if checkpoint:
        preflight.check_changes(accelerator, args, progress, facts)
    steps_per_epoch = math.ceil(len(train_rows) / facts["rows_per_step"])
    total_steps = (
        args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch)
    )
    if checkpoint:
        fault_tolerance.end_if_done(accelerator, args, progress, total_steps)
    order = {
        "random": (args.seed, None),
        "sequential": (None, None),
        "group_by_length": (args.seed, lengths),
    }[args.train_sampling_strategy]
    batches = global_batches(
        len(train_rows),
        args.per_device_train_batch_size,
        window,
        math.ceil(total_steps / steps_per_epoch),
        *order,
    )
    both = concatenate_datasets([train_rows, eval_rows] if eval_rows else [train_rows])
    make = partial(
        collate_answers,
        source=both.select_columns(["prompt_ids", "chosen_ids", "rejected_ids", "row"]).with_format(
            None
        ),
        pad_token_id=tokenizer.pad_token_id,
        learn_prompts=args.loss_type == "orpo",
        varlen=wants_one_line(args),
    )
    new_loader = partial(
        DataLoader,
        range(len(both)),
        collate_fn=make,
        num_workers=args.dataloader_num_workers,
        pin_memory=accelerator.device.type == "cuda",
        worker_init_fn=leave_process_group,
    )
    train_loader = new_loader(
        batch_sampler=batches[progress["step"] * window : total_steps * window]
    )
    whole_loader = accelerator.prepare(
        new_loader(
            batch_sampler=global_batches(
                len(both), args.per_device_eval_batch_size, accelerator.num_processes
            )
        )
    )
    batches = global_batches(
        len(eval_rows or []), args.per_device_eval_batch_size, accelerator.num_processes
    )
    eval_loader = accelerator.prepare(
        new_loader(batch_sampler=[[len(train_rows) + row for row in batch] for batch in batches])
    )

    # ---- Model ----
    model = load_model(args, accelerator)
    for module in [
        module for name, module in model.named_modules() if "lora" not in name
    ]:  # else the model would differ from the reference by chance
        vars(module).update(
            {
                name: 0.0
                for name in ("p", "attention_dropout")
                if isinstance(vars(module).get(name), float)
            }
        )
    told["loss"] = loss_in_head(model, logits_mib(args, accelerator.device))
    told["batch"] = (
        f"{facts['rows_per_step']} pairs, at most {2 * lengths.mean() * facts['rows_per_step']:,.0f} tokens; {total_steps} steps"
    )
    if preflight:
        preflight.report_start(
            accelerator, args, model, tokenizer, train_rows, train_rows, total_steps, facts, told
        )
    else:
        accelerator.print("no checkpoints: fault_tolerance.py is not beside this recipe")

    # ---- Optimizer and schedule ----
    optimizer = make_optimizer(model, args)
    if fault_tolerance:
        fault_tolerance.check_gradients(accelerator, optimizer)
    warmup_steps = (
        math.ceil(args.warmup_steps * total_steps)
        if args.warmup_steps < 1
        else int(args.warmup_steps)
    )
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, warmup_steps, total_steps)

    # ---- Prepare ----
    # Without the schedule, which would step once per rank (accelerate#2926)
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
    if fault_tolerance:
        fault_tolerance.undo_allocating_step(accelerator, model, optimizer)
    accelerator.init_trackers("llama_dpo", {key: str(value) for key, value in vars(args).items()})
    reference = None  # the model without its adapters, in each step
    if args.loss_type != "orpo" and (
        args.precompute_ref_log_probs or not args.use_peft
    ):  # before weights are restored
        path = output_dir / f"reference-{xxhash.xxh3_64_hexdigest(both['hash'][:].tobytes())}.table"
        run = partial(run_reference, accelerator, model, whole_loader)
        reference = (
            fault_tolerance.keep_table(accelerator, path, run, checkpoint)
            if fault_tolerance
            else run()
        )

    # ---- Resume ----
    if checkpoint:
        fault_tolerance.resume(accelerator, model, optimizer, schedule, args, checkpoint, progress)

    # ---- Train ----
    eval_every = {"no": total_steps, "steps": args.eval_steps, "epoch": steps_per_epoch}[
        args.eval_strategy
    ]
    metrics_file = open(
        output_dir / "metrics.jsonl" if accelerator.is_main_process else os.devnull,
        "a" if checkpoint else "w",
        buffering=1,
    )
    bar = tqdm(
        desc="Training",
        total=total_steps,
        initial=progress["step"],
        unit="step",
        disable=not accelerator.is_main_process,
    )
    model.train()
    step, num_tokens_seen = progress["step"], progress["num_input_tokens_seen"]
    loader, start, tokens_before = iter(train_loader), time.perf_counter(), num_tokens_seen
    while True:  # here `step` steps are done
        progress |= {
            "evaluated": step == progress["step"] and progress["evaluated"],
            "schedule_steps": schedule.state_dict()["last_epoch"],
        }
        progress |= {
            "step": step,
            "num_input_tokens_seen": num_tokens_seen,
            "arguments": vars(args) | facts,
        }
        if (
            eval_rows
            and not progress["evaluated"]
            and (step % eval_every == 0 or step == total_steps)
        ):
            if metrics := evaluate_pairs(accelerator, model, eval_loader, reference, step, args):
                metrics_file.write(json.dumps(metrics) + "\n")
                accelerator.log(metrics, step=step)
                if accelerator.is_main_process:
                    bar.write(
                        "step {step}: loss {eval_loss:.4f}, accuracy {eval_rewards/accuracies:.3f} on held-out pairs".format(
                            **metrics
                        )
                    )
            progress["evaluated"] = metrics is not None
        if fault_tolerance:
            fault_tolerance.keep(accelerator, model, optimizer, args, progress, bar)
        if step >= total_steps:
            break
        step += 1
        micro_batches, losses, sums, applied = (
            [next(loader) for _ in range(accumulation)],
            [],
            [],
            True,
        )
        # For dropout, so that no random state has to be saved; after next, whose first call draws a number
        generator = torch.cuda if accelerator.device.type == "cuda" else torch.default_generator
        generator.manual_seed(
            int(
                np.random.SeedSequence((args.seed, step, accelerator.process_index)).generate_state(
                    1
                )[0]
            )
        )
        counts = accelerator.reduce(
            sum(batch["counts"] for batch in micro_batches)
        )  # of the whole window, over all ranks
        for batch in micro_batches:
            with accelerator.accumulate(model):
                found = compare_answers(model, batch, reference, args)
                loss = found[0] / counts[0] + found[1] / counts[1]
                losses.append(loss.detach())
                sums.append(found.detach())
                # Backends average over ranks, accelerate divides by the accumulation steps: undo both. 0 * loss is no 0
                # where the loss is not finite: then the gradient, which all ranks share, is not finite either
                accelerator.backward(loss * (window + 0 * losses[-1]))
                if accelerator.sync_gradients:
                    grad_norm = accelerator.clip_grad_norm_(
                        model.parameters(), args.max_grad_norm or math.inf
                    )
                    if fault_tolerance:
                        applied = fault_tolerance.hold_back(
                            accelerator, optimizer, grad_norm, step, micro_batches, losses
                        )
                optimizer.step()
                optimizer.zero_grad()
        num_tokens_seen = num_tokens_seen + counts[2]
        if (
            step % args.logging_steps == 0 or step == total_steps
        ):  # only here the device is waited for
            loss, norm = (
                accelerator.reduce(sum(losses)).item(),
                math.nan if grad_norm is None else float(grad_norm),
            )
            metrics = {
                "step": step,
                "epoch": step / steps_per_epoch,
                "loss": loss if math.isfinite(loss) else None,
                "grad_norm": norm if math.isfinite(norm) else None,
                "learning_rate": schedule.get_last_lr()[0],
                "num_input_tokens_seen": int(num_tokens_seen),
                "tokens_per_second": int(num_tokens_seen - tokens_before)
                / (time.perf_counter() - start),
                "peak_memory_gib": (
                    torch.cuda.max_memory_allocated() or getrusage(RUSAGE_SELF).ru_maxrss * 1024
                )
                / 2**30,
            }
            means = (accelerator.reduce(sum(sums))[2:] / counts[0]).tolist()
            metrics |= {
                name: mean if math.isfinite(mean) else None
                for name, mean in zip(METRICS, means, strict=True)
            }
            metrics_file.write(json.dumps(metrics) + "\n")
            accelerator.log(
                {name: value for name, value in metrics.items() if value is not None}, step=step
            )
            bar.set_postfix(
                loss=f"{loss:.4f}", accuracy=metrics["rewards/accuracies"], refresh=False
            )
            if not fault_tolerance and not math.isfinite(
                loss if grad_norm is None or accelerator.scaler else loss + norm
            ):  # fp16's scale may be too large
                stop(
                    70,
                    f"the loss or gradient of step {step} is not finite; without fault_tolerance.py nothing is saved",
                )
        if applied and not accelerator.optimizer_step_was_skipped:
            schedule.step()
        bar.update()

    # ---- Evaluate and save ----
    bar.close()
    export_model(accelerator, model, tokenizer, output_dir)
    if fault_tolerance:
        fault_tolerance.conclude(accelerator, "done", 0)
    accelerator.print(
        f'Trained in {time.perf_counter() - start:.0f} s; the model is in {output_dir}. To go on:\n  python scripts/generate.py {output_dir} --prompt "..."\n  python scripts/plot_loss.py {output_dir}'
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
