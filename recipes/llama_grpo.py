# SPDX-License-Identifier: Apache-2.0
r"""Training by rewards of any causal language model with GRPO, Llama as the example.

The YAML file owns the strategy, the command line everything about learning:

    accelerate launch --config_file accelerate_configs/fsdp.yaml recipes/llama_grpo.py
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 \
        recipes/llama_grpo.py --dataset_name rows.jsonl --use_peft --learning_rate 1e-5
    accelerate launch --config_file accelerate_configs/deepspeed_zero3.yaml --num_processes 8 \
        recipes/llama_grpo.py --loss_type dr_grpo --scale_rewards none

In each step the model samples several answers to each of some prompts, functions in this file
reward them, and the model learns to give those more often that are better than the others to the
same prompt. A good run prints a summary with one prompt, a reward that rises, answers in
samples.jsonl, and the folder that `from_pretrained` loads. The same command again continues from
the newest checkpoint. Exit codes: core/exits.py. To make it yours:
python scripts/copy_recipe.py llama_grpo my_project, then look for EDIT.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device, set_seed
from transformers import AutoModelForCausalLM

from core.arguments import (
    ChatArguments,
    CommonArguments,
    DenseModelArguments,
    LigerArguments,
    LossInHeadArguments,
    MixtureArguments,
    RowArguments,
)
from core.batches import TokenCollator, starts_of_batches
from core.chat import ChatTemplate, note_plain_template
from core.cli import NOT_NEGATIVE, POSITIVE, Bounds, arg, free, parse
from core.data import (
    Rows,
    describe_rows,
    hold_out_and_mix,
    missing_columns,
    read_rows,
    rename_columns,
)
from core.engine import Layout, backward_of_sum, make_accelerator
from core.export import save_model
from core.model import (
    add_adapters,
    check_model,
    load_pretrained,
    load_tokenizer,
    make_optimizer,
    set_up_layers,
)
from core.run import SAMPLES, Run
from tasks.distillation import FrozenModel
from tasks.pairs import turn_off_dropout
from tasks.policy import (
    LOGGED,
    LogpsInHead,
    Rewards,
    make_batch,
    policy_losses,
    sum_of_losses,
    text_of,
    write_samples,
)
from tasks.rollouts import EVALUATION, Answer, AnswerPlan, Sampler, tokenize_prompt

# EDIT: the column with your prompt, a text or a list of messages, is the first of these in a row
PROMPTS = ("prompt", "question", "problem")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


# ---- Rewards ----
# EDIT: your functions, with the arguments of TRL's: lists with an item for each answer, of
# `prompts`, `completions`, `completion_ids` and the columns of the rows
def right_answer(completions: Any, answer: Sequence[str], **columns: Any) -> list[float]:
    """Return 1 where the last number of a completion is that of its row's answer, else 0."""
    rewards = []
    for completion, wanted in zip(completions, answer, strict=True):
        found, right = NUMBER.findall(text_of(completion)), NUMBER.findall(wanted)
        rewards.append(float(found[-1:] == right[-1:]))
    return rewards


def any_number(completions: Any, **columns: Any) -> list[float]:
    """Return 1 where a completion has a number: what a model learns first."""
    return [float(NUMBER.search(text_of(completion)) is not None) for completion in completions]


REWARDS = [right_answer, any_number]


@dataclass(kw_only=True)
class Arguments(
    CommonArguments,
    DenseModelArguments,
    LossInHeadArguments,
    LigerArguments,
    MixtureArguments,
    RowArguments,
    ChatArguments,
):
    """Training by rewards."""

    EXTRAS = ("configs", "hosts", "object_store", "rollout_server", "continuous_batching")
    LOSS_UNIT = "per answer"
    model_name_or_path: str = "Qwen/Qwen2.5-0.5B-Instruct"  # Apache-2.0
    # EDIT: your data set. Default: 7,473 rows of GSM8K (MIT license)
    dataset_name: list[str] = arg(["openai/gsm8k"])
    output_dir: str = "runs/llama_grpo"
    COLUMN_ROLES = ("prompt", "answer", "tools")
    learning_rate: float = 1e-6
    num_train_epochs: float | None = 1.0
    per_device_train_batch_size: int = free(8, "answers per GPU and micro-batch", POSITIVE)
    metric_for_best_model: str = "reward"
    max_prompt_length: int = arg(512, "tokens of a prompt; a longer one is a bad row", POSITIVE)
    max_completion_length: int = arg(512, "most tokens of an answer", POSITIVE)
    num_generations: int = arg(8, "answers to each prompt, which are compared", Bounds(above=1))
    temperature: float = arg(1.0, "divides the logits, in sampling and in the loss", POSITIVE)
    generation_batch: int | None = free(
        None, "answers that a GPU samples at a time [all of an optimizer step]", POSITIVE
    )
    gather_for_generation: bool = free(
        True, "under FSDP2, hold all weights on each GPU while answers are sampled (not ZeRO-3's)"
    )
    reward_model_name_or_path: str | None = arg(
        None, "a reward model, of recipes/llama_reward.py for example, as one more reward function"
    )
    reward_weights: list[float] = arg(
        [1.0, 0.2], "weights of the reward functions, in their order, and of the reward model"
    )
    scale_rewards: Literal["group", "batch", "none"] = arg(
        "group", "divide advantages by the deviation of a prompt's rewards, or of a step's"
    )
    loss_type: Literal["grpo", "dr_grpo", "dapo"] = arg(
        "dapo",
        "dapo: mean over tokens; grpo: mean over answers of such means; dr_grpo: sum over tokens "
        "divided by the most that there could be",
    )
    epsilon: float = arg(0.2, "how far below 1 a ratio of probabilities may fall", POSITIVE)
    epsilon_high: float | None = arg(
        None, "how far above 1 it may rise; DAPO: 0.28 [epsilon]", POSITIVE
    )
    importance_sampling_level: Literal["token", "sequence"] = arg(
        "token", "a ratio for each token, or for a whole answer (GSPO)"
    )
    num_iterations: int = arg(1, "optimizer steps that train on the same answers", POSITIVE)
    beta: float = arg(0.0, "weight of the KL to the model before training", NOT_NEGATIVE)
    mask_truncated_completions: bool = arg(
        False, "do not train on answers that --max_completion_length cuts off"
    )

    def conflicts(self) -> Iterator[str]:
        count = len(REWARDS) + (self.reward_model_name_or_path is not None)
        if len(self.reward_weights) != count:
            yield f"--reward_weights: needs {count}, of the functions in REWARDS and a reward model"
        for name in ("save_steps", "eval_steps", "max_steps"):
            steps = getattr(self, name)
            if steps > 0 and steps % self.num_iterations:
                yield (
                    f"--{name} {steps}: has to be a multiple of --num_iterations, since nothing is "
                    "saved between steps that train on the same answers"
                )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset_name == ["openai/gsm8k"] and self.dataset_config is None:
            self.dataset_config = "main"


# ---- Data ----
def row_to_prompt(
    row: Mapping[str, Any],
    template: ChatTemplate,
    max_length: int,
    columns: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the tokens of a row's prompt; a ValueError says why it has none. EDIT: your columns.

    Args:
        max_length: the most tokens of a prompt.
        columns: {role: name of its column}, from --columns.
    """
    row = rename_columns(row, columns or {})
    for name in PROMPTS:
        if row.get(name):
            return tokenize_prompt(row, row[name], template, max_length)
    raise ValueError(missing_columns(row, " or ".join(PROMPTS), "prompt"))


def load_data(args: Arguments, tokenizer: Any) -> tuple[Rows, Rows | None]:
    """Return the rows to train on and those to evaluate on. EDIT: add filters or sources."""
    prepare = partial(
        row_to_prompt,
        template=ChatTemplate(tokenizer, args.chat_template_kwargs or {}),
        max_length=args.max_prompt_length,
        columns=args.columns_by_role,
    )
    rows, eval_rows = read_rows(args, prepare)
    # EDIT: to filter rows, as in rows = rows.filter(lambda row: row["length"] >= 8)
    return hold_out_and_mix(args, rows, eval_rows)


# ---- Model ----
def load_model(args: Arguments, layout: Layout) -> torch.nn.Module:
    """Return the model without dropout, quantized and with adapters if the arguments request it."""
    model, _ = load_pretrained(AutoModelForCausalLM, args, layout)
    set_up_layers(model, args)
    turn_off_dropout(model)
    return add_adapters(model, args, layout, task_type="CAUSAL_LM")


def load_reference(args: Arguments, accelerator: Accelerator) -> FrozenModel | None:
    """Return the model before training if --beta needs it beside the trained one.

    A model with adapters is its own reference, without them.
    """
    if not args.beta or args.use_peft:
        return None
    return FrozenModel(
        args.model_name_or_path,
        accelerator,
        args.dtype,
        load_in_4bit=False,
        attn_implementation=args.attn_implementation,
        revision=args.model_revision,
    )


# ---- Rollouts ----
def roll_out(
    plan: AnswerPlan,
    sampler: Sampler,
    rewards: Rewards,
    collator: TokenCollator,
    model: torch.nn.Module,
    rows: Rows,
    step: int,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Sample answers on all ranks, have them judged, and compare those to the same prompt.

    Args:
        step: the first that trains on them.

    Returns:
        This rank's micro-batches, and the metrics of all answers.
    """
    args = plan.args
    layout = plan.layout
    rollout = plan.rollout_of(step)
    parts = plan.micro_batches(rollout)
    numbers = [number for part in parts for number in part]
    own = sampler.sample(model, rows, numbers, plan.rows_per_step // layout.data_ranks, rollout)
    rewards.judge(own)
    answers = {answer.number: answer for answer in layout.gather(own)}
    ordered = [answers[number] for number in sorted(answers)]
    metrics = rewards.compare(ordered) | {"rollout/peak_memory_gib": sampler.peak_memory_gib}
    if layout.accelerator.is_main_process and rollout % args.logging_steps == 0:
        write_samples(Path(args.output_dir, SAMPLES), step, ordered, rewards.names)
    batches: list[Any] = []
    for part in parts:
        batch = make_batch(collator, [answers[number] for number in part], args)
        batches.append(send_to_device(batch, layout.device))
    return batches, metrics


def compare_policies(
    model: torch.nn.Module,
    token_loss: LogpsInHead,
    frozen: FrozenModel | None,
    batch: dict[str, Any],
    args: Arguments,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token, [answers, tokens], and sums of entropy and LOGGED, [4].

    Args:
        batch: gets the log-probabilities with which later steps on it are compared.
    """
    if args.beta and "reference" not in batch:
        batch["reference"] = token_loss.before_training(model, frozen, batch)
    logps, entropies = token_loss.of_answers(model, batch)
    # In the first step on it the policy is still the one that has sampled the answers
    old = batch.setdefault("old", logps.detach())
    losses, logged = policy_losses(logps, old, batch, args)
    sums = (torch.stack([entropies, *logged]) * batch["mask"]).sum((1, 2))
    return losses, sums


def evaluate(
    run: Run, plan: AnswerPlan, sampler: Sampler, rewards: Rewards, model: Any, rows: Rows
) -> None:
    """Log the rewards of one answer to each evaluation row, sampled as in training."""
    args = plan.args
    size = args.per_device_eval_batch_size
    own: list[Answer] = []
    for start in run.interruptible(starts_of_batches(len(rows), size, plan.layout)):
        places = range(start, min(start + size, len(rows)))
        numbers = [place * args.num_generations for place in places]
        own += sampler.sample(model, rows, numbers, size, EVALUATION)
    rewards.judge(own)
    metrics = rewards.metrics_of(plan.layout.gather(own))
    run.log_evaluation({f"eval_{name}": value for name, value in metrics.items()})


def mean_metrics(
    layout: Layout,
    metric_sums: Sequence[torch.Tensor],
    num_tokens: torch.Tensor,
    of_answers: Mapping[str, float],
) -> dict[str, float]:
    """Return the metrics of a step: those of its answers, and means over their tokens.

    Args:
        metric_sums: of this rank's micro-batches, of entropy and LOGGED.
        num_tokens: that are trained on, on all ranks.
    """
    means = layout.sum_over_rows(sum(metric_sums)) / num_tokens.clamp(min=1)
    return {**of_answers, **dict(zip(["entropy", *LOGGED], means.tolist(), strict=True))}


def train(args: Arguments, run: Run) -> None:
    accelerator, layout = make_accelerator(args)
    run.start(layout)
    set_seed(args.seed)

    # ---- Data ----
    tokenizer = load_tokenizer(args)
    with accelerator.local_main_process_first():  # the other ranks read its cache
        train_rows, eval_rows = load_data(args, tokenizer)
    lengths = train_rows.lengths
    plan = AnswerPlan(args, layout, len(train_rows) * args.num_generations, lengths)
    plan.check()
    run.check_plan(plan, train_rows, eval_rows)
    collator = TokenCollator(tokenizer.pad_token_id)

    # ---- Model, optimizer, schedule ----
    model = load_model(args, layout)
    token_loss = LogpsInHead(model, args, layout.device)
    sampler = Sampler(args, run, layout, tokenizer, model, token_loss)
    check_model(model, train_rows.largest_token(tokenizer))
    notes = describe_rows(train_rows, eval_rows)
    notes["batch"] = plan.describe_batch("answers", lengths.mean()) + " of prompts"
    rewards = Rewards(REWARDS, args, accelerator)
    notes["rewards"] = str(rewards)
    first = tokenizer.decode(train_rows.dataset[0]["input_ids"])
    notes["sample"] = first + note_plain_template(tokenizer)
    run.summarize(model, notes)  # A dry run ends here
    frozen = load_reference(args, accelerator)
    optimizer, schedule = make_optimizer(model, args, accelerator, plan.total_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.resume(model, optimizer, schedule)

    # ---- Train ----
    measure = partial(evaluate, run, plan, sampler, rewards, model)
    if eval_rows and run.owes_evaluation(plan.evaluate_after):
        measure(eval_rows)
    micro_batches: list[dict[str, Any]] = []
    of_answers: dict[str, float] = {}
    for step in run.steps(together=args.num_iterations):
        if not micro_batches or (step - 1) % args.num_iterations == 0:
            micro_batches, of_answers = roll_out(
                plan, sampler, rewards, collator, model, train_rows, step
            )
        # Answers, tokens that are trained on, and all tokens without padding.
        # Divided by the counts of the whole step on all ranks, the loss is the same for any number
        # of ranks and micro-batches.
        counts = layout.sum_over_rows(sum(batch["counts"] for batch in micro_batches))
        num_answers, num_trained_on, num_tokens = counts
        losses = []
        metric_sums = []
        grad_norm = None
        for batch in micro_batches:
            with accelerator.accumulate(model):
                of_tokens, sums = compare_policies(model, token_loss, frozen, batch, args)
                metric_sums.append(sums)
                loss = sum_of_losses(of_tokens, batch["mask"], num_answers, num_trained_on, args)
                losses.append(loss.detach())
                # Backward, without the division by ranks and micro-batches that engines add
                backward_of_sum(layout, loss)
                if accelerator.sync_gradients:
                    max_norm = args.max_grad_norm or math.inf  # 0 only measures the norm
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                    # Has optimizer.step() change nothing if the gradient is NaN or infinite
                    run.skip_if_not_finite(grad_norm, losses, micro_batches)
                # These act after the last micro-batch only. The schedule is not prepared:
                # accelerate would step it once per rank.
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        more = partial(mean_metrics, layout, metric_sums, num_trained_on, of_answers)
        run.finish_step(losses, grad_norm, num_tokens, epoch=step / plan.steps_per_epoch, more=more)
        if eval_rows and step in plan.evaluate_after:
            measure(eval_rows)

    # ---- Save ----
    stop_tokens = ChatTemplate(tokenizer).stop_tokens()
    save_model(accelerator, model, tokenizer, args.output_dir, stop_tokens)
    run.finish(f"Its curve: python scripts/plot_loss.py {args.output_dir}")


def main() -> None:
    args = parse(Arguments, __doc__)
    # From here on a signal stops the run cleanly, and status.json records how it ends
    with Run(args) as run:
        train(args, run)


if __name__ == "__main__":
    main()
