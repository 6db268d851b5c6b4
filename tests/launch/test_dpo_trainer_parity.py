# SPDX-License-Identifier: Apache-2.0
"""On the same pairs recipes/llama_dpo.py has the losses, rewards and log-probabilities of TRL's DPO
and ORPO.

Same rows, order, optimizer and rate, a whole model and one with adapters. TRL reads the files
itself."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from launching import read_metrics, read_rows, recipe, write_rows

STEPS, BATCH, RATE, LENGTH = 4, 4, 3e-4, 192
REWARDS = ["rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"]
NAMES = ["loss", *REWARDS, "logps/chosen", "logps/rejected"]
LORA = {
    "r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "target_modules": "all-linear",
    "task_type": "CAUSAL_LM",
}


@pytest.fixture(scope="module")
def pairs(net_tiny, tmp_path_factory):
    """A tiny model without a begin token, which only ORPOTrainer puts before texts, and few pairs
    in all forms."""
    tiny, folder = net_tiny("llama_dpo"), tmp_path_factory.mktemp("pairs")
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    tokenizer.bos_token = None
    tokenizer.save_pretrained(folder / "model")
    AutoModelForCausalLM.from_pretrained(tiny / "model").save_pretrained(folder / "model")
    forms = {"explicit": [], "texts": [], "implicit texts": []}
    for row in read_rows(tiny / "data" / "train.jsonl")[: STEPS * BATCH]:
        explicit = {name: row[name] for name in ("prompt", "chosen", "rejected")}
        texts = {name: messages[0]["content"] for name, messages in explicit.items()}
        forms["explicit"].append(explicit)
        forms["texts"].append(texts)
        whole = {name: f"{texts['prompt']} {texts[name]}" for name in ("chosen", "rejected")}
        forms["implicit texts"].append(whole)
    for name, rows in forms.items():
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


def ours(model, rows, output_dir, *flags):
    words = ["--model_name_or_path", model, "--dataset_name", rows, "--output_dir", output_dir]
    words += ["--train_sampling_strategy", "sequential", "--max_length", LENGTH, "--save_steps", 0]
    words += ["--per_device_train_batch_size", BATCH, "--max_steps", STEPS]
    words += ["--optim", "adamw_torch", "--learning_rate", RATE, "--lr_scheduler_type", "constant"]
    recipe(*words, *flags, name="llama_dpo", code=0)
    return read_metrics(output_dir)[0]


def of_trl(model_dir, rows, output_dir, loss_type, lora=False, **options):
    """The logged lines of TRL's trainer."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import set_seed
    from trl import DPOConfig, DPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    set_seed(42)
    config, trainer = (ORPOConfig, ORPOTrainer) if loss_type == "orpo" else (DPOConfig, DPOTrainer)
    options |= {} if loss_type == "orpo" else {"loss_type": [loss_type]}
    arguments = config(
        output_dir=str(output_dir),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        max_length=LENGTH,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        max_grad_norm=1.0,
        bf16=False,
        use_cpu=True,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        gradient_checkpointing=False,
        **options,
    )
    trainer = trainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32"),
        args=arguments,
        train_dataset=Dataset.from_list(read_rows(rows)),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        peft_config=LoraConfig(**LORA) if lora else None,
    )
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs) == STEPS
    for name in NAMES:
        pairs = [(our[name], their[name]) for our, their in zip(ours, theirs, strict=True)]
        # fp32 has steps of 1e-4 at the log-probabilities of long answers, more than 1,000 nats
        assert all(abs(a - b) <= max(1e-4, 1e-6 * abs(b)) for a, b in pairs), (name, pairs)


@pytest.mark.parametrize("loss_type", ["sigmoid_norm", "ipo", "hinge", "orpo"])
def test_each_loss_is_that_of_trl(loss_type, pairs, tmp_path):
    rows = pairs / "texts.jsonl"
    flags = ["--loss_type", loss_type, "--beta", 0.2, "--max_logits_mib", 0.02]  # 16 tokens a piece
    lines = ours(pairs / "model", rows, tmp_path / "ours", *flags)
    assert_equal(lines, of_trl(pairs / "model", rows, tmp_path / "trl", loss_type, beta=0.2))
    first, last = (lines[number]["rewards/margins"] for number in (0, -1))
    assert abs(last - first) > 1e-3  # It learned something


@pytest.mark.parametrize("form", ["explicit", "implicit texts"])
def test_each_form_of_rows_and_adapters_give_what_trl_gives(form, pairs, tmp_path):
    rows, loss_type = pairs / f"{form}.jsonl", "sigmoid"
    lines = ours(pairs / "model", rows, tmp_path / "ours", "--use_peft")
    assert_equal(lines, of_trl(pairs / "model", rows, tmp_path / "trl", loss_type, lora=True))
