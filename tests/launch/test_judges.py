# SPDX-License-Identifier: Apache-2.0
"""The recipe's figures are those of transformers' Trainer and of a loss by hand in fp64.

All strategies could be wrong alike, and so could the golden rows, which were recorded from the
recipes. So here others judge, on the rows of the golden runs: rows are tokenized and labeled by
nothing but transformers' chat template, a third of them with two answers. TRL judges DPO
(test_dpo_trainer_parity.py), seqeval the tags
(tests/unit/tasks/test_entities.py).
"""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
    set_seed,
)

import net
from net import Cell

SEQUENTIAL = ("--train_sampling_strategy", "sequential")


def labeled(messages, tokenizer):
    """The tokens of a conversation, and as labels those of the answers with their ends of turn."""

    def tokens_of(some, **options):
        return tokenizer.apply_chat_template(some, return_dict=False, **options)

    tokens = tokens_of(messages)
    labels = [-100] * len(tokens)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(tokens_of(messages[:number], add_generation_prompt=True))
            end = len(tokens_of(messages[: number + 1]))
            labels[start:end] = tokens[start:end]
    return {"input_ids": tokens, "labels": labels}


def rows_of(tiny, split, tokenizer):
    lines = (tiny / "data" / f"{split}.jsonl").read_text().splitlines()
    return [labeled(json.loads(line)["messages"], tokenizer) for line in lines]


def run_of_trainer(tiny, folder):
    """The steps of transformers' Trainer with the job of the golden runs."""
    from datasets import Dataset

    set_seed(42)
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    model = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype="float32")
    rows = Dataset.from_list(rows_of(tiny, "train", tokenizer))
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=4,
        max_steps=8,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        optim="adamw_torch",
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, DataCollatorForSeq2Seq(tokenizer), rows)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def finished(net_tiny, once):
    """The folder of a run whose rows come in the order of their file."""

    def launch(folder):
        net.launch(Cell(), net_tiny("llama"), folder, *SEQUENTIAL).expect(0)

    return once("judged", launch)


def test_steps_are_those_of_the_trainer(finished, net_tiny, tmp_path):
    tiny = net_tiny("llama")
    ours = [line for line in net.metrics(finished) if "loss" in line]
    theirs = run_of_trainer(tiny, tmp_path / "trainer")
    assert len(ours) == len(theirs) == 8
    for name in ("loss", "grad_norm", "learning_rate"):
        found = [line[name] for line in ours]
        assert found == pytest.approx([line[name] for line in theirs], rel=1e-5, abs=1e-12), name


def loss_in_fp64(model, rows):
    """The cross-entropy summed over the labels of rows, by hand, and their number."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        for place, label in enumerate(row["labels"][1:]):
            if label != -100:
                total += logits[place].logsumexp(0) - logits[place][label]
                count += 1
    return (total / count).item()


def test_losses_are_those_by_hand_in_fp64(finished, net_tiny):
    """The first step has a rate of 0: its loss is the base's. The highest one is the result's."""
    tiny = net_tiny("llama")
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    base = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype="float64")
    first = net.metrics(finished)[0]
    by_hand = loss_in_fp64(base, rows_of(tiny, "train", tokenizer)[:12])
    assert first["loss"] == pytest.approx(by_hand, rel=1e-6)
    saved = AutoModelForCausalLM.from_pretrained(finished, dtype="float64")
    largest = max(line["eval_loss"] for line in net.metrics(finished) if "eval_loss" in line)
    assert largest == pytest.approx(loss_in_fp64(saved, rows_of(tiny, "test", tokenizer)), rel=1e-6)
