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

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

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
    SamplingArguments,
)
from core.batches import Plan, describe_batch, takes_one_line
from core.chat import ChatTemplate, find_tools
from core.cli import POSITIVE, arg, free, parse
from core.data import (
    Rows,
    describe_rows,
    hold_out_and_mix,
    read_rows,
    rename_columns,
)
from core.engine import Layout, backward_of_sum, make_accelerator
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
    split_shared_prompt,
    tokenize_message_pair,
    tokenize_text_pair,
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
    SamplingArguments,
    ChatArguments,
):
    """Preference tuning."""

    EXTRAS: ClassVar[tuple[str, ...]] = ("configs", "hosts", "object_store", "mesh", "varlen")
    LOSS_UNIT: ClassVar[str] = "per pair"
    MESH: ClassVar[Sequence[str]] = ("tp", "cp", "sp")
    model_name_or_path: str = "Qwen/Qwen2.5-0.5B-Instruct"  # Apache-2.0
    # EDIT: your data set. Default: about 62,100 rows of UltraFeedback (MIT license); some of
    # its prompts are too long, so use --skip_bad_rows
    dataset_name: list[str] = arg(["trl-lib/ultrafeedback_binarized"])
    output_dir: str = "runs/llama_dpo"
    COLUMN_ROLES: ClassVar[Sequence[str]] = ("prompt", "chosen", "rejected", "tools")
    columns: list[str] = arg(
        [],
        "your columns as ROLE=COLUMN, as in chosen=better rejected=worse; roles are prompt, "
        "chosen, rejected and tools",
    )
    max_length: int = arg(1024, "tokens of a prompt with one answer; longer ones lose their end")
    learning_rate: float = 1e-6
    loss_type: Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "orpo"] = arg(
        "sigmoid",
        "sigmoid: DPO; sigmoid_norm: the same per token; orpo: no reference, plus the negative "
        "log-likelihood of chosen answers",
    )
    beta: float = arg(
        0.1, "how close to the reference the model stays; tau of ipo, lambda of orpo", POSITIVE
    )
    precompute_ref_log_probs: bool = free(
        False,
        "run the reference once before training, not in each step; always so without adapters",
    )

    @property
    def runs_reference_before_training(self) -> bool:
        """Whether the log-probabilities of the reference are computed once, for all rows."""
        if self.loss_type == "orpo":
            return False
        return self.precompute_ref_log_probs or not self.use_peft


# ---- Data ----
def row_to_pair(row: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return a row's prompt, chosen and rejected answer; a ValueError says what is wrong.

    All three are texts, or all are lists of messages. EDIT: your columns.
    """
    prompt, chosen, rejected = read_pair(row)
    if type(prompt) is type(chosen):
        return prompt, chosen, rejected
    return split_shared_prompt(chosen, rejected)


def tokenize_answers(
    row: Mapping[str, Any],
    template: ChatTemplate,
    max_length: int,
    columns: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the tokens of a row's prompt and of both answers, cut to --max_length.

    Args:
        columns: {role: name of its column}, from --columns.
    """
    named = rename_columns(row, columns or {})
    prompt, chosen, rejected = row_to_pair(named)
    if isinstance(prompt, str):
        return tokenize_text_pair(prompt, chosen, rejected, template.tokenizer, max_length)
    tools = find_tools(named)
    return tokenize_message_pair(row, prompt, chosen, rejected, tools, template, max_length)


def load_data(args: Arguments, tokenizer: Any) -> tuple[Rows, Rows | None]:
    """Return the pairs to train on and those to evaluate on. EDIT: add filters or sources."""
    prepare = partial(
        tokenize_answers,
        template=ChatTemplate(tokenizer, args.chat_template_kwargs or {}),
        max_length=args.max_length,
        columns=args.columns_by_role,
    )
    rows, eval_rows = read_rows(args, prepare)
    # EDIT: to filter rows, change them here, as in
    #     dataset = rows.dataset.filter(lambda row: row["length"] >= 8)
    #     rows = dataclasses.replace(rows, dataset=dataset)
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


def turn_off_dropout(model: torch.nn.Module) -> None:
    """Turn off all that is random, so that only training separates model and reference.

    Layers that read the config while they run get a copy of it; the model saves its own.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        set_rates_to_0(module)
        if module is not model and "config" in vars(module):
            module.config = copy.deepcopy(module.config, copies)
            set_rates_to_0(module.config)


def set_rates_to_0(holder: Any) -> None:
    """Set the rates of dropout, of left-out layers (LayerDrop) and of a router's noise to 0."""
    for name, value in vars(holder).items():
        is_rate = name == "p" or "drop" in name or "jitter" in name
        if is_rate and isinstance(value, float):
            setattr(holder, name, 0.0)


# ---- Loss ----
class PairSums(NamedTuple):
    """Sums over the pairs of a batch, in fp32.

    Attributes:
        loss: the losses of `preference_losses`.
        chosen_nll: the negative log-likelihood of all tokens of chosen lines, which orpo adds to
            its loss; 0 for the other losses.
        metrics: METRICS in their order, [6], without a gradient.
    """

    loss: torch.Tensor
    chosen_nll: torch.Tensor
    metrics: torch.Tensor


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
    sums = sum_answers(place_in_lines(-losses, batch), batch)
    by_pair, prompts = (layout.sum_over_parts(value, is_training) for value in sums)
    return by_pair, prompts


def place_in_lines(logps: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the log-probabilities of tokens at their places in the padded lines, [lines, tokens].

    Padding, and prompts that are not trained on, have 0.
    """
    shape = len(batch["starts"]), batch["longest"]
    flat = torch.zeros(math.prod(shape), device=logps.device)
    return flat.index_put((batch["cells"],), logps).view(shape)


def sum_answers(logps: torch.Tensor, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum over each answer, [2, pairs], and the sum over all prompts.

    Args:
        logps: log-probabilities as `place_in_lines` returns them.
    """
    places = torch.arange(logps.shape[1], device=logps.device)
    is_answer = places >= batch["starts"][:, None]
    answers = (logps * is_answer).sum(1)
    # A rank without pairs still has one line, a dummy that keeps it in step with the others
    num_pairs = len(batch["pairs"])
    by_pair = answers[: 2 * num_pairs].view(2, num_pairs)
    return by_pair, (logps * ~is_answer).sum()


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
) -> PairSums:
    """Return the loss and the metrics of a batch's pairs.

    Args:
        batch: this rank's part of a batch; ranks that share it get the same.
        reference_logps: log-probabilities of all rows under the reference, [rows, 2]; None runs
            the model without its adapters as the reference, except for orpo, which has none.
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
    metrics = sum_metrics(scores.detach(), logps.detach(), args.beta)
    return PairSums(losses.sum(), chosen_nll, metrics)


def sum_metrics(scores: torch.Tensor, logps: torch.Tensor, beta: float) -> torch.Tensor:
    """Return METRICS in their order, summed over pairs, [6].

    Args:
        scores: as `preference_losses` takes them.
        logps: log-probabilities of chosen and rejected answers, [2, pairs].
    """
    rewards = beta * scores
    margins = rewards[0] - rewards[1]
    is_right = margins > 0
    return torch.stack(
        [
            *rewards.sum(1),
            margins.sum(),
            is_right.float().sum(),
            *logps.sum(1),
        ]
    )


@torch.no_grad()
def run_reference(
    layout: Layout,
    model: torch.nn.Module,
    token_loss: LossInHead,
    loader: DataLoader,
    num_rows: int,
) -> torch.Tensor:
    """Return the log-probabilities of all rows under the still untrained model, [rows, 2]."""
    reference_logps = torch.zeros(num_rows, 2, device=layout.device)
    model.eval()
    for batch in tqdm(loader, "Reference", disable=not layout.accelerator.is_main_process):
        with layout.part_of(batch, is_training=False) as part:
            logps, _ = answer_logps(layout, model, token_loss, part, is_training=False)
        reference_logps[batch["pairs"]] = logps.T
    # Each row was on one rank, and is zero on all others
    return layout.sum_over_rows(reference_logps)


def compute_once(
    path: Path, run: Run, layout: Layout, compute: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Return what `compute` returned when the run began, which a file in its folder keeps.

    Under another strategy the last bits would differ. Every rank takes part.
    """
    if run.step > 0 and path.is_file():
        return load_file(path)["table"].to(layout.device)
    table = compute()
    if layout.accelerator.is_main_process:
        save_file({"table": table.cpu()}, path)
    return table


@torch.no_grad()
def evaluate(
    run: Run,
    layout: Layout,
    model: torch.nn.Module,
    token_loss: LossInHead,
    loader: DataLoader,
    reference_logps: torch.Tensor | None,
    args: Arguments,
) -> None:
    """Log the loss and METRICS of exactly the evaluation pairs, computed as in training."""
    model.eval()
    compared = []
    for batch in run.interruptible(loader):
        with layout.part_of(batch, is_training=False) as part:
            sums = compare_answers(
                layout, model, token_loss, part, reference_logps, args, is_training=False
            )
        losses = torch.stack([sums.loss, sums.chosen_nll])
        num_pairs_and_tokens = batch["counts"][:2]
        compared.append(torch.cat([losses, sums.metrics, num_pairs_and_tokens]))
    model.train()
    totals = layout.sum_over_rows(sum(compared)).tolist()  # one reduction for all sums
    preference_loss, chosen_nll, *metric_sums, num_pairs, num_trained_on = totals
    loss = preference_loss / num_pairs + chosen_nll / num_trained_on
    metrics = {"eval_loss": loss}
    for name, value in zip(METRICS, metric_sums, strict=True):
        metrics[f"eval_{name}"] = value / num_pairs
    accuracy = metrics["eval_rewards/accuracies"]
    run.log_evaluation(metrics, f"loss {loss:.4f}, accuracy {accuracy:.3f} on held-out pairs")


def mean_metrics(
    layout: Layout,
    losses: Sequence[torch.Tensor],
    metric_sums: Sequence[torch.Tensor],
    num_pairs: torch.Tensor,
) -> dict[str, float]:
    """Return the loss of a step, and METRICS per pair.

    Args:
        losses: those of this rank's micro-batches, of which ranks that share rows have the same.
        metric_sums: those of `PairSums` of this rank's micro-batches.
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
    run.check_plan(plan.total_steps, plan.rows_per_step, train_rows, eval_rows)
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
    token_loss = LossInHead(model, args.max_logits_mib, accelerator.device)
    check_model(
        model,
        train_rows.largest_token(tokenizer),
        shares_lines=collator.one_line,
        gives_ends=collator.one_line,
    )
    notes = describe_rows(train_rows, eval_rows)
    notes["batch"] = describe_batch(args, plan.layout, "pairs", 2 * lengths.mean())
    notes["loss"] = str(token_loss)
    notes["sample"] = show_pair(train_rows.dataset[0], tokenizer)
    run.summarize(model, notes)
    optimizer, schedule = make_optimizer(model, args, accelerator, plan.total_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    reference_logps = None  # compare_answers then runs it in each step
    if args.runs_reference_before_training:  # while the model has its original weights
        reference_logps = compute_once(
            Path(args.output_dir, f"reference-{both.fingerprint}.table"),
            run,
            layout,
            partial(run_reference, layout, model, token_loss, whole_loader, len(both)),
        )
    run.resume(model, optimizer, schedule)

    # ---- Train ----
    measure = partial(
        evaluate,
        run,
        layout,
        model,
        token_loss,
        reference_logps=reference_logps,
        args=args,
    )
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
                sums = compare_answers(layout, model, token_loss, part, reference_logps, args)
                metric_sums.append(sums.metrics)
                loss = sums.loss / num_pairs + sums.chosen_nll / num_trained_on
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
    save_model(
        accelerator,
        model,
        tokenizer,
        args.output_dir,
        stop_tokens=ChatTemplate(tokenizer).stop_tokens(),
    )
    run.finish(f'Ask it: python scripts/generate.py {args.output_dir} --prompt "..."')


def main() -> None:
    args = parse(Arguments, __doc__)
    # From here on a signal stops the run cleanly, and status.json records how it ends
    with Run(args) as run:
        train(args, run)


if __name__ == "__main__":
    main()
