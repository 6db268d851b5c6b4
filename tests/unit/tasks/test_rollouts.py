# SPDX-License-Identifier: Apache-2.0
"""Answers to a prompt stay together, are drawn from the model's distribution whatever their batch,
and are compared with each other alone."""

import copy
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import AutoTokenizer, LlamaForCausalLM, LlamaForSequenceClassification

from core.batches import TokenCollator
from core.chat import ChatTemplate
from core.data import Rows
from core.engine import Layout
from core.exits import End
from fakes import rows_of_their_own, small_llama
from tasks import policy, rollouts

NAN = math.nan


# ---- Which answers a step has ----
def plan_of(rows=5, rank=0, ranks=1, **values):
    args = {
        "num_generations": 3,
        "num_iterations": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "train_sampling_strategy": "random",
        "num_train_epochs": 2,
        "max_steps": -1,
        "seed": 0,
    }
    layout = rows_of_their_own(ranks, rank)
    return rollouts.AnswerPlan(SimpleNamespace(**args | values), layout, 3 * rows)


def test_all_answers_to_a_prompt_are_in_one_step_and_each_epoch_has_each_prompt_once():
    plan = plan_of()
    assert (plan.steps_per_epoch, plan.total_steps) == (3, 6)
    for epoch in range(2):
        asked = []
        for step in range(3):
            numbers = sum(plan.micro_batches(3 * epoch + step + 1), [])
            prompts = [number // 3 for number in numbers[::3]]
            assert numbers == [3 * prompt + answer for prompt in prompts for answer in range(3)]
            asked += prompts
        assert sorted(asked) == [0, 1, 2, 3, 4]
    assert [len(part) for part in plan.micro_batches(3)] == [2, 1, 0]  # of the last prompt


def test_ranks_have_the_answers_of_one_process():
    for rollout in range(1, 7):
        whole = plan_of().micro_batches(rollout)
        parts = [plan_of(rank=rank, ranks=3, gradient_accumulation_steps=1) for rank in range(3)]
        assert [plan.micro_batches(rollout)[0] for plan in parts] == whole


def test_several_steps_train_on_the_same_answers():
    plan = plan_of(num_iterations=2)
    assert (plan.steps_per_epoch, plan.total_steps) == (6, 12)
    assert [plan.rollout_of(step) for step in range(1, 6)] == [1, 1, 2, 2, 3]
    assert plan.micro_batches(4) == plan_of().micro_batches(4)


def test_a_step_that_would_split_the_answers_to_a_prompt_is_refused(capsys):
    plan_of().check()
    with pytest.raises(End):
        plan_of(num_generations=4).check()
    assert "does not divide the 6 answers" in capsys.readouterr().err


# ---- Sampling ----
@pytest.fixture(scope="module")
def tokenizer(net_tiny):
    return AutoTokenizer.from_pretrained(net_tiny("llama_grpo") / "model")


@pytest.fixture(scope="module")
def sampling(tokenizer):
    """Eight prompts, a model that recomputes activations, and what samples answers to them."""
    torch.manual_seed(0)
    config = small_llama(vocab_size=len(tokenizer), initializer_range=0.2)
    model = LlamaForCausalLM(config)
    model.activation_checkpointing_enable({"use_reentrant": False})
    # Filters and penalties that the loss knows nothing of
    model.generation_config.update(do_sample=True, top_k=1, repetition_penalty=3.0)
    args = SimpleNamespace(
        seed=0,
        num_generations=2,
        temperature=0.8,
        max_completion_length=12,
        generation_batch=None,
        gather_for_generation=True,
        EXTRAS=(),
    )
    prompts = [list(range(9, 9 + length)) for length in (3, 9, 5, 7, 4, 4, 8, 6)]
    rows = {"input_ids": prompts, "row": range(1, 9), "columns": ["{}"] * 8}
    dataset = Dataset.from_dict(rows).with_format("numpy")
    token_loss = SimpleNamespace(return_logits=lambda: None)
    layout = Layout(Accelerator(cpu=True))
    sampler = rollouts.Sampler(args, None, layout, tokenizer, model, token_loss)
    return sampler, model, Rows(dataset, "", ()), args


def ids_of(answers):
    return {answer.number: answer.ids for answer in answers}


def test_an_answer_is_the_same_alone_and_in_any_batch_and_another_in_each_rollout(sampling):
    sampler, model, rows, args = sampling
    numbers = list(range(16))
    state = torch.get_rng_state()
    whole = ids_of(sampler.sample(model, rows, numbers, 16, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    args.generation_batch = 3
    assert ids_of(sampler.sample(model, rows, numbers, 16, 1)) == whole
    args.generation_batch = None
    for number in numbers:
        assert ids_of(sampler.sample(model, rows, [number], 1, 1)) == {number: whole[number]}
    assert len({tuple(ids) for ids in whole.values()}) == 16
    assert ids_of(sampler.sample(model, rows, numbers, 16, 2)) != whole


def test_answers_end_with_the_token_that_ends_them_or_are_truncated(sampling):
    sampler, model, rows, args = sampling
    ends = sampler._ends
    answers = sampler.sample(model, rows, list(range(16)) * 4, 64, 3)
    for answer in answers:
        assert answer.is_truncated == (answer.ids[-1] not in ends)
        assert not ends & set(answer.ids[:-1])
        assert len(answer.ids) == args.max_completion_length or not answer.is_truncated


def test_a_rank_without_answers_takes_part(sampling):
    sampler, model, rows, _ = sampling
    assert sampler.sample(model, rows, [], 4, 1) == []


def test_tokens_are_drawn_from_the_softmax_of_logits_divided_by_the_temperature():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(4000, 4)
    noise = rollouts.RowNoise(range(4000), 0.5, torch.device("cpu"))
    drawn = noise(torch.empty(0), logits).argmax(-1)
    shares = torch.bincount(drawn, minlength=4) / 4000
    expected = (logits[0] / 0.5).softmax(-1)
    # Four deviations of a share of 4,000 draws
    assert (shares - expected).abs().max() < 4 * math.sqrt(0.25 / 4000)


# ---- Rows ----
def test_a_text_is_what_the_user_says_and_columns_reach_the_rewards(tokenizer):
    template = ChatTemplate(tokenizer)
    row = {"question": "abc", "answer": "7", "prompt": None}
    prepared = rollouts.tokenize_prompt(row, row["question"], template, 99)
    messages = [{"role": "user", "content": "abc"}]
    same = rollouts.tokenize_prompt(row, messages, template, 99)
    assert prepared["input_ids"] == same["input_ids"]
    assert json.loads(prepared["columns"]) == row | {"prompts": "abc"}
    with pytest.raises(ValueError, match="--max_prompt_length is 2"):
        rollouts.tokenize_prompt(row, "abc", template, 2)


# ---- Rewards ----
def answer_to(prompt, text, number=0, length=3, **columns):
    row = {"columns": json.dumps({"prompts": prompt, **columns}), "row": number + 1}
    row["input_ids"] = np.array([5, 6])
    return rollouts.Answer(number, row, [7] * length, length == 3, text)


def rewards_of(*functions, weights=(1.0,), model=None):
    args = SimpleNamespace(reward_weights=list(weights), reward_model_name_or_path=model)
    args.dtype = "float32"
    args.per_device_eval_batch_size = 2
    return policy.Rewards(functions, args, Accelerator(cpu=True))


def test_functions_get_what_they_get_in_trl():
    got = {}

    def judge(prompts, completions, completion_ids, **columns):
        got.update(prompts=prompts, completions=completions, ids=completion_ids, **columns)
        return [1, None]

    asked = [{"role": "user", "content": "b"}]
    answers = [answer_to("a", "x", level=3), answer_to(asked, "y")]
    rewards_of(judge).judge(answers)
    assert got["prompts"] == ["a", asked]
    assert got["completions"] == ["x", [{"role": "assistant", "content": "y"}]]
    assert got["level"] == [3, None] and got["ids"] == [[7] * 3] * 2
    assert answers[0].rewards == [1.0] and math.isnan(answers[1].rewards[0])


def test_what_a_function_raises_names_the_row():
    def judge(completions, **columns):
        return [float(text) for text in completions]

    answers = [answer_to("a", "1"), answer_to("b", "one", number=4)]
    with pytest.raises(ValueError) as caught:
        rewards_of(judge).judge(answers)
    [note] = caught.value.__notes__
    assert "judge" in note and "row 5" in note and "'one'" in note


def test_advantages_are_distances_from_the_mean_of_the_answers_to_the_same_prompt():
    groups = torch.tensor([[1.0, 0.0, 0.0], [2.0, 2.0, 2.0], [NAN, 1.0, 3.0], [NAN, NAN, NAN]])
    none = policy.advantages_of(groups, "none")
    expected = [[2 / 3, -1 / 3, -1 / 3], [0.0] * 3, [0.0, -1.0, 1.0], [0.0] * 3]
    assert torch.allclose(none, torch.tensor(expected))
    scaled = policy.advantages_of(groups, "group")
    deviations = torch.tensor([[math.sqrt(1 / 3)], [0.0], [math.sqrt(2)], [1.0]])
    assert torch.allclose(scaled, none / (deviations + 1e-4))
    of_batch = policy.advantages_of(groups, "batch")
    known = groups[~groups.isnan()]
    assert torch.allclose(of_batch, none / (known.std() + 1e-4))


def test_rewards_are_weighted_and_an_answer_that_no_function_judges_has_none():
    answers = [answer_to("a", text) for text in ("1", "2", "3")]
    for answer, found in zip(answers, ([1.0, NAN], [NAN, NAN], [1.0, 3.0]), strict=True):
        answer.rewards = found
    rewards = rewards_of(len, max, weights=[1.0, 0.5])
    total = rewards.weigh(answers)
    assert total[::2].tolist() == [1.0, 2.5] and total[1].isnan()
    assert str(rewards) == "1 len + 0.5 max"


@pytest.fixture(scope="module")
def reward_model(tokenizer, tmp_path_factory):
    """A folder with the reward model of another template, and one without the head of one."""
    folder = tmp_path_factory.mktemp("reward")
    torch.manual_seed(0)
    config = small_llama(vocab_size=len(tokenizer), num_labels=1, initializer_range=0.5)
    config.pad_token_id = tokenizer.pad_token_id
    LlamaForSequenceClassification(config).save_pretrained(folder / "model")
    LlamaForCausalLM(config).save_pretrained(folder / "no_head")
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{% for m in messages %}{{ m.role + ' ' + m.content + '.' }}{% endfor %}"
    for name in ("model", "no_head"):
        other.save_pretrained(folder / name)
    return folder


def test_a_reward_model_reads_each_answer_by_its_own_template_whatever_its_batch(reward_model):
    asked = [{"role": "system", "content": "y"}, {"role": "user", "content": "b c"}]
    answers = [answer_to("a", "x"), answer_to(asked, "long " * 9), answer_to("d", "")]
    rewards_of(model=reward_model / "model").judge(answers)
    own = AutoTokenizer.from_pretrained(reward_model / "model")
    model = LlamaForSequenceClassification.from_pretrained(reward_model / "model")
    texts = ["user a.assistant x.", f"system y.user b c.assistant {'long ' * 9}."]
    for answer, text in zip(answers, [*texts, "user d.assistant ."], strict=True):
        inputs = own(text, add_special_tokens=False, return_tensors="pt")
        expected = model(inputs["input_ids"]).logits.item()
        # In a batch of other lengths
        assert answer.rewards == [pytest.approx(expected, abs=1e-5)]
    assert len({answer.rewards[0] for answer in answers}) == 3


def test_a_model_without_the_head_of_a_reward_is_refused(reward_model, capsys):
    with pytest.raises(End):
        rewards_of(model=reward_model / "no_head")
    assert "has no head of one reward" in capsys.readouterr().err


def test_metrics_have_the_names_and_values_of_trl(tmp_path):
    answers = [answer_to("a", "1", length=1), answer_to("a", "", number=1)]
    for answer, rewards in zip(answers, ([1.0, 2.0], [0.0, NAN]), strict=True):
        answer.rewards = rewards
    one, two = SimpleNamespace(__name__="one"), SimpleNamespace(__name__="two")
    metrics = rewards_of(one, two, weights=[1.0, 0.5]).metrics_of(answers)
    assert metrics["reward"] == 1.0 and metrics["reward_std"] == pytest.approx(math.sqrt(2))
    assert metrics["rewards/one/mean"] == 0.5 and metrics["rewards/two/mean"] == 2.0
    assert (metrics["completions/mean_length"], metrics["completions/clipped_ratio"]) == (2, 0.5)
    policy.write_samples(tmp_path / "samples.jsonl", 3, answers, ["one", "two"])
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert json.loads(lines[1]) == {
        "step": 3,
        "row": 2,
        "prompt": "a",
        "answer": "",
        "is_truncated": True,
        "one": 0.0,
        "two": None,
    }


# ---- Batches ----
def test_a_batch_trains_on_the_tokens_of_its_answers_but_not_of_truncated_ones():
    answers = [answer_to("a", "1", length=1), answer_to("a", "", number=1)]
    answers[0].advantage, answers[1].advantage = 0.5, -0.5
    args = SimpleNamespace(mask_truncated_completions=True)
    batch = policy.make_batch(TokenCollator(0), answers, args)
    assert batch["inputs"]["input_ids"].tolist() == [[5, 6, 7, 0, 0], [5, 6, 7, 7, 7]]
    assert batch["targets"].tolist() == [7] * 4 and batch["positions"].tolist() == [1, 6, 7, 8]
    assert batch["mask"].tolist() == [[1, 0, 0], [0, 0, 0]]
    assert batch["advantages"].tolist() == [0.5, -0.5]
    assert batch["counts"].tolist() == [2, 1, 8]
    args.mask_truncated_completions = False
    kept = policy.make_batch(TokenCollator(0), answers, args)
    assert kept["mask"].sum() == 4
    empty = policy.make_batch(TokenCollator(0), [], args)
    assert empty["counts"].tolist() == [0, 0, 0] and empty["mask"].shape == (0, 1)
