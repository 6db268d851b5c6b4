# SPDX-License-Identifier: Apache-2.0
"""On the same pairs recipes/llama_reward.py has the tokens, losses and gradients of TRL's
RewardTrainer, and its result gives the rewards that its evaluation had, and no answers.
"""

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

from core.chat import ChatTemplate
from core.data import Rows
from launching import data_of, read_metrics, read_rows, recipe, script
from tasks.rewards import (
    METRICS,
    RewardCollator,
    leave_out_long,
    pair_losses,
    rewards_of,
    sums_of,
    tokenize_whole_answers,
)

LENGTH = 64  # One of the pairs of each form is longer
# Of the forms that TRL takes: {name: (the rows are texts, the answers begin with the prompt)}
FORMS = {
    "conversations": (False, False),
    "whole conversations": (False, True),
    "texts": (True, False),
    "whole texts": (True, True),
}


@pytest.fixture(scope="module")
def tiny(net_tiny):
    return net_tiny("llama_reward")


def pairs_of(tiny, form, has_margins):
    """Seven pairs in a form, of which one is too long."""
    are_texts, are_whole = FORMS[form]
    pairs = []
    for number, row in enumerate(read_rows(tiny / "data" / "train.jsonl")[:7]):
        pair = {name: row[name] for name in ("prompt", "chosen", "rejected")}
        if number == 3:
            pair["rejected"] = [{"role": "assistant", "content": "very " * LENGTH}]
        if are_texts:
            pair = {name: messages[0]["content"] + " " for name, messages in pair.items()}
        if are_whole:
            prompt = pair.pop("prompt")
            pair = {name: prompt + answer for name, answer in pair.items()}
        pairs.append(pair | ({"margin": number / 4} if has_margins else {}))
    return pairs


def of_trl(pairs, tiny, model, center_rewards_coefficient, folder):
    """TRL's rows, its loss of all of them, whose gradients the model has then, and its metrics."""
    from trl import RewardConfig, RewardTrainer

    arguments = RewardConfig(
        output_dir=str(folder),
        max_length=LENGTH,
        center_rewards_coefficient=center_rewards_coefficient or None,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
    )
    trainer = RewardTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(pairs),
        processing_class=AutoTokenizer.from_pretrained(tiny / "model"),
    )
    rows = list(trainer.train_dataset)
    model.train()
    loss = trainer.compute_loss(model, trainer.data_collator(rows))
    loss.backward()
    return rows, loss, [trainer._metrics["train"][name][0] for name in METRICS]


def new_model(tiny):
    torch.manual_seed(0)
    options = {"num_labels": 1, "dtype": "float32"}
    return AutoModelForSequenceClassification.from_pretrained(tiny / "model", **options)


@pytest.mark.parametrize(
    ("form", "has_margins", "coefficient"),
    [
        ("conversations", True, 0.01),
        ("whole conversations", False, 0.01),
        ("texts", True, 0.0),
        ("whole texts", False, 0.0),
    ],
)
def test_tokens_losses_and_gradients_are_those_of_trl(
    form, has_margins, coefficient, tiny, tmp_path
):
    pairs = pairs_of(tiny, form, has_margins)
    theirs, ours = new_model(tiny), new_model(tiny)
    rows, expected, metrics = of_trl(pairs, tiny, theirs, coefficient, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    template = ChatTemplate(tokenizer)
    prepared = [tokenize_whole_answers(pair, template, {}) | {"row": 1} for pair in pairs]
    whole = Rows(Dataset.from_list(prepared).with_format("numpy"), "7", ())
    kept = leave_out_long(whole, LENGTH)
    assert kept.notes == "7; 1 longer than --max_length left out"
    for name in ("chosen_ids", "rejected_ids"):
        assert [row[name].tolist() for row in kept.dataset] == [row[name] for row in rows]
    batch = RewardCollator(tokenizer)(kept.dataset, [[number] for number in range(6)])
    ours.train()
    rewards = rewards_of(ours, batch)
    loss = pair_losses(rewards, batch["margins"], coefficient).mean()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (sums_of(rewards) / 6).tolist() == pytest.approx(metrics, rel=1e-6)
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        # The same operations, but for the order in which six terms are added
        assert (one.grad - other.grad).norm() <= 1e-6 * other.grad.norm(), name


def without_pad_token(tiny, folder):
    """A base whose rows end with the token that pads them, as that of TRL does without one."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(tiny / "model").save_pretrained(folder)
    return folder


def merged(tiny, folder):
    """Adapters with their base, as docs/recipes.md merges them."""
    config = AutoConfig.from_pretrained(folder)
    base = AutoModelForSequenceClassification.from_pretrained(tiny / "model", config=config)
    model = PeftModel.from_pretrained(base, folder).merge_and_unload()
    model.save_pretrained(folder / "merged")
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder / "merged")
    return folder / "merged"


@pytest.mark.parametrize("how", ["whole", "no pad token", "LoRA"])
def test_a_pipeline_gives_the_rewards_of_the_last_evaluation(how, tiny, tmp_path):
    folder = tmp_path / "run"
    words = [*data_of(tiny), "--output_dir", folder, "--max_steps", 3, "--learning_rate", 1e-3]
    if how == "no pad token":
        words += ["--model_name_or_path", without_pad_token(tiny, tmp_path / "base")]
    if how == "LoRA":
        words.append("--use_peft")
    recipe(*words, name="llama_reward", code=0)
    _, evaluations = read_metrics(folder)
    if how == "LoRA":
        folder = merged(tiny, folder)
    score = pipeline("text-classification", str(folder), device="cpu")
    texts = []
    for row in read_rows(tiny / "data" / "test.jsonl"):
        for name in ("chosen", "rejected"):
            messages = row["prompt"] + row[name]
            texts.append(score.tokenizer.apply_chat_template(messages, tokenize=False))
    for side in ("right", "left"):
        score.tokenizer.padding_side = side
        # The template has written the begin token
        found = score(texts, batch_size=4, add_special_tokens=False)
        rewards = torch.tensor([one["score"] for one in found]).view(-1, 2).T
        means = sums_of(rewards) / rewards.shape[1]
        expected = [evaluations[-1][f"eval_{name}"] for name in METRICS]
        # fp32 in batches of other lengths
        assert means.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    if how == "whole":
        done = script("generate", folder, "--prompt", "Why?", code=65)
        assert "has no lm_head.weight" in done.output
