# SPDX-License-Identifier: Apache-2.0
"""On the same answers recipes/llama_grpo.py has losses, gradients and metrics of TRL's GRPOTrainer,
and its reward rises under every engine. Runs that are stopped are in test_chains.py."""

import itertools
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from core.batches import TokenCollator
from launching import (
    REPO,
    data_of,
    edit_json,
    errors_of,
    read_metrics,
    read_rows,
    recipe,
    rehearse,
)
from tasks.policy import LOGGED, LogpsInHead, make_batch, policy_losses, sum_of_losses
from tasks.rollouts import Answer

CELLS = [
    *itertools.product(
        ["grpo", "dr_grpo", "dapo"],
        ["token", "sequence"],
        [0.0, 0.04],  # beta
        [False, True],  # an answer is truncated, and masked
        [False, True],  # the answers are from an older policy
    )
]
LONGEST, ANSWERS, TEMPERATURE = 9, 4, 0.7
NAMES = ["entropy", *LOGGED]


@pytest.fixture(scope="module")
def tiny(net_tiny):
    return net_tiny("llama_grpo")


def model_of(tiny, moved=0.0):
    """The tiny model, or another policy near it."""
    model = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype="float32")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(moved * torch.randn(weight.shape, generator=generator))
    return model.train()


def answers_of(seed, is_truncated):
    """Four answers of several lengths to prompts of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    answers = []
    for number, (length, size) in enumerate([(7, 9), (4, 4), (7, 1), (5, 6)]):
        prompt, ids = (torch.randint(9, 250, (n,), generator=generator) for n in (length, size))
        row = {"input_ids": prompt.numpy(), "row": np.int64(number)}
        answers.append(Answer(number, row, ids.tolist(), is_truncated and number == 0, ""))
    for answer, advantage in zip(answers, torch.randn(ANSWERS, generator=generator), strict=True):
        answer.advantage = advantage.item()
    return answers


def inputs_of_trl(answers):
    """The same answers as TRL pads them: prompts on the left, and no attention to masked ones."""
    width = max(len(answer.row["input_ids"]) for answer in answers)
    shape = {"prompt": (ANSWERS, width), "completion": (ANSWERS, LONGEST)}
    found = {}
    for name, size in shape.items():
        found |= {f"{name}_ids": torch.zeros(size).long(), f"{name}_mask": torch.zeros(size).long()}
    for number, answer in enumerate(answers):
        prompt, ids = torch.tensor(answer.row["input_ids"]), torch.tensor(answer.ids)
        found["prompt_ids"][number, width - len(prompt) :] = prompt
        found["prompt_mask"][number, width - len(prompt) :] = 1
        found["completion_ids"][number, : len(ids)] = ids
        found["completion_mask"][number, : len(ids)] = not answer.is_truncated
    return found | {"advantages": torch.tensor([answer.advantage for answer in answers])}


def trainer_of(model, tiny, folder, args):
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        output_dir=str(folder),
        loss_type=args.loss_type,
        importance_sampling_level=args.importance_sampling_level,
        epsilon=args.epsilon,
        epsilon_high=args.epsilon_high,
        temperature=args.temperature,
        max_completion_length=LONGEST,
        num_generations=2,
        per_device_train_batch_size=ANSWERS,
        gradient_accumulation_steps=2,
        num_iterations=2,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        use_cpu=True,
    )
    trainer = GRPOTrainer(
        model=model,
        args=arguments,
        processing_class=AutoTokenizer.from_pretrained(tiny / "model"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["ab", "cd"]}),
    )
    # Set afterwards, since it would load the reference by its name on the hub
    trainer.args.beta = trainer.beta = args.beta
    trainer.current_gradient_accumulation_steps = 2
    return trainer


@pytest.mark.parametrize(("loss_type", "level", "beta", "is_truncated", "is_old"), CELLS)
def test_loss_gradients_and_metrics_are_those_of_trl(
    loss_type, level, beta, is_truncated, is_old, tiny, tmp_path
):
    args = SimpleNamespace(
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=beta,
        epsilon=0.2,
        epsilon_high=0.28,
        temperature=TEMPERATURE,
        max_completion_length=LONGEST,
        max_logits_mib=0.01,  # several pieces
        mask_truncated_completions=True,
    )
    theirs, ours, other = model_of(tiny), model_of(tiny), model_of(tiny, moved=0.02)
    trainer = trainer_of(theirs, tiny, tmp_path, args)
    token_loss = LogpsInHead(ours, args, torch.device("cpu"))
    of_other = LogpsInHead(other, args, torch.device("cpu"))
    batches = []
    for seed, cuts in ((10, is_truncated), (11, False)):
        answers = answers_of(seed, cuts)
        batch = make_batch(TokenCollator(0), answers, args)
        with torch.no_grad():
            batch["reference"], _ = of_other.of_answers(other, batch)
            batch["reference"] *= 0.9
        batches.append((batch, inputs_of_trl(answers)))
    num_tokens = sum(int(batch["mask"].sum()) for batch, _ in batches)
    expected = loss = 0.0
    sums = torch.zeros(4)
    for batch, inputs in batches:
        logps, entropies = token_loss.of_answers(ours, batch)
        old = logps.detach()
        if is_old:
            with torch.no_grad():
                old, _ = of_other.of_answers(other, batch)
            inputs["old_per_token_logps"] = old
        inputs["ref_per_token_logps"] = batch["reference"]
        inputs["num_items_in_batch"] = torch.tensor(float(num_tokens))
        part = trainer._compute_loss(theirs, inputs)
        part.backward()
        expected += part.item()
        losses, logged = policy_losses(logps, old, batch, args)
        counts = torch.tensor(2 * ANSWERS), torch.tensor(num_tokens)
        part = sum_of_losses(losses, batch["mask"], *counts, args)
        part.backward()
        loss += part.item()
        sums += (torch.stack([entropies, *logged]).detach() * batch["mask"]).sum((1, 2))
        # TRL averages ratios of whole answers over these, and all else over tokens
        metrics = trainer._metrics["train"]
    assert loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for (name, one), two in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        # Other kernels for lines that are padded on the other side
        assert (one.grad - two.grad).norm() <= 1e-5 * two.grad.norm(), name
    if level == "token":
        of_batches = [int(batch["mask"].sum()) for batch, _ in batches]
        for name, value in zip(NAMES, (sums / num_tokens).tolist(), strict=True):
            means = metrics.get(name, [0.0, 0.0])
            mean = np.dot(means, of_batches) / num_tokens
            assert value == pytest.approx(mean, rel=1e-5, abs=1e-6), name


# ---- Runs ----
# From a random model, which first learns to say a number at all
RUN = ["--max_steps", 8, "--learning_rate", 3e-3, "--reward_weights", 1, 1, "--eval_strategy", "no"]
RUN += ["--num_generations", 4, "--max_completion_length", 4]
# {YAML: (answers per rank and micro-batch, accumulation)} of a step of 48 answers on two ranks
CUTS = {"ddp": (12, 2), "fsdp2_full_shard": (24, 1), "deepspeed_zero3": (12, 2)}
COMPARED = ("reward", "entropy", "completions/mean_length", "grad_norm")


def train(folder, tiny):
    words = [*data_of(tiny), *RUN, "--per_device_train_batch_size", 48, "--output_dir", folder]
    recipe(*words, name="llama_grpo", code=0)


def figures_of(folder):
    return [[line[name] for line in read_metrics(folder)[0]] for name in COMPARED]


@pytest.mark.parametrize("config", CUTS)
def test_the_reward_rises_under_each_engine_as_in_one_process(config, tiny, once, tmp_path):
    expected = figures_of(once("grpo_in_one_process", partial(train, tiny=tiny)))
    batch, accumulation = CUTS[config]
    words = [*data_of(tiny), *RUN, "--output_dir", tmp_path]
    words += ["--per_device_train_batch_size", batch, "--gradient_accumulation_steps", accumulation]
    script = REPO / "recipes" / "llama_grpo.py"
    rehearse(config, *words, num_processes=2, script=script, mixed_precision="no", code=0)
    found = figures_of(tmp_path)
    for name, one, other in zip(COMPARED, found, expected, strict=True):
        # The same answers, whose gradients are added in another order
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6), name
    rewards = found[0]
    assert rewards[0] < 0.3 and rewards[-1] > 0.6


# ---- Ranks whose answers end at different lengths ----
ENDING = ["--max_steps", 4, "--num_generations", 2, "--max_completion_length", 24]
ENDING += ["--train_sampling_strategy", "sequential", "--eval_strategy", "no", "--logging_steps", 1]
NUM_ENDS = 40  # of about 270 tokens: an answer has a mean of seven


@pytest.fixture(scope="module")
def ending(tiny, tmp_path_factory):
    """The tiny model with many tokens that end an answer."""
    folder = shutil.copytree(tiny, tmp_path_factory.mktemp("ending") / "tiny")
    ends = list(range(20, 20 + NUM_ENDS))
    edit_json(folder / "model" / "generation_config.json", eos_token_id=ends)
    return folder


def answers_in(folder):
    return (folder / "samples.jsonl").read_bytes()


def answer_in_one_process(folder, ending):
    words = [*data_of(ending), *ENDING, "--per_device_train_batch_size", 4]
    recipe(*words, "--output_dir", folder, name="llama_grpo", code=0)


@pytest.mark.parametrize("config", ["fsdp2_full_shard", "deepspeed_zero3"])
@pytest.mark.parametrize("gathers", [True, False])
def test_a_rank_whose_answers_end_early_neither_hangs_nor_cuts_the_others(
    config, gathers, ending, once, tmp_path
):
    """Each of two ranks answers one prompt a step, and all answers are those of one process."""
    whole = once("grpo_ending", partial(answer_in_one_process, ending=ending))
    lengths = [len(row["answer"]) for row in read_rows(whole / "samples.jsonl")]
    of_ranks = np.array(lengths).reshape(-1, 2, 2).max(2)
    assert (of_ranks[:, 0] < of_ranks[:, 1]).any() and (of_ranks[:, 0] > of_ranks[:, 1]).any()
    words = [*data_of(ending), *ENDING, "--per_device_train_batch_size", 2, "--output_dir"]
    words.append(tmp_path / "run")
    if not gathers:
        words.append("--no_gather_for_generation")
    script = REPO / "recipes" / "llama_grpo.py"
    rehearse(config, *words, num_processes=2, script=script, mixed_precision="no", code=0)
    assert answers_in(tmp_path / "run") == answers_in(whole)


def test_a_reward_model_that_was_trained_here_is_one_of_the_rewards(tiny, net_tiny, tmp_path):
    """What it gives is in the samples, as its pipeline gives it."""
    words = [*data_of(net_tiny("llama_reward")), "--max_steps", 2, "--eval_strategy", "no"]
    recipe(*words, "--output_dir", tmp_path / "judge", name="llama_reward", code=0)
    words = [*data_of(tiny), *ENDING, "--max_steps", 1, "--output_dir", tmp_path / "run"]
    words += ["--reward_model_name_or_path", tmp_path / "judge"]
    done = recipe(*words, name="llama_grpo", code=64)
    assert any("--reward_weights: needs 3" in line for line in errors_of(done))
    words += ["--reward_weights", 1, 0.2, 0.5]
    done = recipe(*words, name="llama_grpo", code=0)
    assert "0.5 reward_model" in done.output
    judge = pipeline("text-classification", str(tmp_path / "judge"), device="cpu")
    for row in read_rows(tmp_path / "run" / "samples.jsonl"):
        messages = [{"role": "user", "content": row["prompt"]}]
        messages.append({"role": "assistant", "content": row["answer"]})
        text = judge.tokenizer.apply_chat_template(messages, tokenize=False)
        expected = judge(text, add_special_tokens=False)[0]["score"]
        assert row["reward_model"] == pytest.approx(expected, abs=1e-5)
    line = read_metrics(tmp_path / "run")[0][0]
    assert line["rollout/peak_memory_gib"] > 0


CALLS = [  # words, exit code, word
    ("--num_generations 5", 64, "does not divide the 8 answers"),
    ("--max_prompt_length 3", 65, "--max_prompt_length is 3"),
    ("--columns prompt=answr", 65, "answr"),
]


@pytest.mark.parametrize(("words", "code", "word"), CALLS)
def test_what_cannot_be_trained_is_refused(words, code, word, tiny, tmp_path):
    words = [*data_of(tiny), "--output_dir", tmp_path / "run", *words.split()]
    done = recipe(*words, name="llama_grpo", code=code)
    assert any(word in line for line in errors_of(done))


def test_fsdp1_is_refused(tiny, tmp_path):
    script = REPO / "recipes" / "llama_grpo.py"
    words = [*data_of(tiny), "--output_dir", tmp_path / "run"]
    done = rehearse("fsdp1_full_shard", *words, num_processes=2, script=script, code=64)
    assert any("FSDP2" in line for line in errors_of(done))
