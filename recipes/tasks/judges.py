# SPDX-License-Identifier: Apache-2.0
"""What answers are worth: rewards that functions give them, and advantages within groups."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from core.metrics import finite_or_none
from tasks.rollouts import Answer

# As in TRL, it gets prompts, completions, completion_ids and the columns of the rows, each as a
# list with an item for each answer, and returns their rewards, None for what it does not judge
RewardFunction = Callable[..., Sequence[float | None]]
ALMOST_NOTHING = 1e-4  # TRL adds it to a deviation of rewards, which may be 0


# ---- Rewards ----
def give_rewards(answers: Sequence[Answer], functions: Sequence[RewardFunction]) -> None:
    """Have each function judge the answers, and add its rewards to theirs.

    Where a prompt is a list of messages, so is its completion. What a function raises gets a note
    with the answer that it raises it for.
    """
    judged = []
    for answer in answers:
        columns = json.loads(answer.row["columns"])
        completion: Any = answer.text
        if isinstance(columns["prompts"], list):
            completion = [{"role": "assistant", "content": answer.text}]
        judged.append(columns | {"completions": completion, "completion_ids": answer.ids})
    for function in functions:
        try:
            rewards = judge(function, judged)
        except Exception as error:
            failing = answers[find_failing(function, judged)]
            place = f"row {failing.row['row']} of the data: {failing.text!r}"
            error.add_note(f"{function.__name__}, for an answer to {place}")
            raise
        for answer, reward in zip(answers, rewards, strict=True):
            answer.rewards.append(math.nan if reward is None else float(reward))


def judge(function: RewardFunction, judged: Sequence[Mapping[str, Any]]) -> Sequence[float | None]:
    """Return the rewards of answers, each given with its columns: one item of every list."""
    if not judged:  # on a rank without answers
        return []
    names = {name: None for one in judged for name in one}
    return function(**{name: [one.get(name) for one in judged] for name in names})


def find_failing(function: RewardFunction, judged: Sequence[Mapping[str, Any]]) -> int:
    """Return the place of the first answer for which alone a function raises, or else 0."""
    for place, one in enumerate(judged):
        try:
            judge(function, [one])
        except Exception:
            return place
    return 0


def text_of(completion: Any) -> str:
    """Return the text of a completion, which is one, or a list of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def weigh(rewards: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted sum of each answer's rewards, [answers]; NaN if it has none.

    Args:
        rewards: [answers, functions], NaN where a function does not judge an answer.
        weights: of the functions.
    """
    has_none = rewards.isnan().all(1)
    return (rewards * torch.tensor(weights)).nansum(1).masked_fill(has_none, torch.nan)


# ---- Advantages ----
def advantages_of(groups: torch.Tensor, scale: str) -> torch.Tensor:
    """Return by how much each answer is better than the mean of those to its prompt.

    An answer without a reward has the advantage 0.

    Args:
        groups: the rewards of answers, [prompts, answers], NaN for none.
        scale: what divides the difference: the deviation of the "group" of answers to a prompt,
            that of the whole "batch", or "none".
    """
    advantages = groups - groups.nanmean(1, keepdim=True)
    if scale == "group":
        advantages = advantages / (deviation(groups) + ALMOST_NOTHING)
    elif scale == "batch":
        advantages = advantages / (deviation(groups.view(1, -1)) + ALMOST_NOTHING)
    return advantages.nan_to_num(nan=0.0)


def deviation(values: torch.Tensor) -> torch.Tensor:
    """Return the unbiased deviation of the values in each row that are not NaN, [rows, 1].

    It is NaN for a single value.
    """
    squares = (values - values.nanmean(1, keepdim=True)).square()
    num_known = (~values.isnan()).sum(1, keepdim=True)
    return (squares.nansum(1, keepdim=True) / (num_known - 1)).sqrt()


# ---- What is logged ----
def metrics_of(
    answers: Sequence[Answer], names: Sequence[str], weights: Sequence[float]
) -> dict[str, float]:
    """Return what TRL logs of answers and their rewards, under its names.

    Args:
        names, weights: of the reward functions.
    """
    table = torch.tensor([answer.rewards for answer in answers])
    total = weigh(table, weights)
    metrics = {"reward": total.nanmean().item(), "reward_std": deviation(total[None]).item()}
    for name, rewards in zip(names, table.T, strict=True):
        metrics[f"rewards/{name}/mean"] = rewards.nanmean().item()
        metrics[f"rewards/{name}/std"] = deviation(rewards[None]).item()
    lengths = [len(answer.ids) for answer in answers]
    metrics["completions/mean_length"] = sum(lengths) / len(lengths)
    num_cut = sum(answer.is_truncated for answer in answers)
    metrics["completions/clipped_ratio"] = num_cut / len(answers)
    return metrics


def write_samples(path: Path, step: int, answers: Sequence[Answer], names: Sequence[str]) -> None:
    """Append answers to a file, as one JSON object on a line each.

    Args:
        step: the first that trains on them.
        names: of the reward functions.
    """
    with open(path, "a", encoding="utf-8") as file:
        for answer in answers:
            line: dict[str, Any] = {"step": step, "row": int(answer.row["row"])}
            line["prompt"] = json.loads(answer.row["columns"])["prompts"]
            line["answer"] = answer.text
            line["is_truncated"] = answer.is_truncated
            for name, reward in zip(names, answer.rewards, strict=True):
                line[name] = finite_or_none(reward)
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
