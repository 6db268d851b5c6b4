"""Continued pre-training of any causal language model on raw text, Mistral as the example: full, LoRA or QLoRA, under any strategy.

The YAML file owns the strategy, the command line everything about learning:

    accelerate launch --config_file accelerate_configs/fsdp.yaml recipes/mistral_pretrain.py --num_eval_documents 200
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 recipes/mistral_pretrain.py \
        --dataset_name books/ --num_eval_documents 5 --num_train_epochs 2
    accelerate launch --config_file accelerate_configs/fsdp.yaml recipes/mistral_pretrain.py --max_length 8192 \
        --model_name_or_path mistralai/Mistral-7B-v0.3 --dataset_name org/web_text --streaming --max_train_tokens 2e9

Documents, in an order that follows from the seed, each with an end of sequence behind it, are cut into blocks of --max_length
tokens, with nothing lost or padded. Those of a block do not see each other. Each token but a document's first is learnt once a pass.
A good run prints a summary, a loss and a perplexity that fall, and a folder for `from_pretrained`. The same command again goes on. Exit
codes: 0 done, 64 usage, 65 data, 69 no hub, 70 not finite, 73 cannot write, 75 stopped and saved. To make it yours: grep EDIT.
"""

import argparse
import gc
import json
import logging
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain, islice
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
        "--model_name_or_path", default="HuggingFaceTB/SmolLM2-135M", help="hub id or folder"
    )
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
        help="compile each kind of layer once; a minute at the start, (not with FlashAttention)",
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
        "--lora_dropout", type=float, default=0.0, help="on the input of the adapters"
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
        default="HuggingFaceTB/cosmopedia-100k",
        help="hub id, folder, or .txt (one document a file), .jsonl, .json, .csv, .parquet file",
    )  # EDIT: yours (this one: Apache-2.0 on its hub page, no test split)
    parser.add_argument("--dataset_config", help="configuration of a hub data set")
    parser.add_argument("--dataset_train_split", default="train", help="split to train on")
    parser.add_argument(
        "--dataset_test_split", default="test", help="split to evaluate on, if there is one"
    )
    parser.add_argument(
        "--text_column", default="text", help="column of the text, except of .txt files"
    )
    parser.add_argument(
        "--streaming",
        action="store_true",
        help="read the data in order, without a copy on this disk; without it all of a pass is shuffled, and any place in it found at once",
    )
    parser.add_argument(
        "--shuffle_buffer_size",
        type=int,
        default=1000,
        help="documents of --streaming in memory that are shuffled at a time",
    )
    parser.add_argument("--eval_dataset_name", help="evaluate on this file or data set instead")
    parser.add_argument(
        "--num_eval_documents",
        type=int,
        default=0,
        help="evaluate on so many documents from the start of the data instead, which are not trained on",
    )
    parser.add_argument(
        "--max_eval_tokens",
        type=int,
        default=1_000_000,
        help="evaluate on the blocks with the first so many tokens at most",
    )
    parser.add_argument(
        "--max_length", type=int, default=1024, help="tokens a block; a batch counts blocks"
    )
    parser.add_argument(
        "--skip_bad_rows",
        action="store_true",
        help="leave out and count the documents that cannot be used",
    )
    # Learning
    parser.add_argument(
        "--per_device_train_batch_size", type=int, default=8, help="blocks a rank and micro-batch"
    )
    parser.add_argument("--per_device_eval_batch_size", type=int, default=8, help="blocks a rank")
    parser.add_argument(
        "--gradient_accumulation_steps", type=int, default=1, help="micro-batches an optimizer step"
    )
    parser.add_argument(
        "--max_train_tokens",
        type=float,
        default=1e7,
        help="the budget: the step that reaches it is the last, so it is rounded up to whole steps; where the data end before, they are read again in another order",
    )
    parser.add_argument(
        "--num_train_epochs",
        type=int,
        help="passes over the data instead of that budget, to the token; to count them each rank tokenises all data first: of much more than 1e9 tokens give the budget",
    )
    parser.add_argument(
        "--max_steps",
        type=int,
        default=-1,
        help="optimizer steps instead of any budget, if positive",
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
        "--learning_rate", type=float, default=2e-5, help="peak; adapters want about ten times more"
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
        "--seed", type=int, default=42, help="of adapters, dropout and the order of the documents"
    )
    # Evaluation, logs, result
    parser.add_argument(
        "--eval_strategy",
        default="steps",
        choices=["no", "steps"],
        help="whether to evaluate: every --eval_steps and at the end",
    )
    parser.add_argument(
        "--eval_on_start", action="store_true", help="evaluate before the first step too"
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
    parser.add_argument(
        "--output_dir", default="runs/mistral_pretrain", help="folder of the result"
    )
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
from accelerate import (
    Accelerator,
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
)
from accelerate.utils import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    send_to_device,
    set_seed,
)
from accelerate.utils.dataclasses import TorchDynamoPlugin
from accelerate.utils.other import extract_model_from_parallel
from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint as recompute
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

LOGITS_SHARE = (
    1 / 64
)  # of a GPU's memory, for fp32 logits at a time: 1.25 GiB of 80; the loss takes about three times that for a moment
SUPERVISED = {}  # positions and targets of the batch at hand: the way to the output head that leads past the model's forward
# Position: pass, document in its order, token in it; reader: with --streaming, state of the data set before the document's window
START = {"pass": 0, "document": 0, "token": 0, "reader": None, "left_out": 0}


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


def open_documents(name, config, split, required, args):
    """Return the documents of a split, with --streaming in their order alone, and their files, [] of a hub id, and what to tell of columns
    that nothing reads; (None, [], "") without that split."""
    if rows:
        return rows.open_documents(name, config, split, required, args)
    if not Path(name).is_file():
        return load_dataset(name, config, streaming=args.streaming).get(split), [], ""
    reader = {".csv": "csv", ".parquet": "parquet"}.get(Path(name).suffix, "json")
    return (
        load_dataset(reader, data_files=name, split="train", streaming=args.streaming),
        [name],
        "",
    )


def read_documents(found, position, passes, args):
    """Yield number in the data set, from 1, row and position of document after document. Each pass has another order: of all documents or,
    with --streaming, of window after window. It follows from the seed, so a position is found again without what lies before it."""
    position, indexed = dict(position), isinstance(found, Dataset)
    size = len(found) if indexed else args.shuffle_buffer_size
    while position["pass"] < passes:
        if not indexed:
            found.load_state_dict(position["reader"])  # None: its start
        reader, reading, before = (
            position["reader"],
            iter([] if indexed else found),
            position["document"] // size * size,
        )
        window = found if indexed else list(islice(reading, size))
        while window:
            order = np.random.default_rng((args.seed, position["pass"], before)).permutation(
                len(window)
            )
            for place in range(position["document"] - before, len(window)):
                chosen = int(order[place])
                yield (
                    args.num_eval_documents + before + chosen + 1,
                    window[chosen],
                    position | {"document": before + place, "reader": reader},
                )
                position["token"] = 0
            before = position["document"] = before + len(window)
            reader, window = None if indexed else found.state_dict(), list(islice(reading, size))
        position |= {"pass": position["pass"] + 1, "document": 0, "reader": None}


def cut_blocks(documents, source, tokenizer, args):
    """Yield blocks of max_length tokens, each with the position of the token behind it. A block is [3, max_length + 1]: tokens, the last
    one to be predicted alone, since the next block begins with it; place of each in its document's part of the block; number of its
    document, 0 behind the end of the data. source: name and files of the documents. A ValueError names one that cannot be used."""
    block, filled, left_out = torch.zeros(3, args.max_length + 1, dtype=torch.int32), 0, 0
    for number, row, position in documents:
        text = (
            rows.text_of(row, number, *source, args) if rows else row[args.text_column]
        )  # None: left out
        tokens, start, left_out = [], position["token"], left_out + (text is None)
        if text and text.strip():
            tokens = tokenizer(text, verbose=False)["input_ids"]
            tokens = torch.tensor(
                tokens
                + [tokenizer.eos_token_id] * (tokenizer.eos_token_id not in (None, *tokens[-1:])),
                dtype=torch.int32,
            )
        while start < len(tokens):
            part = tokens[start : start + args.max_length + 1 - filled]
            block[:, filled : filled + len(part)] = torch.stack(
                [part, torch.arange(len(part)), torch.full_like(part, number)]
            )
            filled, start = filled + len(part), start + len(part)
            if filled > args.max_length:
                start -= 1
                yield (
                    block,
                    position | {"token": start, "left_out": position["left_out"] + left_out},
                )
                block, filled = torch.zeros_like(block), 0
    if filled:
        yield (
            block,
            START | {"pass": position["pass"] + 1, "left_out": position["left_out"] + left_out},
        )


def deal(ahead, group):
    """Return the blocks of the next step, each with the position behind it, on every rank; a text where a document cannot be used. Every rank
    takes part. ahead: on the one rank that reads for all, in a thread: each would have to tokenise all text to know where its own begins."""
    try:
        told = [ahead.result() if ahead else None]
    except ValueError as error:
        told = [str(error)]
    if group:  # from host to host
        torch.distributed.broadcast_object_list(told, group=group)
    return told[0]


def wants_one_line(args):
    """Return whether the rows of a batch are to lie in one line without padding: FlashAttention is told where each ends, or it would
    read that from the device in every layer."""
    return "flash" in args.attn_implementation or args.attn_implementation == "varlen"


def make_batch(blocks, max_length, varlen=False):
    """Return a batch of blocks, each [3, max_length + 1], or of none for a rank that still takes part.
    inputs: input_ids, [blocks, max_length], and position_ids, which begin anew with each document: where there is neither mask nor
        cache, they keep documents apart. varlen: all in one line, for FlashAttention
    supervised: positions, [n], in the flattened batch, whose next token is learnt, and that token, targets, [n]
    counts: n, and tokens fed. row: numbers of the documents, from 1, on the host"""
    blocks = (
        torch.stack([*blocks]).long()
        if len(blocks)
        else torch.zeros(1, 3, max_length + 1, dtype=torch.long)
    )
    (ids, places, numbers), (targets, next_places, _) = (
        blocks[:, :, :-1].unbind(1),
        blocks[:, :, 1:].unbind(1),
    )
    learnt, inputs = (
        next_places.flatten().nonzero()[:, 0],
        {"input_ids": ids, "position_ids": places},
    )  # nothing comes before place 0
    if varlen:  # known here, so that no layer has to read it from the device
        ends = torch.cat(
            [places.flatten().eq(0).nonzero()[:, 0], torch.tensor([places.numel()])]
        ).int()
        inputs = {name: line.reshape(1, -1) for name, line in inputs.items()} | {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
        }
        inputs |= dict.fromkeys(("max_length_q", "max_length_k"), int(ends.diff().max()))
    return {
        "inputs": inputs,
        "supervised": {"positions": learnt, "targets": targets.flatten()[learnt]},
        "counts": torch.tensor([len(learnt), int((numbers > 0).sum())]),
        "row": numbers[numbers > 0].unique().tolist(),
    }


def load_data(args, tokenizer):
    """Return the training documents, their name and files, the tokens of --num_train_epochs, the evaluation blocks, the first training
    block, and what to tell. EDIT: filters, mixtures, sources."""
    found, files, not_read = open_documents(
        args.dataset_name, args.dataset_config, args.dataset_train_split, True, args
    )
    name, config = (
        (args.eval_dataset_name, None)
        if args.eval_dataset_name
        else (args.dataset_name, args.dataset_config)
    )
    source, eval_found, eval_files = (args.dataset_name, files), None, files
    if args.num_eval_documents:
        eval_found, found = found.take(args.num_eval_documents), found.skip(args.num_eval_documents)
    elif (
        args.eval_dataset_name
        or not Path(name).exists()
        or any(Path(name).rglob(f"{args.dataset_test_split}*"))
    ):
        eval_found, eval_files, _ = open_documents(
            name, config, args.dataset_test_split, bool(args.eval_dataset_name), args
        )
    eval_rows = (
        (number, row, START)
        for number, row in enumerate(
            eval_found if eval_found and args.eval_strategy != "no" else [], 1
        )
    )
    try:
        eval_blocks = cut_blocks(eval_rows, (name, eval_files), tokenizer, args)
        eval_blocks = [
            block
            for block, _ in islice(eval_blocks, math.ceil(args.max_eval_tokens / args.max_length))
        ]
        one_pass = (
            block
            for block, _ in cut_blocks(
                read_documents(found, START, 1, args), source, tokenizer, args
            )
        )
        first = next(one_pass)
        counted = (
            sum(int((block[2, :-1] > 0).sum()) for block in chain([first], one_pass))
            if args.num_train_epochs and args.max_steps <= 0
            else 0
        )
    except (ValueError, StopIteration) as error:
        stop(65, str(error) or f"{args.dataset_name}: no text in any document")
    return (
        found,
        source,
        counted * (args.num_train_epochs or 0),
        eval_blocks,
        first,
        {
            "train text": f"{len(found) if isinstance(found, Dataset) else 'a stream of'} documents; where they end too soon, again in another order{not_read}",
            "eval text": f"{len(eval_blocks)} blocks",
            "sample": tokenizer.decode(first[0, :200].tolist()),
        },
    )


def load_text_tokenizer(name):
    """Return the tokenizer, in any case with a pad token; preflight stops with 64 or 69 if there is none."""
    with preflight.loading("tokenizer", name) if preflight else nullcontext():
        tokenizer = AutoTokenizer.from_pretrained(
            name, padding_side="right", trust_remote_code=False
        )
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


def summed_loss(model, batch):
    """Return the cross-entropy summed over a batch's supervised tokens, in nats and fp32."""
    SUPERVISED.update(batch["supervised"])
    return losses_in_output(model(**batch["inputs"], use_cache=False).logits).sum()


@torch.no_grad()
def evaluate(accelerator, model, loader, step):
    """Return the loss, in nats a supervised token, and the perplexity, over exactly the evaluation rows; None: asked to stop."""
    model.eval()
    total = torch.zeros(2, device=accelerator.device)
    for batch in loader:
        total += torch.stack([summed_loss(model, batch), batch["counts"][0]])
        if fault_tolerance and fault_tolerance.stop_asked(accelerator):
            return None
    model.train()
    loss, num_tokens = accelerator.reduce(total).tolist()
    return {
        "step": step,
        "eval_loss": loss / num_tokens,
        "eval_perplexity": math.exp(min(loss / num_tokens, 700)),
    }


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
            "evaluated": not args.eval_on_start,
            "stream": START,
        },
    )
    if fault_tolerance:
        fault_tolerance.watch_ranks(accelerator, args)
        fault_tolerance.make_output_dir(accelerator, args)
        checkpoint, progress = fault_tolerance.find_checkpoint(accelerator, args, progress)
    else:
        output_dir.mkdir(parents=True, exist_ok=True)

    # ---- Tokenizer and data ----
    tokenizer = load_text_tokenizer(args.model_name_or_path)
    with accelerator.local_main_process_first():  # the others read its cache
        found, source, counted, eval_blocks, first, told = load_data(args, tokenizer)
    ranks, rank = accelerator.num_processes, accelerator.process_index
    window, per_pass = accumulation * ranks, len(found) if isinstance(found, Dataset) else math.inf
    facts = {
        "rows_per_step": args.per_device_train_batch_size * window,
        "data": rows.identity_of(found, source[1]) if rows else None,
    }
    if checkpoint:
        preflight.check_changes(accelerator, args, progress, facts)
    tokens_per_step = facts["rows_per_step"] * args.max_length
    total_steps = (
        args.max_steps
        if args.max_steps > 0
        else math.ceil((counted or args.max_train_tokens) / tokens_per_step)
    )
    if checkpoint:
        fault_tolerance.end_if_done(accelerator, args, progress, total_steps)
    documents = read_documents(
        found, progress["stream"], args.num_train_epochs if counted else math.inf, args
    )
    blocks = cut_blocks(documents, source, tokenizer, args)
    reader = ThreadPoolExecutor(1) if accelerator.is_main_process else None
    group = None
    if ranks > 1:  # over TCP: GLOO_SOCKET_IFNAME names the interface that connects several nodes
        group = torch.distributed.new_group(
            backend="gloo", timeout=timedelta(seconds=max(args.ddp_timeout, 1) + 60)
        )
    make = partial(make_batch, max_length=args.max_length, varlen=wants_one_line(args))
    size, eval_size = args.per_device_train_batch_size, args.per_device_eval_batch_size
    eval_starts = range(
        0, math.ceil(len(eval_blocks) / (eval_size * ranks)) * eval_size * ranks, eval_size
    )  # as many batches on each rank
    eval_batches = [
        send_to_device(make(eval_blocks[i : i + eval_size]), accelerator.device)
        for i in eval_starts[rank::ranks]
    ]

    # ---- Model ----
    model = load_model(args, accelerator)
    told["loss"] = loss_in_head(model, logits_mib(args, accelerator.device))
    if preflight:
        known = {
            "length": np.array([args.max_length]),
            "largest": np.array([max(block[0].max() for block in [first, *eval_blocks])]),
        }
        preflight.report_start(
            accelerator, args, model, tokenizer, known, [first], total_steps, facts, told
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
    model, optimizer = accelerator.prepare(
        model, optimizer
    )  # a schedule would step once per rank (accelerate#2926)
    if fault_tolerance:
        fault_tolerance.undo_allocating_step(accelerator, model, optimizer)
    accelerator.init_trackers(
        "mistral_pretrain", {key: str(value) for key, value in vars(args).items()}
    )

    # ---- Resume ----
    if checkpoint:
        fault_tolerance.resume(accelerator, model, optimizer, schedule, args, checkpoint, progress)

    # ---- Train ----
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
    step, num_tokens_seen, position = (
        progress["step"],
        progress["num_input_tokens_seen"],
        progress["stream"],
    )
    ahead, start, tokens_before = (
        reader and reader.submit(list, islice(blocks, facts["rows_per_step"])),
        time.perf_counter(),
        num_tokens_seen,
    )
    while True:  # here `step` steps are done
        progress |= {
            "evaluated": step == progress["step"] and progress["evaluated"],
            "schedule_steps": schedule.state_dict()["last_epoch"],
        }
        progress |= {
            "step": step,
            "num_input_tokens_seen": num_tokens_seen,
            "stream": position,
            "arguments": vars(args) | facts,
        }
        if (
            eval_batches
            and not progress["evaluated"]
            and (step % args.eval_steps == 0 or step == total_steps)
        ):
            if metrics := evaluate(accelerator, model, eval_batches, step):
                metrics_file.write(json.dumps(metrics) + "\n")
                accelerator.log(metrics, step=step)
                if accelerator.is_main_process:
                    bar.write(
                        "step {step}: loss {eval_loss:.4f}, perplexity {eval_perplexity:.2f} a token of held-out text".format(
                            **metrics
                        )
                    )
            progress["evaluated"] = metrics is not None
        if fault_tolerance:
            fault_tolerance.keep(accelerator, model, optimizer, args, progress, bar)
        if step >= total_steps:
            break
        step += 1
        dealt = deal(ahead, group)
        if isinstance(dealt, str):
            if fault_tolerance:
                fault_tolerance.give_up(accelerator, model, optimizer, args, progress, 65, dealt)
            stop(65, dealt)
        ahead, position = (
            reader
            and reader.submit(list, islice(blocks, facts["rows_per_step"] * (step < total_steps))),
            dealt[-1][1],
        )
        starts = range(0, facts["rows_per_step"], size)[
            rank::ranks
        ]  # micro-batch j is for rank j % ranks
        micro_batches = [make([block for block, _ in dealt[i : i + size]]) for i in starts]
        micro_batches = send_to_device(micro_batches, accelerator.device, non_blocking=True)
        losses, applied = [], True
        # For dropout, so that no random state has to be saved
        generator = torch.cuda if accelerator.device.type == "cuda" else torch.default_generator
        generator.manual_seed(
            int(
                np.random.SeedSequence((args.seed, step, accelerator.process_index)).generate_state(
                    1
                )[0]
            )
        )
        num_supervised, num_inputs = accelerator.reduce(
            sum(batch["counts"] for batch in micro_batches)
        )  # of the whole window, over all ranks
        for batch in micro_batches:
            with accelerator.accumulate(model):
                loss = summed_loss(model, batch) / num_supervised
                losses.append(loss.detach())
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
        num_tokens_seen = num_tokens_seen + num_inputs
        if (
            step % args.logging_steps == 0 or step == total_steps
        ):  # only here the device is waited for
            loss, norm = (
                accelerator.reduce(sum(losses)).item(),
                math.nan if grad_norm is None else float(grad_norm),
            )
            metrics = {
                "step": step,
                "epoch": position["pass"] + position["document"] / per_pass,
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
            metrics_file.write(json.dumps(metrics) + "\n")
            accelerator.log(
                {name: value for name, value in metrics.items() if value is not None}, step=step
            )
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
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
        "The data were read {pass} times, and {document} documents more; {left_out} could not be used and were left out".format(
            **position
        )
    )
    accelerator.print(
        f'Trained in {time.perf_counter() - start:.0f} s; the model is in {output_dir}. To go on:\n  python scripts/continue_text.py {output_dir} --prompt "..."\n  python scripts/plot_loss.py {output_dir}'
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
