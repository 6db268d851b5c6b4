# SPDX-License-Identifier: Apache-2.0
"""On the same pairs recipes/llama_dpo.py has the losses, rewards and log-probabilities of TRL's DPO
and ORPO.

Same rows, made and real ones, order, optimizer and rate, a whole model and one with adapters. TRL
reads the files itself."""

import json
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from launching import REPO, read_metrics, run

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
def pairs(tiny_of, tmp_path_factory):
    """A tiny model without a begin token, which only ORPOTrainer puts before texts, and few pairs
    in all forms."""
    tiny, folder = tiny_of("llama_dpo"), tmp_path_factory.mktemp("pairs")
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    tokenizer.bos_token = None
    tokenizer.save_pretrained(folder / "model")
    AutoModelForCausalLM.from_pretrained(tiny / "model").save_pretrained(folder / "model")
    rows = [
        json.loads(line)
        for line in (tiny / "data" / "train.jsonl").read_text().splitlines()[: STEPS * BATCH]
    ]
    forms = {
        "explicit": [
            {name: row[name] for name in ("prompt", "chosen", "rejected")} for row in rows
        ],
        "implicit": [
            {name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in rows
        ],
        "texts": [
            {name: row[name][0]["content"] for name in ("prompt", "chosen", "rejected")}
            for row in rows
        ],
    }
    forms["implicit texts"] = [
        {name: f"{row['prompt']} {row[name]}" for name in ("chosen", "rejected")}
        for row in forms["texts"]
    ]
    for name, rows in forms.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def ours(model, rows, output_dir, *flags, max_length=LENGTH):
    done = run(
        sys.executable,
        REPO / "recipes" / "llama_dpo.py",
        "--model_name_or_path",
        model,
        "--dataset_name",
        rows,
        "--train_sampling_strategy",
        "sequential",
        "--max_length",
        max_length,
        "--output_dir",
        output_dir,
        "--per_device_train_batch_size",
        BATCH,
        "--max_steps",
        STEPS,
        "--save_steps",
        0,
        "--learning_rate",
        RATE,
        "--lr_scheduler_type",
        "constant",
        "--optim",
        "adamw_torch",
        *flags,
    )
    assert done.returncode == 0, done.output[-3000:]
    return read_metrics(output_dir)[0]


def of_trl(model_dir, rows, output_dir, loss_type, lora=False, max_length=LENGTH, **options):
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
        max_length=max_length,
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
        train_dataset=Dataset.from_list(
            [json.loads(line) for line in rows.read_text().splitlines()]
        ),
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


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm", "ipo", "hinge", "orpo"])
def test_each_loss_is_that_of_trl(loss_type, pairs, tmp_path):
    rows = pairs / "texts.jsonl"
    flags = [
        "--loss_type",
        loss_type,
        "--beta",
        0.2,
        "--max_logits_mib",
        0.02,
    ]  # pieces of 16 tokens
    lines = ours(pairs / "model", rows, tmp_path / "ours", *flags)
    assert_equal(lines, of_trl(pairs / "model", rows, tmp_path / "trl", loss_type, beta=0.2))
    assert (
        abs(lines[-1]["rewards/margins"] - lines[0]["rewards/margins"]) > 1e-3
    )  # it learned something


@pytest.mark.parametrize("form", ["explicit", "implicit", "implicit texts"])
def test_each_form_of_rows_and_adapters_give_what_trl_gives(form, pairs, tmp_path):
    rows, loss_type = pairs / f"{form}.jsonl", "sigmoid"
    lines = ours(pairs / "model", rows, tmp_path / "ours", "--use_peft")
    assert_equal(lines, of_trl(pairs / "model", rows, tmp_path / "trl", loss_type, lora=True))


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_on_real_pairs_the_numbers_are_those_of_trl(loss_type, gsm8k, gsm8k_model, tmp_path):
    if not (gsm8k / "preferences.jsonl").is_file():
        pytest.skip("the preferences are not at hand (../shared/data/gsm8k/preferences.jsonl)")
    rows = tmp_path / "pairs.jsonl"
    rows.write_text(
        "".join(
            (gsm8k / "preferences.jsonl").read_text().splitlines(keepends=True)[: STEPS * BATCH]
        )
    )
    lines = ours(gsm8k_model, rows, tmp_path / "ours", "--loss_type", loss_type, max_length=512)
    theirs = of_trl(gsm8k_model, rows, tmp_path / "trl", loss_type, max_length=512)
    # Before the first update policy and reference are one model, and all rewards are 0 but for
    # rounding: which of two is the larger is chance
    assert max(abs(line[0][name]) for line in (lines, theirs) for name in REWARDS[:3]) < 1e-3
    lines[0]["rewards/accuracies"] = theirs[0]["rewards/accuracies"]
    assert_equal(lines, theirs)
    assert (
        abs(lines[-1]["rewards/margins"] - lines[0]["rewards/margins"]) > 1e-3
    )  # it learned something
