# SPDX-License-Identifier: Apache-2.0
r"""Reward models from pairs of a chosen and a rejected answer (Bradley-Terry), Llama here.

The YAML file owns the strategy, the command line everything about learning:

    accelerate launch --config_file accelerate_configs/fsdp.yaml recipes/llama_reward.py
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 \
        recipes/llama_reward.py --dataset_name pairs.jsonl --use_peft --learning_rate 1e-4
    accelerate launch --config_file accelerate_configs/deepspeed_zero3.yaml --num_processes 8 \
        recipes/llama_reward.py --center_rewards_coefficient 0.01

A good run prints a summary with one pair as the model sees it, an accuracy on held-out pairs that
rises, and the folder that `from_pretrained` and `pipeline("text-classification")` load: its score
is the reward of a text that the chat template has rendered. The same command again continues from
the newest checkpoint. Exit codes: core/exits.py. To make it yours:
python scripts/copy_recipe.py llama_reward my_project, then look for EDIT.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification

from core.arguments import (
    ChatArguments,
    CommonArguments,
    DenseModelArguments,
    LengthArguments,
    LigerArguments,
    MixtureArguments,
    RowArguments,
)
from core.batches import Plan
from core.chat import ChatTemplate, note_plain_template
from core.cli import NOT_NEGATIVE, arg, parse
from core.data import Rows, describe_rows, hold_out_and_mix, read_rows
from core.engine import Layout, backward_of_sum, make_accelerator
from core.export import save_model
from core.model import base_model_of, check_model, load_tokenizer, make_optimizer
from core.run import Run
from tasks.labels import load_classifier
from tasks.pairs import turn_off_dropout
from tasks.rewards import (
    METRICS,
    RewardCollator,
    leave_out_long,
    pair_losses,
    rewards_of,
    sums_of,
    tokenize_whole_answers,
)


@dataclass(kw_only=True)
class Arguments(
    CommonArguments,
    DenseModelArguments,
    LigerArguments,
    MixtureArguments,
    LengthArguments,
    RowArguments,
    ChatArguments,
):
    """Reward models."""

    EXTRAS = ("configs", "hosts", "object_store", "mesh")
    LOSS_UNIT = "per pair"
    model_name_or_path: str = "Qwen/Qwen2.5-0.5B-Instruct"  # Apache-2.0
    # EDIT: your data set. Default: about 62,100 rows of UltraFeedback (MIT license)
    dataset_name: list[str] = arg(["trl-lib/ultrafeedback_binarized"])
    output_dir: str = "runs/llama_reward"
    COLUMN_ROLES = ("prompt", "chosen", "rejected", "margin", "tools")
    max_length: int = arg(1024, "tokens of a prompt with one answer; longer pairs are left out")
    num_train_epochs: float | None = 1.0
    center_rewards_coefficient: float = arg(
        0.0, "how much rewards are drawn to 0 as a mean of each pair, as 0.01", NOT_NEGATIVE
    )
    disable_dropout: bool = arg(True, "train without dropout, but for --lora_dropout")


# ---- Data ----
def load_data(args: Arguments, tokenizer: Any) -> tuple[Rows, Rows | None]:
    """Return the pairs to train on and those to evaluate on. EDIT: add filters or sources."""
    prepare = partial(
        tokenize_whole_answers,
        template=ChatTemplate(tokenizer, args.chat_template_kwargs or {}),
        columns=args.columns_by_role,
    )
    rows, eval_rows = read_rows(args, prepare)
    # EDIT: to filter rows, as in rows = rows.filter(lambda row: row["margin"] >= 1)
    rows = leave_out_long(rows, args.max_length)
    if eval_rows is not None:
        eval_rows = leave_out_long(eval_rows, args.max_length)
    return hold_out_and_mix(args, rows, eval_rows)


# ---- Model ----
def load_model(args: Arguments, layout: Layout, tokenizer: Any) -> tuple[Any, dict[str, str]]:
    """Return the model with one number as its head, and a line of the summary if that is new.

    A new head is drawn from the seed, alike on every rank, and trained whole beside adapters.
    """
    auto_class = AutoModelForSequenceClassification
    model, of_head = load_classifier(auto_class, args, [], layout, task_type="SEQ_CLS")
    base = base_model_of(model)
    # Where a reward is read, in training and afterwards: at the last token that is not this one
    base.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if args.disable_dropout:
        turn_off_dropout(base)
    return model, of_head


# ---- Loss and evaluation ----
def compare_answers(
    model: torch.nn.Module, batch: Mapping[str, Any], args: Arguments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and METRICS, each a sum over a batch's pairs in fp32."""
    rewards = rewards_of(model, batch)
    # EDIT: your loss of a pair
    losses = pair_losses(rewards, batch["margins"], args.center_rewards_coefficient)
    return losses.sum(), sums_of(rewards)


@torch.no_grad()
def evaluate(
    run: Run, layout: Layout, model: torch.nn.Module, args: Arguments, loader: DataLoader
) -> None:
    """Log the loss and METRICS of exactly the evaluation pairs, computed as in training."""
    model.eval()
    total = torch.zeros(2 + len(METRICS), device=layout.device)
    for batch in run.interruptible(loader):
        loss, sums = compare_answers(model, batch, args)
        total += torch.cat([torch.stack([batch["counts"][0].float(), loss]), sums])
    model.train()
    num_pairs, *sums = layout.sum_over_rows(total).tolist()
    means = [value / num_pairs for value in sums]
    names = [f"eval_{name}" for name in ("loss", *METRICS)]
    run.log_evaluation(dict(zip(names, means, strict=True)))


def mean_metrics(
    layout: Layout, metric_sums: list[torch.Tensor], num_pairs: torch.Tensor
) -> dict[str, float]:
    """Return METRICS per pair of a step, from the sums of this rank's micro-batches."""
    means = layout.sum_over_rows(sum(metric_sums)) / num_pairs
    return dict(zip(METRICS, means.tolist(), strict=True))


def train(args: Arguments, run: Run) -> None:
    accelerator, layout = make_accelerator(args)
    run.start(layout)
    set_seed(args.seed)

    # ---- Data ----
    tokenizer = load_tokenizer(args)
    with accelerator.local_main_process_first():  # the other ranks read its cache
        train_rows, eval_rows = load_data(args, tokenizer)
    lengths = train_rows.lengths
    plan = Plan(args, layout, len(train_rows), lengths)
    run.check_plan(plan, train_rows, eval_rows)
    collator = RewardCollator(tokenizer)
    train_loader = plan.training_loader(train_rows, collator, first_step=run.step)
    eval_loader = plan.evaluation_loader(eval_rows, collator)

    # ---- Model, optimizer, schedule ----
    model, of_head = load_model(args, layout, tokenizer)
    config = base_model_of(model).config
    check_model(model, train_rows.largest_token(tokenizer))
    notes = describe_rows(train_rows, eval_rows) | of_head
    first = train_rows.dataset[0]
    chosen, rejected = tokenizer.batch_decode([first["chosen_ids"], first["rejected_ids"]])
    notes["batch"] = plan.describe_batch("pairs", 2 * lengths.mean())
    notes["sample"] = f"{chosen} rather than {rejected}" + note_plain_template(tokenizer)
    run.summarize(model, notes)
    optimizer, schedule = make_optimizer(model, args, accelerator, plan.total_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.resume(model, optimizer, schedule)

    # ---- Train ----
    measure = partial(evaluate, run, layout, model, args)
    if eval_loader and run.owes_evaluation(plan.evaluate_after):
        measure(eval_loader)
    model.train()
    batches = iter(train_loader)
    for step in run.steps():
        micro_batches = [next(batches) for _ in range(args.gradient_accumulation_steps)]
        # Pairs, and all tokens without padding.
        # Divided by the counts of the whole step on all ranks, the loss is the same for any number
        # of ranks and micro-batches.
        counts = layout.sum_over_rows(sum(batch["counts"] for batch in micro_batches))
        num_pairs, num_tokens = counts
        losses = []
        metric_sums = []
        grad_norm = None
        for batch in micro_batches:
            with accelerator.accumulate(model):
                loss, sums = compare_answers(model, batch, args)
                metric_sums.append(sums)
                loss = loss / num_pairs
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
        more = partial(mean_metrics, layout, metric_sums, num_pairs)
        epoch = step / plan.steps_per_epoch
        run.finish_step(losses, grad_norm, num_tokens, epoch=epoch, more=more)
        if eval_loader and step in plan.evaluate_after:
            measure(eval_loader)

    # ---- Save ----
    save_model(accelerator, model, tokenizer, args.output_dir, config=config)
    run.finish(f"Its curve: python scripts/plot_loss.py {args.output_dir}")


def main() -> None:
    args = parse(Arguments, __doc__)
    # From here on a signal stops the run cleanly, and status.json records how it ends
    with Run(args) as run:
        train(args, run)


if __name__ == "__main__":
    main()
