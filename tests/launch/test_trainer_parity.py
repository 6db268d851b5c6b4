# SPDX-License-Identifier: Apache-2.0
"""On real rows the recipe's losses are those of transformers' Trainer: same rows, order, optimizer
and rate."""

import json

import pytest

from launching import read_metrics, recipe

STEPS, BATCH, RATE, LENGTH = 20, 4, 5e-4, 512


def trainer_losses(model_dir, rows_path, output_dir):
    """Losses of 20 steps of transformers' Trainer; rows are tokenized here, not by the recipe."""
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    set_seed(42)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32")
    rows = []
    for line in rows_path.read_text().splitlines()[: STEPS * BATCH]:
        row = json.loads(line)
        turns = [{"role": "user", "content": row["question"]}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        turns.append({"role": "assistant", "content": row["answer"]})
        full = tokenizer.apply_chat_template(turns, return_dict=False)
        end = max(i for i, token in enumerate(full) if token in tokenizer.all_special_ids) + 1
        assert full[: len(prompt)] == prompt
        labels = [-100] * len(prompt) + full[len(prompt) : end] + [-100] * (len(full) - end)
        rows.append({"input_ids": full[:LENGTH], "labels": labels[:LENGTH]})
    arguments = TrainingArguments(
        output_dir=str(output_dir),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        optim="adamw_torch",
        use_cpu=True,
        max_grad_norm=1.0,
    )
    trainer = Trainer(model, arguments, DataCollatorForSeq2Seq(tokenizer), Dataset.from_list(rows))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_losses_equal_those_of_the_trainer(gsm8k, gsm8k_model, tmp_path):
    rows = gsm8k / "train.jsonl"
    words = ["--model_name_or_path", gsm8k_model, "--dataset_name", rows]
    words += ["--output_dir", tmp_path / "run", "--train_sampling_strategy", "sequential"]
    words += ["--per_device_train_batch_size", BATCH, "--max_steps", STEPS]
    words += ["--learning_rate", RATE, "--lr_scheduler_type", "constant"]
    words += ["--max_length", LENGTH, "--optim", "adamw_torch"]
    done = recipe(*words)
    assert done.returncode == 0, done.output[-3000:]
    ours = [line["loss"] for line in read_metrics(tmp_path / "run")[0]]
    theirs = trainer_losses(gsm8k_model, rows, tmp_path / "trainer")
    assert len(ours) == len(theirs) == STEPS
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert ours[-1] < ours[0] - 1
