# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer and TRL's SFTTrainer on the rows of a cell."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from .peers import load_model, write_metrics

SAME_NAMES = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "lr_scheduler_type",
    "weight_decay",
    "max_grad_norm",
    "max_steps",
    "num_train_epochs",
    "seed",
)


class CountingCollator:
    """A collator that also records the number of tokens of each batch, without padding."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator
        self.tokens: list[int] = []

    def __call__(self, rows: Sequence[dict[str, Any]]) -> Any:
        self.tokens.append(sum(len(row["input_ids"]) for row in rows))
        return self.collator(rows)


def run_trainer(args: argparse.Namespace) -> None:
    """Train with transformers' Trainer."""
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    tokenizer: Any = AutoTokenizer.from_pretrained(
        args.model_name_or_path, padding_side="right", trust_remote_code=False
    )
    rows = read_rows(args, tokenizer)
    trainer = Trainer(
        load_model(args),
        TrainingArguments(**common_settings(args)),
        train_dataset=rows,
        # The default collator does not pad labels. transformers' own examples use this one.
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
    )
    train(trainer, args)


def run_trl(args: argparse.Namespace) -> None:
    """Train with TRL's SFTTrainer."""
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(
        args.model_name_or_path, padding_side="right", trust_remote_code=False
    )
    config = SFTConfig(**common_settings(args), max_length=args.max_length, packing=args.packing)
    rows = read_rows(args, tokenizer)
    model = load_model(args)
    train(SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer), args)


def common_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that TrainingArguments and SFTConfig share.

    Nothing is saved or reported. With --matched, settings whose defaults differ from the bare loop
    are set as in the loop.
    """
    settings = {name: getattr(args, name) for name in SAME_NAMES}
    settings["output_dir"] = str(args.output_dir)
    settings["save_strategy"] = "no"
    settings["report_to"] = "none"
    settings["bf16"] = args.mixed_precision == "bf16"  # TRL would turn it on by itself
    if args.matched:
        settings["gradient_checkpointing"] = args.gradient_checkpointing
        settings["optim"] = "adamw_torch_fused"
        settings["logging_steps"] = args.logging_steps
        settings["train_sampling_strategy"] = args.train_sampling_strategy
    return settings


def read_rows(args: argparse.Namespace, tokenizer: Any) -> Any:
    """Return the rows as a dataset of input_ids and labels.

    They are the prepared tokens or, with --text, tokenized here as a user of Trainer would.
    """
    from datasets import Dataset

    if args.text:
        return tokenized_rows(args, tokenizer)
    lines = (args.data / "tokens.jsonl").read_text().splitlines()
    return Dataset.from_list([json.loads(line) for line in lines])


def tokenized_rows(args: argparse.Namespace, tokenizer: Any) -> Any:
    """Return rows.jsonl as tokens, through the cache of datasets."""
    from datasets import load_dataset

    # The cache hashes all that a function refers to, and args has other paths in each run.
    max_length = args.max_length

    def to_tokens(row: dict[str, str]) -> dict[str, list[int]]:
        is_gsm8k = "question" in row
        prompt = row["question" if is_gsm8k else "prompt"]
        completion = row["answer" if is_gsm8k else "completion"]
        messages = [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": completion},
        ]
        encoded = tokenizer.apply_chat_template(
            messages,
            return_dict=True,
            return_assistant_tokens_mask=True,
            truncation=True,
            max_length=max_length,
        )
        labels = []
        for token, of_answer in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True):
            labels.append(token if of_answer else -100)
        return {"input_ids": encoded["input_ids"], "labels": labels}

    rows = load_dataset("json", data_files=str(args.data / "rows.jsonl"), split="train")
    return rows.map(to_tokens, remove_columns=rows.column_names)


def train(trainer: Any, args: argparse.Namespace) -> None:
    """Train, and write the model and the metrics."""
    collator = CountingCollator(trainer.data_collator)
    trainer.data_collator = collator
    trainer.train()
    if not args.skip_save:
        trainer.save_model()
    per_step = args.gradient_accumulation_steps
    tokens = []
    for start in range(0, len(collator.tokens), per_step):
        tokens.append(sum(collator.tokens[start : start + per_step]))
    losses = {}
    for entry in trainer.state.log_history:
        if "loss" in entry:
            losses[entry["step"]] = entry["loss"]
    write_metrics(args.output_dir, tokens[: trainer.state.global_step], losses)
