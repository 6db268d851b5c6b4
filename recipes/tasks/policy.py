# SPDX-License-Identifier: Apache-2.0
"""What answers are worth, and the loss of a policy on them, as TRL's GRPOTrainer computes it."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from core.batches import TokenCollator
from core.chat import ChatTemplate, Conversation, as_messages, read_message
from core.data import IGNORED
from core.exits import Exit, fail
from core.loss import LossInHead
from core.metrics import finite_or_none
from core.model import loading, loading_whole
from core.workarounds import mixed_dtype
from tasks.distillation import FrozenModel
from tasks.pairs import adapters_disabled
from tasks.rollouts import Answer

# As in TRL, it gets prompts, completions, completion_ids and the columns of the rows, each as a
# list with an item for each answer, and returns their rewards, None for what it does not judge
RewardFunction = Callable[..., Sequence[float | None]]
READ = ("input_ids", "attention_mask")  # by a reward model
ALMOST_NOTHING = 1e-4  # TRL adds it to a deviation of rewards, which may be 0
# What `policy_losses` tells of each token, under TRL's names
LOGGED = ["kl", "clip_ratio/low_mean", "clip_ratio/high_mean"]


# ---- Rewards ----
class RewardModel:
    """What a reward model gives to answers, as one of the reward functions; whole on each rank.

    It reads prompt and answer as its own chat template and tokenizer write them, padded on the
    right with the token behind which it does not look.
    """

    __name__ = "reward_model"

    def __init__(self, name: str, accelerator: Accelerator, dtype: str, batch_size: int) -> None:
        """Load a folder or hub id; end with 64 if it is none of a reward model.

        Args:
            dtype: in which it computes without mixed precision.
            batch_size: answers that it reads at a time.
        """
        flag = "--reward_model_name_or_path"
        with loading("reward model", name, flag), loading_whole(accelerator):
            tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            model, report = AutoModelForSequenceClassification.from_pretrained(
                name,
                dtype=mixed_dtype(accelerator) or dtype,
                device_map={"": accelerator.device},
                output_loading_info=True,
                trust_remote_code=False,
            )
        if report["missing_keys"] or model.config.num_labels != 1:
            fail(Exit.USAGE, f"{flag} {name}: has no head of one reward: train one on pairs")
        tokenizer.pad_token_id = model.config.get_text_config().pad_token_id
        self._template = ChatTemplate(tokenizer)
        self._model = model.eval()
        self._batch_size = batch_size

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        **columns: Any,
    ) -> list[float]:
        """Return the reward of each completion."""
        texts = []
        for prompt, completion in zip(prompts, completions, strict=True):
            answer = {"role": "assistant", "content": text_of(completion)}
            said = [*as_messages(prompt, "user"), answer]
            messages = [read_message(message, n)[0] for n, message in enumerate(said, start=1)]
            texts.append(self._template.render(Conversation(messages)))
        rewards: list[float] = []
        for start in range(0, len(texts), self._batch_size):
            inputs = self._template.tokenizer(
                texts[start : start + self._batch_size],
                add_special_tokens=False,
                padding=True,
                padding_side="right",
                return_tensors="pt",
            )
            inputs = {name: inputs[name].to(self._model.device) for name in READ}
            rewards += self._model(**inputs, use_cache=False).logits[:, 0].float().tolist()
        return rewards


class Rewards:
    """The reward functions of a run, and their weights."""

    def __init__(
        self, functions: Sequence[RewardFunction], args: Any, accelerator: Accelerator
    ) -> None:
        """Take these, and load --reward_model_name_or_path as one more if there is one."""
        self._functions = list(functions)
        self._args = args
        name = args.reward_model_name_or_path
        if name is not None:
            size = args.per_device_eval_batch_size
            self._functions.append(RewardModel(name, accelerator, args.dtype, size))
        self.names = [function.__name__ for function in self._functions]

    def __str__(self) -> str:
        pairs = zip(self._args.reward_weights, self.names, strict=True)
        return " + ".join(f"{weight:g} {name}" for weight, name in pairs)

    def judge(self, answers: Sequence[Answer]) -> None:
        """Have each function judge the answers, and add its rewards to theirs."""
        for function in self._functions:
            for answer, reward in zip(answers, judge(function, answers), strict=True):
                answer.rewards.append(math.nan if reward is None else float(reward))

    def weigh(self, answers: Sequence[Answer]) -> torch.Tensor:
        """Return the weighted sum of each answer's rewards, [answers]; NaN if it has none."""
        rewards = torch.tensor([answer.rewards for answer in answers])
        total = (rewards * torch.tensor(self._args.reward_weights)).nansum(1)
        return total.masked_fill(rewards.isnan().all(1), torch.nan)

    def compare(self, answers: Sequence[Answer]) -> dict[str, float]:
        """Give each answer of a rollout its advantage, and return the metrics of all.

        Args:
            answers: --num_generations to each prompt, one after the other.
        """
        groups = self.weigh(answers).view(-1, self._args.num_generations)
        advantages = advantages_of(groups, self._args.scale_rewards).flatten().tolist()
        for answer, advantage in zip(answers, advantages, strict=True):
            answer.advantage = advantage
        is_equal = deviation(groups).isclose(torch.zeros(1))
        share = is_equal.float().mean().item()
        return self.metrics_of(answers) | {"frac_reward_zero_std": share}

    def metrics_of(self, answers: Sequence[Answer]) -> dict[str, float]:
        """Return what TRL logs of answers and their rewards, under its names."""
        total = self.weigh(answers)
        metrics = {"reward": total.nanmean().item(), "reward_std": deviation(total[None]).item()}
        table = torch.tensor([answer.rewards for answer in answers])
        for name, rewards in zip(self.names, table.T, strict=True):
            metrics[f"rewards/{name}/mean"] = rewards.nanmean().item()
            metrics[f"rewards/{name}/std"] = deviation(rewards[None]).item()
        lengths = [len(answer.ids) for answer in answers]
        metrics["completions/mean_length"] = sum(lengths) / len(lengths)
        num_cut = sum(answer.is_truncated for answer in answers)
        metrics["completions/clipped_ratio"] = num_cut / len(answers)
        return metrics


def judge(function: RewardFunction, answers: Sequence[Answer]) -> Sequence[float | None]:
    """Return the rewards that a function gives, each argument of which has an item per answer.

    What it raises gets a note with the answer that it raises it for.
    """
    if not answers:  # on a rank without any
        return []
    judged = [answer.arguments() for answer in answers]
    names = {name for one in judged for name in one}
    try:
        return function(**{name: [one.get(name) for one in judged] for name in names})
    except Exception as error:
        if len(answers) > 1:
            for answer in answers:  # one of which it most likely raises for when alone, too
                judge(function, [answer])
        place = f"row {answers[0].row['row']} of the data: {answers[0].text!r}"
        error.add_note(f"{function.__name__}, for an answer to {place}")
        raise


def text_of(completion: Any) -> str:
    """Return the text of a completion, which is one, or a list of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


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


# ---- Batches ----
def make_batch(collator: TokenCollator, answers: Sequence[Answer], args: Any) -> dict[str, Any]:
    """Return a batch of answers with their prompts, on the host.

    It has what TokenCollator gives it, with the answers' tokens as targets, and
        is_token: [answers, tokens of the longest], whether it is one of the targets, in their
            order.
        mask: the same, 1 where the token is trained on.
        advantages: [answers].
        counts: answers, tokens that are trained on, and tokens without padding.
    """
    lines = []
    for answer in answers:
        prompt = answer.row["input_ids"].tolist()
        labels = [IGNORED] * len(prompt) + answer.ids
        lines.append({**answer.row, "input_ids": prompt + answer.ids, "labels": labels})
    batch = collator.make_batch(lines, [[number] for number in range(len(lines))])
    lengths = torch.tensor([len(answer.ids) for answer in answers], dtype=torch.long)
    is_token = torch.arange(max(lengths.tolist(), default=1)) < lengths[:, None]
    is_cut = [answer.is_truncated and args.mask_truncated_completions for answer in answers]
    mask = is_token & ~torch.tensor(is_cut, dtype=torch.bool)[:, None]
    advantages = [answer.advantage for answer in answers]
    return {
        **batch,
        "is_token": is_token,
        "mask": mask.float(),
        "advantages": torch.tensor(advantages, dtype=torch.float32),
        "counts": torch.tensor([len(answers), int(mask.sum()), sum(batch["lengths"])]),
    }


# ---- Log-probabilities ----
class LogpsInHead(LossInHead):
    """Log-probabilities of answers under the distribution that they are sampled from."""

    def __init__(self, model: Any, args: Any, device: torch.device) -> None:
        """Replace the forward pass of the model's output head, as LossInHead does."""
        super().__init__(model, args.max_logits_mib, device)
        self._losses_of = partial(logps_and_entropies, temperature=args.temperature)
        self._evaluated_losses_of = self._losses_of

    def of_answers(
        self, model: torch.nn.Module, batch: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and entropies in nats, [answers, tokens], 0 behind an answer."""
        found, _ = self.losses(model, batch)
        return unflatten(found, batch["is_token"])

    @torch.no_grad()
    def before_training(
        self, model: torch.nn.Module, frozen: FrozenModel | None, batch: Mapping[str, Any]
    ) -> torch.Tensor:
        """Return log-probabilities before training, [answers, tokens].

        Args:
            model: runs without its adapters if there is no frozen model.
            frozen: the model as it was before training.
        """
        if frozen is None:
            with adapters_disabled():
                logps, _ = self.of_answers(model, batch)
            return logps
        found = []
        hidden = frozen.hidden_states(batch).split(self._piece)
        for states, targets in zip(hidden, batch["targets"].split(self._piece), strict=True):
            found.append(self._losses_of(frozen.logits(states), targets))
        logps, _ = unflatten(torch.cat(found), batch["is_token"])
        return logps


def logps_and_entropies(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the log-probability of each target, and the entropy at its place, [tokens, 2].

    Logits are [tokens, vocabulary]. Only the former have a gradient.
    """
    logps = (logits.float() / temperature).log_softmax(-1)
    of_targets = logps.gather(-1, targets[:, None]).squeeze(-1)
    with torch.no_grad():
        entropies = -(logps.exp() * logps).sum(-1)
    return torch.stack([of_targets, entropies], dim=-1)


def unflatten(found: torch.Tensor, is_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two columns of [tokens, 2] as [answers, tokens of the longest], 0 elsewhere."""
    zeros = torch.zeros(is_token.shape, device=found.device)
    logps, entropies = found.unbind(-1)
    return zeros.masked_scatter(is_token, logps), zeros.masked_scatter(is_token, entropies)


# ---- Loss ----
def policy_losses(
    logps: torch.Tensor, old: torch.Tensor, batch: Mapping[str, Any], args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token, and what is logged of it, as TRL's GRPOTrainer has them.

    Args:
        logps, old: log-probabilities now, and when the answers were sampled, [answers, tokens].
        batch: with advantages, [answers]; mask, [answers, tokens]; and, with --beta, reference,
            log-probabilities before training, [answers, tokens].

    Returns:
        [answers, tokens], and LOGGED, [3, answers, tokens]: the KL, and 1 where a ratio is clipped.
    """
    advantages = batch["advantages"][:, None]
    mask = batch["mask"]
    log_ratio = logps - old
    if args.importance_sampling_level == "sequence":
        log_ratio = mean_of_answers(log_ratio, mask)[:, None]
    ratio = log_ratio.exp()
    most = args.epsilon if args.epsilon_high is None else args.epsilon_high
    clipped = ratio.clamp(1 - args.epsilon, 1 + most)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    kl = torch.zeros_like(logps)
    if args.beta:
        gap = batch["reference"] - logps
        # An estimate that is never negative (k3), weighted by the ratio, through which it has a
        # gradient too: the answers are from the policy before its latest steps
        kl = (gap.exp() - gap - 1) * ratio
        losses = losses + args.beta * kl
    is_low = (ratio < clipped) & (advantages < 0)
    is_high = (ratio > clipped) & (advantages > 0)
    logged = [kl.detach(), is_low.expand_as(logps), is_high.expand_as(logps)]
    return losses.expand_as(logps), torch.stack(logged)


def mean_of_answers(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over the tokens of each answer in the mask, [answers]; 0 without any."""
    return (values * mask).sum(1) / mask.sum(1).clamp(min=1)


def sum_of_losses(
    losses: torch.Tensor,
    mask: torch.Tensor,
    num_answers: torch.Tensor,
    num_tokens: torch.Tensor,
    args: Any,
) -> torch.Tensor:
    """Return a micro-batch's part of the loss, a sum that is divided by a count of the whole step.

    Args:
        losses, mask: [answers, tokens].
        num_answers, num_tokens: of the step, on all ranks; tokens that are trained on.
    """
    if args.loss_type == "grpo":  # arXiv 2402.03300
        return mean_of_answers(losses, mask).sum() / num_answers
    total = (losses * mask).sum()
    if args.loss_type == "dr_grpo":  # arXiv 2503.20783
        return total / (num_answers * args.max_completion_length)
    return total / num_tokens.clamp(min=1)  # arXiv 2503.14476
