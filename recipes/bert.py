"""Classification and regression of texts, or of pairs of them, BERT the example: full, LoRA or QLoRA, under any strategy.

The YAML file owns the strategy, the command line everything about learning:

    accelerate launch --config_file accelerate_configs/fsdp.yaml recipes/bert.py
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 recipes/bert.py --dataset_name rows.jsonl --label_column topic
    accelerate launch --config_file accelerate_configs/deepspeed_zero2.yaml --num_processes 8 recipes/bert.py --use_peft --learning_rate 5e-4

A good run prints a summary, an accuracy that rises, and the folder that `from_pretrained` loads. The same command goes on from the newest
checkpoint. Exit codes: 0 done, 64 usage, 65 data, 69 no hub, 70 not finite, 73 cannot write, 75 stopped and saved. Yours: grep EDIT.
"""

import argparse
import gc
import json
import logging
import math
import os
import sys
import time
from collections import Counter
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
        if path.stem in ("fault_tolerance", "model_weights", "preflight", "run_status", "upstream")
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
        "--model_name_or_path", default="google-bert/bert-base-uncased", help="hub id or folder"
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
        help="eager, sdpa, flex_attention, flash_attention_2, _3, _4, or a hub kernel id",
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
    parser.add_argument("--tf32", action="store_true", help="multiply fp32 matrices in TF32")
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
        default="legacy-datasets/banking77",
        help="hub id, folder, or .json, .jsonl, .csv, .parquet file",
    )  # EDIT: yours (this one: CC-BY-4.0, 10,003 rows of 77 intents)
    parser.add_argument("--dataset_config", help="configuration of a hub data set")
    parser.add_argument("--dataset_train_split", default="train", help="split to train on")
    parser.add_argument(
        "--dataset_test_split", default="test", help="split to evaluate on, if there is one"
    )
    parser.add_argument("--eval_dataset_name", help="evaluate on this file or data set instead")
    parser.add_argument(
        "--text_columns",
        nargs="+",
        help="column of the text, or the two of a pair [the first of TEXT_COLUMNS that is there]",
    )
    parser.add_argument(
        "--label_column",
        default="label",
        help="column of the label: text or whole numbers name classes, other numbers are learnt as such",
    )
    parser.add_argument(
        "--problem_type",
        choices=["single_label_classification", "regression"],
        help="instead of what the labels say",
    )
    parser.add_argument(
        "--class_weights",
        default="none",
        choices=["none", "balanced"],
        help="of rows in the loss; balanced: all classes weigh the same",
    )
    parser.add_argument(
        "--max_length", type=int, default=512, help="tokens a row; longer rows lose their end"
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
        "--per_device_train_batch_size", type=int, default=8, help="rows a rank and micro-batch"
    )
    parser.add_argument("--per_device_eval_batch_size", type=int, default=8, help="rows a rank")
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
        "--seed", type=int, default=42, help="of head, adapters, dropout and the order of the rows"
    )
    # Evaluation, logs, result
    parser.add_argument(
        "--eval_strategy",
        default="epoch",
        choices=["no", "steps", "epoch"],
        help="when to evaluate",
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
    parser.add_argument("--output_dir", default="runs/bert", help="folder of the result")
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
    return parser.parse_args()


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
from accelerate.utils import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    gather_object,
    set_seed,
)
from accelerate.utils.dataclasses import TorchDynamoPlugin
from accelerate.utils.other import extract_model_from_parallel
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    get_scheduler,
)
from transformers.data.data_collator import DataCollatorWithPadding
from transformers.modeling_utils import PreTrainedModel

try:  # what keeps a run from being lost; what is refused and told at its start; reading of rows, bad ones named
    import fault_tolerance
    import model_weights
    import preflight
    import rows
except ModuleNotFoundError as error:
    fault_tolerance = model_weights = preflight = rows = None  # it trains without them
    if run_status:
        stop(
            64,
            f"run_status.py lies beside this recipe, and the module {error.name} is missing: {COPY_ALL}",
        )

TEXT_COLUMNS = (
    ["text"],
    ["sentence1", "sentence2"],
    ["premise", "hypothesis"],
    ["question1", "question2"],
    ["sentence"],
)  # EDIT: yours
BAD_ROW = {
    "input_ids": [],
    "token_type_ids": [],
    "label_text": "",
    "number": 0.0,
    "truncated": False,
    "length": 0,
    "largest": 0,
    "hash": 0,
}


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


def tokenize_text(row, tokenizer, max_length, columns, label_column, names):
    """Return the tokens of a row's text or pair of texts, whether it was cut, number, largest and hash of its tokens, and its label as
    text and as number, inf where it is none. A ValueError says why a row cannot be used. names: of a data set that numbers its classes."""
    columns = columns or next(
        (known for known in TEXT_COLUMNS if set(known) <= set(row)), TEXT_COLUMNS[0]
    )
    if rows:
        rows.check_columns(row, columns, label_column)
    texts, label = [row[name] for name in columns], row[label_column]
    label = label if names is None else dict(enumerate(names)).get(label)  # -1 stands for none
    label_text = (
        str(label).strip().removesuffix(".0" * isinstance(label, float))
    )  # readers make 2.0 of 2 where a number is missing
    if not isinstance(label, (str, int, float)) or label_text in ("", "nan", "inf", "-inf"):
        raise ValueError(f"has no label in {label_column}: {str(row[label_column])[:80]}")
    encoded = tokenizer(
        *(text.encode().decode() for text in texts), truncation=True, max_length=max_length
    )  # encode: no lone surrogates
    tokens = np.array(encoded["input_ids"], dtype=np.int32)
    return {
        "input_ids": encoded["input_ids"],
        "token_type_ids": encoded.get("token_type_ids", []),
        "label_text": label_text,
        "number": math.inf if isinstance(row[label_column], str) else float(row[label_column]),
        "truncated": bool(encoded.encodings and encoded.encodings[0].overflowing),
        "length": len(tokens),
        "largest": int(tokens.max()),
        "hash": xxhash.xxh3_64_intdigest(tokens.tobytes() + label_text.encode()) >> 1,
    }


def load_texts(name, config, split, tokenizer, args):
    """Return the tokenised rows of a split of a file, folder or hub id, and their counts as text; (None, "none") without that split."""
    if rows:
        found = rows.open_split(
            name,
            config,
            split,
            split == args.dataset_train_split or args.eval_dataset_name,
            args.text_columns or sum(TEXT_COLUMNS, []),
        )
    else:
        reader = {".csv": "csv", ".parquet": "parquet"}.get(Path(name).suffix, "json")
        found = (
            load_dataset(reader, data_files=name, split="train")
            if Path(name).is_file()
            else load_dataset(name, config).get(split)
        )
    if not found:
        return None, "none"
    tokenize = partial(
        tokenize_text,
        tokenizer=tokenizer,
        max_length=args.max_length,
        columns=args.text_columns,
        label_column=args.label_column,
        names=getattr(found.features.get(args.label_column), "names", None),
    )
    if rows:
        return rows.tokenize_split(found, name, split, tokenize, args, BAD_ROW)
    done = found.map(tokenize, remove_columns=found.column_names, num_proc=args.dataset_num_proc)
    return done.add_column("row", np.arange(1, len(done) + 1)).with_format("numpy"), str(len(done))


def find_classes(found, args):
    """Return {name of a class: its rows} in the order of numbers, then of the alphabet; {} where numbers are learnt: some are not whole."""
    labels = Counter(zip(found["number"][:].tolist(), found["label_text"][:].tolist(), strict=True))
    if (
        args.problem_type == "regression"
        or not args.problem_type
        and any(number % 1 > 0 for number, _ in labels)
    ):
        return {}
    return {name: number_of_rows for (_, name), number_of_rows in sorted(labels.items())}


def add_labels(found, counts, classes, name, split, args):
    """Return the rows with labels and weights as the loss needs them, and their counts. Stops with 65, or with --skip_bad_rows leaves them
    out, where a label is that of no training row, or no number. name, split: where the rows are from."""
    number_of = {label: number for number, label in enumerate(classes)}
    labels = (
        np.array([number_of.get(text, -1) for text in found["label_text"][:].tolist()])
        if classes
        else found["number"][:].astype(np.float32)
    )
    unfit = np.flatnonzero(labels < 0 if classes else ~np.isfinite(labels)).tolist()
    if unfit and (not args.skip_bad_rows or len(unfit) == len(found)):
        why = (
            f"is that of no training row: those have {', '.join(classes)[:200]}"
            if classes
            else "is no number"
        )
        source = rows.source_of(name, split) if rows else f"{name}, {split}, row"
        stop(
            65,
            *(
                f"{source} {found[i]['row']}: its label {str(found[i]['label_text'])!r} {why}"
                for i in unfit[:3]
            ),
            f"{len(unfit)} rows cannot be used: fix them{', or leave them out with --skip_bad_rows' if len(unfit) < len(found) else ''}",
        )
    if unfit:
        kept = np.delete(np.arange(len(found)), unfit)
        found, labels, counts = (
            found.select(kept),
            labels[kept],
            f"{counts}, {len(unfit)} more for their label",
        )
    weights = np.ones(len(labels), dtype=np.float32)
    if args.class_weights == "balanced":
        weights = np.array(
            [sum(classes.values()) / len(classes) / number for number in classes.values()],
            dtype=np.float32,
        )[labels]
    return found.add_column("labels", labels).add_column("weights", weights).with_format(
        "numpy"
    ), counts


def load_data(args, tokenizer):
    """Return training rows, evaluation rows or None, names of the classes ([]: numbers are learnt), what to tell. EDIT: filters, mixtures."""
    train_rows, counts = load_texts(
        args.dataset_name, args.dataset_config, args.dataset_train_split, tokenizer, args
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
        load_texts(name, config, args.dataset_test_split, tokenizer, args)
        if wanted
        else (None, "none")
    )
    classes = find_classes(train_rows, args)
    if len(classes) == 1:
        stop(
            65,
            f"{args.dataset_name}: all rows have the label {list(classes)[0]!r} in {args.label_column}: there is nothing to tell apart",
        )
    if args.class_weights == "balanced" and not classes:
        stop(64, f"--class_weights balanced: {args.label_column} has numbers to learn, not classes")
    train_rows, counts = add_labels(
        train_rows, counts, classes, args.dataset_name, args.dataset_train_split, args
    )
    if eval_rows:
        eval_rows, eval_counts = add_labels(
            eval_rows, eval_counts, classes, name, args.dataset_test_split, args
        )
    labels = (
        f"{len(classes)} classes: {', '.join(f'{name} {number}' for name, number in classes.items())[:400]}"
        if classes
        else "numbers"
    )
    sample = f"{tokenizer.decode(train_rows[0]['input_ids'])} -> {train_rows[0]['label_text']}"
    return (
        train_rows,
        eval_rows,
        list(classes),
        {"train rows": counts, "eval rows": eval_counts, "labels": labels, "sample": sample},
    )


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


def collate_texts(numbers, source, pad):
    """Return the rows of `source` with these numbers as a batch. inputs: what the model takes, [rows, tokens], by transformers' `pad`.
    labels, weights: [rows]. counts: sum of weights, and tokens without padding. row: numbers in the file, from 1, on the host."""
    found = source.__getitems__(numbers) if numbers else []
    texts = found or [
        {"input_ids": [pad.tokenizer.pad_token_id], "token_type_ids": []}
    ]  # a rank without rows still takes part
    inputs = pad(
        [
            {name: text[name] for name in ("input_ids", "token_type_ids") if len(text[name])}
            for text in texts
        ]
    )
    labels, weights = (
        torch.from_numpy(np.array([row[name] for row in found], dtype=source.features[name].dtype))
        for name in ("labels", "weights")
    )
    counts = torch.tensor([weights.sum(), sum(len(row["input_ids"]) for row in found)])
    return {
        "inputs": dict(inputs),
        "labels": labels,
        "weights": weights,
        "counts": counts,
        "row": [int(row["row"]) for row in found],
    }


def load_text_tokenizer(name):
    """Return the tokenizer, in any case with a pad token; preflight stops with 64 or 69 if there is none."""
    with preflight.loading("tokenizer", name) if preflight else nullcontext():
        tokenizer = AutoTokenizer.from_pretrained(
            name, padding_side="right", trust_remote_code=False
        )
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def share_new_modules(model, names, accelerator):
    """Give these modules on every rank the weights of rank 0. Under FSDP transformers makes new weights there alone; the other ranks have
    noise, or meta tensors, which all look alike to accelerate's optimizer, so that it would train one of them only."""
    for name in names if accelerator.distributed_type == DistributedType.FSDP else []:
        module = model.get_submodule(name)
        weights = module.cpu().state_dict() if accelerator.is_main_process else None
        module.load_state_dict(gather_object([weights])[0], assign=True)


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


def load_classifier(auto_class, task_type, classes, args, accelerator):
    """Return auto_class's model with a head for these classes, or [] for one number, quantized and with adapters (task_type: peft's) as asked for;
    preflight stops with 64. What the weights on disk do not hold, the head and of some models a pooler, is new: trained whole beside adapters."""
    outside = [
        r"(?!.*\.\d).*"
    ]  # of the blocks, whose names have a number: a layer that is new must not be quantized
    quantization = (
        BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=outside)
        if args.load_in_8bit
        else None
    )
    if (
        args.load_in_4bit
    ):  # the library's own defaults are fp4, float32 and uint8: always say all four
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=args.bnb_4bit_quant_type,
            bnb_4bit_quant_storage=args.dtype,
            bnb_4bit_compute_dtype=compute_dtype(args, accelerator),
            bnb_4bit_use_double_quant=args.bnb_4bit_use_double_quant,
            llm_int8_skip_modules=outside,
        )
    head = (
        {
            "id2label": dict(enumerate(classes)),
            "label2id": {name: i for i, name in enumerate(classes)},
        }
        if classes
        else {"num_labels": 1}
    )
    head["problem_type"] = "single_label_classification" if classes else "regression"
    seeded = mock.patch.object(
        PreTrainedModel,
        "initialize_weights",
        lambda model, draw=PreTrainedModel.initialize_weights: set_seed(args.seed) or draw(model),
    )
    read = auto_class.from_pretrained
    if model_weights:
        read = partial(model_weights.load_pretrained, auto_class, accelerator)
    with (
        seeded,
        preflight.loading("model", args.model_name_or_path, args) if preflight else nullcontext(),
    ):  # under ZeRO-3 some models have drawn before
        model, report = read(
            args.model_name_or_path,
            dtype=args.dtype,
            attn_implementation=args.attn_implementation,
            quantization_config=quantization,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=False,
            **head,
        )
    new = [
        *report["missing_keys"],
        *(name for name, *_ in report["mismatched_keys"]),
    ]  # peft trains a classifier of several layers as one
    new = sorted(
        {
            "classifier" if name.startswith("classifier.") else name.rpartition(".")[0]
            for name in new
        }
    )
    share_new_modules(model, new, accelerator)
    set_seed(args.seed)  # for adapters: ranks that made no new weights have drawn less
    model._no_split_modules = {
        name for name in model._no_split_modules or () if not name.endswith("Embeddings")
    }  # accelerate makes them a unit itself
    model._weight_conversions = (
        None  # else ZeRO-3 saves weights by the names of BERT's first files, gamma and beta
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
    if args.use_peft:
        if preflight:
            preflight.check_adapters(model, args.lora_target_modules)
        model = get_peft_model(
            model,
            LoraConfig(
                task_type=task_type,
                r=args.lora_r,
                lora_alpha=args.lora_alpha,
                lora_dropout=args.lora_dropout,
                use_rslora=args.use_rslora,
                use_dora=args.use_dora,
                modules_to_save=new or None,
                target_modules="all-linear"
                if args.lora_target_modules == ["all-linear"]
                else args.lora_target_modules,
            ),
            autocast_adapter_dtype=accelerator.mixed_precision != "no" or not accelerator.is_fsdp2,
        )  # to fp32; FSDP2 wants one type in a unit:
        for weight in (
            model.parameters() if accelerator.mixed_precision != "no" else []
        ):  # the new modules get that of the adapters
            weight.data = weight.data.float() if weight.requires_grad else weight.data
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


def summed_row_loss(model, batch):
    """Return cross-entropy, or squared error, summed over a batch's rows, each times its weight, and the logits, [rows, classes or 1]; both in
    fp32. There are none on a rank without rows, though its model runs too."""
    labels = batch["labels"]
    logits = model(**batch["inputs"]).logits.float()[: len(labels)]
    losses = (
        (logits[:, 0] - labels) ** 2
        if labels.is_floating_point()
        else cross_entropy(logits, labels, reduction="none")
    )
    return (losses * batch["weights"]).sum(), logits


def metrics_of(predicted, labels):
    """Return accuracy and macro F1, over the classes that occur or are told; of numbers mean squared error and Pearson's correlation, 0 where
    all are equal. predicted, labels: [rows], int64 or float32."""
    if labels.is_floating_point():
        correlation = (
            np.corrcoef(predicted, labels)[0, 1]
            if min(len(predicted.unique()), len(labels.unique())) > 1
            else 0.0
        )
        return {
            "eval_mse": (predicted - labels).square().mean().item(),
            "eval_pearson": float(correlation),
        }
    classes = int(max(predicted.max(), labels.max())) + 1
    right, told, true = (
        part.bincount(minlength=classes)
        for part in (labels[predicted == labels], predicted, labels)
    )
    return {
        "eval_accuracy": (right.sum() / true.sum()).item(),
        "eval_f1": (2 * right / (told + true)).nanmean().item(),
    }  # NaN: neither


@torch.no_grad()
def evaluate_rows(accelerator, model, loader, step):
    """Return loss, as in training, and metrics over exactly the evaluation rows; None: asked to stop."""
    model.eval()
    total, pairs = torch.zeros(2, device=accelerator.device), []
    for batch in loader:
        loss, logits = summed_row_loss(model, batch)
        total += torch.stack([loss, batch["counts"][0]])
        predicted = logits[:, 0] if batch["labels"].is_floating_point() else logits.argmax(1)
        pairs.append(torch.stack([predicted, batch["labels"]]).cpu())
        if fault_tolerance and fault_tolerance.stop_asked(accelerator):
            return None
    model.train()
    loss, weight = accelerator.reduce(total).tolist()
    predicted, labels = torch.cat(gather_object(pairs), dim=1)
    return {"step": step, "eval_loss": loss / weight} | metrics_of(predicted, labels)


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
            "evaluated": not args.eval_on_start,
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
        train_rows, eval_rows, classes, told = load_data(args, tokenizer)
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
    make = partial(collate_texts, pad=DataCollatorWithPadding(tokenizer))
    options = {
        "num_workers": args.dataloader_num_workers,
        "pin_memory": accelerator.device.type == "cuda",
        "worker_init_fn": leave_process_group,
    }
    train_loader = DataLoader(
        range(len(train_rows)),
        batch_sampler=batches[progress["step"] * window : total_steps * window],
        collate_fn=partial(make, source=train_rows),
        **options,
    )
    if eval_rows:
        batches = global_batches(
            len(eval_rows), args.per_device_eval_batch_size, accelerator.num_processes
        )
        eval_loader = accelerator.prepare(
            DataLoader(
                range(len(eval_rows)),
                batch_sampler=batches,
                collate_fn=partial(make, source=eval_rows),
                **options,
            )
        )

    # ---- Model ----
    model = load_classifier(
        AutoModelForSequenceClassification, "SEQ_CLS", classes, args, accelerator
    )
    config = model.config
    config.pad_token_id = tokenizer.pad_token_id  # decoders look for the last token before it
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
    accelerator.init_trackers("bert", {key: str(value) for key, value in vars(args).items()})

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
            if metrics := evaluate_rows(accelerator, model, eval_loader, step):
                metrics_file.write(json.dumps(metrics) + "\n")
                accelerator.log(metrics, step=step)
                if accelerator.is_main_process:
                    bar.write(
                        f"step {step}: {', '.join(f'{name[5:]} {value:.4f}' for name, value in metrics.items() if name != 'step')} on held-out rows"
                    )
            progress["evaluated"] = metrics is not None
        if fault_tolerance:
            fault_tolerance.keep(accelerator, model, optimizer, args, progress, bar)
        if step >= total_steps:
            break
        step += 1
        micro_batches, losses, applied = [next(loader) for _ in range(accumulation)], [], True
        # For dropout, so that no random state has to be saved; after next, whose first call draws a number
        generator = torch.cuda if accelerator.device.type == "cuda" else torch.default_generator
        generator.manual_seed(
            int(
                np.random.SeedSequence((args.seed, step, accelerator.process_index)).generate_state(
                    1
                )[0]
            )
        )
        weight, num_tokens = accelerator.reduce(
            sum(batch["counts"] for batch in micro_batches)
        )  # of the whole window, over all ranks
        for batch in micro_batches:
            with accelerator.accumulate(model):
                loss = summed_row_loss(model, batch)[0] / weight
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
        num_tokens_seen = num_tokens_seen + num_tokens.long()
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
    if accelerator.is_main_process:
        config.save_pretrained(
            output_dir
        )  # of adapters nothing else tells the names of the classes
    if fault_tolerance:
        fault_tolerance.conclude(accelerator, "done", 0)
    accelerator.print(
        f"Trained in {time.perf_counter() - start:.0f} s; the model is in {output_dir}, its curve: python scripts/plot_loss.py {output_dir}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
