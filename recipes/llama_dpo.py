# SPDX-License-Identifier: Apache-2.0
r"""Preference tuning of any causal language model from chosen and rejected answers: DPO and others.

The YAML file owns the strategy, the command line everything about learning:

    accelerate launch --config_file accelerate_configs/fsdp.yaml recipes/llama_dpo.py \
        --skip_bad_rows
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 \
        recipes/llama_dpo.py --dataset_name pairs.jsonl --use_peft
    accelerate launch --config_file accelerate_configs/deepspeed_zero3.yaml \
        recipes/llama_dpo.py --dataset_name pairs.jsonl --loss_type orpo

A good run prints a summary with one pair as the model sees it, an accuracy and a margin of rewards
that rise, and the folder that `from_pretrained` loads. The same command again continues from the
newest checkpoint. Exit codes: core/exits.py. To make it yours:
python scripts/copy_recipe.py llama_dpo my_project, then look for EDIT.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import set_seed
from safetensors.torch import load_file, save_file
from torch.nn.functional import logsigmoid
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

from core.arguments import (
    ChatArguments,
    CommonArguments,
    DenseModelArguments,
    LengthArguments,
    LigerArguments,
    LossInHeadArguments,
    MixtureArguments,
    RowArguments,
)
from core.batches import Plan, takes_one_line
from core.chat import ChatTemplate, find_tools
from core.cli import POSITIVE, arg, free, parse
from core.data import Rows, describe_rows, hold_out_and_mix, read_rows, rename_columns
from core.engine import Layout, backward_of_sum, is_compiled, make_accelerator
from core.export import save_model
from core.loss import LossInHead
from core.model import (
    add_adapters,
    check_model,
    load_pretrained,
    load_tokenizer,
    make_optimizer,
    set_up_layers,
)
from core.run import Run
from tasks.pairs import (
    PairCollator,
    adapters_disabled,
    join_splits,
    read_pair,
    show_pair,
    tokenize_message_pair,
    tokenize_text_pair,
    turn_off_dropout,
)

METRICS = [  # TRL's names
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
]


@dataclass(kw_only=True)
class Arguments(
    CommonArguments,
    DenseModelArguments,
    LossInHeadArguments,
    LigerArguments,
    MixtureArguments,
    LengthArguments,
    RowArguments,
    ChatArguments,
):
    """Preference tuning."""

    EXTRAS = ("configs", "hosts", "object_store", "mesh", "varlen", "float8")
    LOSS_UNIT = "per pair"
    MESH = ("tp", "cp", "sp")
    model_name_or_path: str = "Qwen/Qwen2.5-0.5B-Instruct"  # Apache-2.0
    # EDIT: your data set. Default: about 62,100 rows of UltraFeedback (MIT license); some of
    # its prompts are too long, so use --skip_bad_rows
    dataset_name: list[str] = arg(["trl-lib/ultrafeedback_binarized"])
    output_dir: str = "runs/llama_dpo"
    COLUMN_ROLES = ("prompt", "chosen", "rejected", "tools")
    max_length: int = arg(1024, "tokens of a prompt with one answer; longer ones lose their end")
    learning_rate: float = 1e-6
    loss_type: Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "orpo"] = arg(
        "sigmoid", "sigmoid: DPO; sigmoid_norm: the same per token; orpo: without a reference"
    )
    beta: float = arg(
        0.1, "how close to the reference the model stays; tau of ipo, lambda of orpo", POSITIVE
    )
    precompute_ref_log_probs: bool = free(
        False, "run the reference once before training; always so without adapters"
    )


# ---- Data ----
def tokenize_answers(
    row: Mapping[str, Any],
    template: ChatTemplate,
    max_length: int,
    columns: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the tokens of a row's prompt and of both answers, cut to --max_length.

    A ValueError says what is wrong with the row. EDIT: your columns, from which `read_pair` takes
    prompt, chosen and rejected answer, all texts or all lists of messages.

    Args:
        columns: {role: name of its column}, from --columns.
    """
    row = rename_columns(row, columns or {})
    prompt, chosen, rejected = read_pair(row)
    if isinstance(prompt, str):
        return tokenize_text_pair(prompt, chosen, rejected, template.tokenizer, max_length)
    tools = find_tools(row)
    return tokenize_message_pair(prompt, chosen, rejected, tools, template, max_length)


def load_data(args: Arguments, tokenizer: Any) -> tuple[Rows, Rows | None]:
    """Return the pairs to train on and those to evaluate on. EDIT: add filters or sources."""
    prepare = partial(
        tokenize_answers,
        template=ChatTemplate(tokenizer, args.chat_template_kwargs or {}),
        max_length=args.max_length,
        columns=args.columns_by_role,
    )
    rows, eval_rows = read_rows(args, prepare)
    # EDIT: to filter rows, as in rows = rows.filter(lambda row: row["length"] >= 8)
    return hold_out_and_mix(args, rows, eval_rows)


# ---- Model ----
def load_model(args: Arguments, layout: Layout) -> torch.nn.Module:
    """Return the model without dropout, quantized and with adapters if the arguments request it.

    Adapters keep their --lora_dropout.
    """
    model, _ = load_pretrained(AutoModelForCausalLM, args, layout)
    set_up_layers(model, args)
    turn_off_dropout(model)
    return add_adapters(model, args, layout, task_type="CAUSAL_LM")


# ---- Loss ----
def answer_logps(
    layout: Layout,
    model: torch.nn.Module,
    token_loss: LossInHead,
    batch: Mapping[str, Any],
    is_training: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each answer of a batch, and that of all its prompts.

    Args:
        batch: this rank's part of a batch; ranks that share it get the same.

    Returns:
        [2, pairs], chosen answers first, and a scalar over the prompts that are trained on, which
        only orpo does; in nats and fp32.
    """
    losses, _ = token_loss.losses(model, batch)
    # At their places in padded lines; padding, and prompts that are not trained on, have 0
    shape = len(batch["starts"]), batch["longest"]
    flat = torch.zeros(math.prod(shape), device=losses.device)
    logps = flat.index_put((batch["cells"],), -losses).view(shape)
    places = torch.arange(batch["longest"], device=losses.device)
    is_answer = places >= batch["starts"][:, None]
    # A rank without pairs still has one line, a dummy that keeps it in step with the others
    num_pairs = len(batch["pairs"])
    answers = (logps * is_answer).sum(1)[: 2 * num_pairs].view(2, num_pairs)
    prompts = (logps * ~is_answer).sum()
    return layout.sum_over_parts(answers, is_training), layout.sum_over_parts(prompts, is_training)


def preference_losses(
    scores: torch.Tensor, lengths: torch.Tensor, loss_type: str, beta: float
) -> torch.Tensor:
    """Return the loss of each pair, [pairs], as TRL's DPOTrainer and ORPOTrainer compute it.

    Args:
        scores: log-probabilities of chosen and rejected answers minus those of the reference,
            [2, pairs]; for orpo, which has no reference, means per token.
        lengths: tokens of the answers, [2, pairs].
    """
    if loss_type == "orpo":  # arXiv 2403.07691: odds are p / (1 - p)
        odds = scores - torch.log(-torch.expm1(scores))
        return -beta * logsigmoid(odds[0] - odds[1])
    if loss_type in ("ipo", "sigmoid_norm"):
        scores = scores / lengths
    margins = scores[0] - scores[1]
    if loss_type == "ipo":  # arXiv 2310.12036, equation 17
        return (margins - 1 / (2 * beta)) ** 2
    if loss_type == "hinge":  # arXiv 2305.10425
        return torch.relu(1 - beta * margins)
    return -logsigmoid(beta * margins)  # arXiv 2305.18290


def compare_answers(
    layout: Layout,
    model: torch.nn.Module,
    token_loss: LossInHead,
    batch: Mapping[str, Any],
    reference_logps: torch.Tensor | None,
    args: Arguments,
    is_training: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three sums over a batch's pairs, in fp32.

    Args:
        batch: this rank's part of a batch; ranks that share it get the same.
        reference_logps: log-probabilities of all rows under the reference, [rows, 2]; None runs
            the model without its adapters as the reference, except for orpo, which has none.

    Returns:
        The losses of `preference_losses`; the negative log-likelihood of all tokens of chosen
        lines, which orpo adds to its loss, 0 for the others; METRICS in their order, [6].
    """
    find_logps = partial(answer_logps, layout, model, token_loss, batch, is_training=is_training)
    if args.loss_type == "orpo":
        logps, prompt_logps = find_logps()
        chosen_nll = -(logps[0].sum() + prompt_logps)
        logps = logps / batch["lengths"]
        scores = logps
    else:
        if reference_logps is not None:
            reference = reference_logps[batch["pairs"]].T
        else:  # first, so that the forward pass below is the one that backward follows
            with torch.no_grad(), adapters_disabled():
                reference, _ = find_logps()
        logps, _ = find_logps()
        chosen_nll = logps.new_zeros(())
        scores = logps - reference
    losses = preference_losses(scores, batch["lengths"], args.loss_type, args.beta)
    rewards = args.beta * scores.detach()
    margins = rewards[0] - rewards[1]
    num_right = (margins > 0).float().sum()
    sums = [*rewards.sum(1), margins.sum(), num_right, *logps.detach().sum(1)]
    return losses.sum(), chosen_nll, torch.stack(sums)


def runs_reference_before_training(args: Arguments) -> bool:
    """Return whether the log-probabilities of the reference are computed once, for all rows."""
    return args.loss_type != "orpo" and (args.precompute_ref_log_probs or not args.use_peft)


@torch.no_grad()
def find_reference(
    run: Run,
    layout: Layout,
    model: torch.nn.Module,
    token_loss: LossInHead,
    args: Arguments,
    loader: DataLoader,
    rows: Rows,
) -> torch.Tensor | None:
    """Return the log-probabilities of all rows under the still untrained model, [rows, 2].

    A file keeps them, since under another strategy the last bits would differ. Every rank takes
    part. None if `compare_answers` runs the reference in each step, or there is none.
    """
    if not runs_reference_before_training(args):
        return None
    file = Path(args.output_dir, f"reference-{rows.fingerprint}.table")
    if run.step > 0 and all(layout.gather([file.is_file()])):
        return load_file(file)["table"].to(layout.device)
    table = torch.zeros(len(rows), 2, device=layout.device)
    is_main_process = layout.accelerator.is_main_process
    model.eval()
    for batch in tqdm(loader, "Reference", disable=not is_main_process):
        with layout.part_of(batch, is_training=False) as part:
            logps, _ = answer_logps(layout, model, token_loss, part, is_training=False)
        table[batch["pairs"]] = logps.T
    table = layout.sum_over_rows(table)  # each row was on one rank, and is zero on all others
    if is_main_process:
        save_file({"table": table.cpu()}, file)
    return table


@torch.no_grad()
def evaluate(
    run: Run,
    layout: Layout,
    model: torch.nn.Module,
    token_loss: LossInHead,
    reference_logps: torch.Tensor | None,
    args: Arguments,
    loader: DataLoader,
) -> None:
    """Log the loss and METRICS of exactly the evaluation pairs, computed as in training."""
    model.eval()
    compared = []
    for batch in run.interruptible(loader):
        with layout.part_of(batch, is_training=False) as part:
            loss, chosen_nll, sums = compare_answers(
                layout, model, token_loss, part, reference_logps, args, is_training=False
            )
        compared.append(torch.cat([torch.stack([loss, chosen_nll]), sums, batch["counts"][:2]]))
    model.train()
    totals = layout.sum_over_rows(sum(compared)).tolist()  # one reduction for all sums
    preference_loss, chosen_nll, *metric_sums, num_pairs, num_trained_on = totals
    metrics = {"eval_loss": preference_loss / num_pairs + chosen_nll / num_trained_on}
    for name, value in zip(METRICS, metric_sums, strict=True):
        metrics[f"eval_{name}"] = value / num_pairs
    run.log_evaluation(metrics)


def mean_metrics(
    layout: Layout,
    losses: Sequence[torch.Tensor],
    metric_sums: Sequence[torch.Tensor],
    num_pairs: torch.Tensor,
) -> dict[str, float]:
    """Return the loss of a step and METRICS per pair, of which ranks that share rows have the same.

    Args:
        losses, metric_sums: of this rank's micro-batches.
        num_pairs: of the step, on all ranks.
    """
    loss = layout.sum_over_rows(sum(losses)).item()
    means = layout.sum_over_rows(sum(metric_sums)) / num_pairs
    return {"loss": loss, **dict(zip(METRICS, means.tolist(), strict=True))}


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
    collator = PairCollator(
        pad_token_id=tokenizer.pad_token_id,
        learn_prompts=args.loss_type == "orpo",
        one_line=takes_one_line(args.attn_implementation),
        pad_to_multiple_of=layout.multiple_of,
    )
    both = join_splits(train_rows, eval_rows)  # one numbering, for the table of the reference
    train_loader = plan.training_loader(both, collator, first_step=run.step)
    whole_loader = plan.ordered_loader(both, collator, range(len(both)))
    # Without evaluation rows it is empty
    eval_loader = plan.ordered_loader(both, collator, range(len(train_rows), len(both)))

    # ---- Model, optimizer, schedule ----
    model = load_model(args, layout)
    token_loss = LossInHead(model, args.max_logits_mib, layout.device, is_compiled(accelerator))
    check_model(
        model,
        train_rows.largest_token(tokenizer),
        shares_lines=collator.one_line,
        gives_ends=collator.one_line,
    )
    notes = describe_rows(train_rows, eval_rows)
    notes["batch"] = plan.describe_batch("pairs", 2 * lengths.mean())
    notes["loss"] = str(token_loss)
    notes["sample"] = show_pair(train_rows.dataset[0], tokenizer)
    run.summarize(model, notes)
    optimizer, schedule = make_optimizer(model, args, accelerator, plan.total_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    # While the model has its original weights
    reference_logps = find_reference(run, layout, model, token_loss, args, whole_loader, both)
    run.resume(model, optimizer, schedule)

    # ---- Train ----
    measure = partial(evaluate, run, layout, model, token_loss, reference_logps, args)
    if eval_loader and run.owes_evaluation(plan.evaluate_after):
        measure(eval_loader)
    model.train()
    batches = iter(train_loader)
    for step in run.steps():
        micro_batches = [next(batches) for _ in range(args.gradient_accumulation_steps)]
        # Pairs, tokens that are trained on, and all tokens without padding.
        # Divided by the counts of the whole step on all ranks, the loss is the same for any number
        # of ranks and micro-batches.
        counts = layout.sum_over_rows(sum(batch["counts"] for batch in micro_batches))
        num_pairs, num_trained_on, num_tokens = counts
        losses = []
        metric_sums = []
        grad_norm = None
        for batch in micro_batches:
            with accelerator.accumulate(model), layout.part_of(batch) as part:
                preference_loss, chosen_nll, sums = compare_answers(
                    layout, model, token_loss, part, reference_logps, args
                )
                metric_sums.append(sums)
                loss = preference_loss / num_pairs + chosen_nll / num_trained_on
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
        run.finish_step(
            None,  # mean_metrics reports the loss
            grad_norm,
            num_tokens,
            epoch=step / plan.steps_per_epoch,
            more=partial(mean_metrics, layout, losses, metric_sums, num_pairs),
        )
        if eval_loader and step in plan.evaluate_after:
            measure(eval_loader)

    # ---- Save ----
    stop_tokens = ChatTemplate(tokenizer).stop_tokens()
    save_model(accelerator, model, tokenizer, args.output_dir, stop_tokens)
    run.finish(f'Ask it: python scripts/generate.py {args.output_dir} --prompt "..."')


def main() -> None:
    args = parse(Arguments, __doc__)
    # From here on a signal stops the run cleanly, and status.json records how it ends
    with Run(args) as run:
        train(args, run)


if __name__ == "__main__":
    main()
