# SPDX-License-Identifier: Apache-2.0
r"""Instruction tuning of mixtures of experts, Mixtral as the example, with the router's loss.

The YAML file owns the strategy, the command line everything about learning:

    accelerate launch --config_file accelerate_configs/fsdp.yaml recipes/mixtral.py
    accelerate launch --config_file accelerate_configs/fsdp.yaml --num_processes 8 \
        recipes/mixtral.py --model_name_or_path mistralai/Mixtral-8x7B-v0.1 --dtype bfloat16 \
        --dataset_name rows.jsonl --use_peft --learning_rate 2e-4

A good run prints a summary with one row as the model sees it, a loss that falls, a largest load of
an expert that stays small, and the folder that `from_pretrained` loads. The same command again
continues from the newest checkpoint. Exit codes: core/exits.py. To make it yours:
python scripts/copy_recipe.py mixtral my_project, then look for EDIT.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import set_seed
from torch.nn.functional import pad
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from core.arguments import (
    ChatArguments,
    CommonArguments,
    InstructionTuningArguments,
    LengthArguments,
    LossInHeadArguments,
    MixtureArguments,
    RowArguments,
)
from core.batches import Line, Plan, TokenCollator, takes_one_line
from core.chat import (
    CHAT_COLUMNS,
    ChatTemplate,
    read_conversation,
    show_trained_tokens,
    tokenize_conversation,
)
from core.cli import NOT_NEGATIVE, arg, parse
from core.data import Rows, describe_rows, hold_out_and_mix, read_rows
from core.engine import Layout, backward_of_sum, make_accelerator
from core.export import save_model
from core.loss import LossInHead, perplexity_of
from core.model import (
    add_adapters,
    add_neftune,
    base_model_of,
    check_model,
    load_pretrained,
    load_tokenizer,
    make_optimizer,
    set_up_layers,
)
from core.run import Run

# EDIT: your columns, {prompt: answer}; a column named messages needs no entry
PROMPT_AND_ANSWER = {"prompt": "completion", "instruction": "output", "question": "answer"}


@dataclass(kw_only=True)
class Arguments(
    CommonArguments,
    LossInHeadArguments,
    MixtureArguments,
    LengthArguments,
    RowArguments,
    ChatArguments,
    InstructionTuningArguments,
):
    """Instruction tuning of mixtures of experts."""

    EXTRAS = ("configs", "hosts", "object_store", "mesh", "experts", "varlen")
    MESH = ("tp", "cp", "sp")
    model_name_or_path: str = "allenai/OLMoE-1B-7B-0924"  # Apache-2.0
    # EDIT: your data set. Default: 2,260 rows (Apache-2.0 license)
    dataset_name: list[str] = arg(["HuggingFaceTB/smoltalk"])
    output_dir: str = "runs/mixtral"
    COLUMN_ROLES = (*CHAT_COLUMNS, *PROMPT_AND_ANSWER, *PROMPT_AND_ANSWER.values())
    # Experts are parameters of a mixture and not layers
    lora_target_parameters: list[str] = arg(
        ["experts.gate_up_proj", "experts.down_proj"],
        "ends of the names of parameters that get adapters",
        nargs="*",
    )
    router_aux_loss_coef: float | None = arg(
        None, "weight of the router's loss [that of the model's config]", NOT_NEGATIVE
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset_name == ["HuggingFaceTB/smoltalk"] and self.dataset_config is None:
            self.dataset_config = "everyday-conversations"


# ---- Data ----
def tokenize_row(
    row: Mapping[str, Any],
    template: ChatTemplate,
    max_length: int,
    columns: Mapping[str, str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the tokens of a row and their labels; a ValueError says what is wrong with the row.

    EDIT: your columns, from which `read_conversation` makes a conversation.
    """
    conversation = read_conversation(row, PROMPT_AND_ANSWER, columns)
    return tokenize_conversation(conversation, template, max_length, **options)


def load_data(args: Arguments, tokenizer: Any) -> tuple[Rows, Rows | None]:
    """Return the rows to train on and those to evaluate on. EDIT: add filters or sources."""
    prepare = partial(
        tokenize_row,
        template=ChatTemplate(tokenizer, args.chat_template_kwargs or {}),
        max_length=args.max_length,
        columns=args.columns_by_role,
        learn=args.learn,
        completion_only_loss=args.completion_only_loss,
        assistant_only_loss=args.assistant_only_loss,
    )
    rows, eval_rows = read_rows(args, prepare)
    # EDIT: to filter rows, as in rows = rows.filter(lambda row: row["length"] >= 8); by a column of
    # your own, return it from tokenize_row, as row.get("score"); filter eval_rows too
    return hold_out_and_mix(args, rows, eval_rows)


@dataclass(frozen=True)
class RoutedCollator(TokenCollator):
    """Make a batch of rows, and record which of its tokens belong to which row.

    In addition to the entries of TokenCollator, a batch has "routed":
        places: [m], where the tokens that are not padding are in the flattened batch.
        row: [m], the row of each of these tokens, from 0.
        lengths: [rows], the number of tokens of each row.
    """

    def __call__(self, source: Any, lines: Sequence[Line]) -> dict[str, Any]:
        batch = super().__call__(source, lines)
        lengths = torch.tensor(batch["lengths"], dtype=torch.long)
        rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        places = torch.arange(len(rows))
        if not self.one_line:
            width = batch["inputs"]["input_ids"].shape[1]
            first_places = lengths.cumsum(0) - lengths
            places = places - first_places[rows] + rows * width
        batch["routed"] = {"places": places, "row": rows, "lengths": lengths}
        return batch


def routed_of_part(part: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return which tokens of a rank's part of a batch belong to which row, as RoutedCollator does.

    The lengths stay those of whole rows.

    Args:
        part: of lines of one row each, which are padded on the right, as `part_of` yields it.
    """
    routed = part["routed"]
    places_in_row = part["inputs"].get("position_ids")
    if places_in_row is None:  # a whole batch
        return routed
    lines_without_row = len(places_in_row) - len(routed["lengths"])
    lengths = pad(routed["lengths"], (0, lines_without_row))
    places = (places_in_row < lengths[:, None]).flatten().nonzero()[:, 0]
    rows = places // places_in_row.shape[1]
    return {**routed, "places": places, "row": rows}


# ---- Model ----
def load_model(args: Arguments, layout: Layout) -> torch.nn.Module:
    """Return the mixture, with adapters if requested."""
    model, _ = load_pretrained(AutoModelForCausalLM, args, layout)
    set_up_layers(model, args)
    model = add_adapters(
        model,
        args,
        layout,
        task_type="CAUSAL_LM",
        target_modules=lora_layers(model, args.lora_target_modules),
        target_parameters=args.lora_target_parameters,
    )
    add_neftune(model, args.neftune_noise_alpha)
    return model


def lora_layers(model: torch.nn.Module, names: list[str]) -> list[str]:
    """Return the names of the linear layers that get adapters.

    "all-linear" is spelled out here because peft's _convert_peft_config_moe lets it include experts
    and router for some mixtures, and neither for others.
    """
    if names != ["all-linear"]:
        return names
    linear = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            linear.add(name.split(".")[-1])
    return sorted(linear - {"lm_head"})


def router_loss_factor(model: Any, args: Arguments) -> float:
    """Return the weight of the router's loss: --router_aux_loss_coef, or that of the config."""
    if args.router_aux_loss_coef is not None:
        return args.router_aux_loss_coef
    return model.config.get_text_config().router_aux_loss_coef


# ---- Loss ----
def router_loss(
    router_logits: Sequence[torch.Tensor],
    routed: Mapping[str, torch.Tensor],
    top_k: int,
    sum_of_parts: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the router loss of a batch, summed over rows, and the tokens that each expert gets.

    A row's loss is transformers' load_balancing_loss_func of this row only: the number of experts
    times the sum, over experts, of how often a token picks one and how probable it is, each a mean
    over the row's tokens and all layers. It is top_k if the load is even. Applied to a batch, that
    function depends on which rows share the batch, and on padding. Computed per row, as in DeepSeek
    (arXiv 2405.04434, 2412.19437), and weighted by the row's tokens, it adds up like the
    cross-entropy. It is linear in the probabilities, so that it also adds up over the ranks that
    share a row, once each knows how often the whole row's tokens pick each expert.

    Args:
        router_logits: of each layer, [tokens of the flattened batch, experts].
        routed: as in RoutedCollator.
        sum_of_parts: a function that returns the sum of a tensor over the ranks that share the
            rows.

    Returns:
        A scalar in fp32, and the tokens of each expert, [layers, experts].
    """
    logits = torch.stack(tuple(router_logits))[:, routed["places"]]
    probabilities = logits.float().softmax(-1)  # [layers, tokens, experts]
    chosen = probabilities.topk(top_k).indices
    picked = torch.zeros_like(probabilities).scatter(-1, chosen, 1.0)
    num_layers, _, num_experts = probabilities.shape
    # Sums over the layers and the tokens of each row, [rows, experts]
    zeros = probabilities.new_zeros(len(routed["lengths"]), num_experts)
    token_counts = sum_of_parts(zeros.index_add(0, routed["row"], picked.sum(0)))
    probability_sums = zeros.index_add(0, routed["row"], probabilities.sum(0))
    # The product of their means over tokens and layers, weighted by the number of tokens
    products = (token_counts * probability_sums).sum(1)
    losses = num_experts * products / (num_layers**2 * routed["lengths"])
    return losses.sum(), picked.sum(1)


def summed_losses(
    layout: Layout,
    model: torch.nn.Module,
    token_loss: LossInHead,
    batch: Mapping[str, Any],
    top_k: int,
    is_training: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return cross-entropy and router loss summed over a batch, in fp32, and the experts' load.

    The aux_loss in the model's own output also counts padding, so it is not used.

    Args:
        batch: this rank's part of a batch. Each of the three is a sum over its tokens.
    """
    inputs = {**batch["inputs"], "output_router_logits": True}
    losses, output = token_loss.losses(model, {**batch, "inputs": inputs})
    sum_of_parts = partial(layout.sum_over_parts, is_training=is_training)
    routed = routed_of_part(batch)
    return losses.sum(), *router_loss(output.router_logits, routed, top_k, sum_of_parts)


def mean_losses(
    layout: Layout,
    sums: torch.Tensor,
    load: torch.Tensor,
    counts: torch.Tensor,
    is_training: bool = True,
) -> dict[str, float]:
    """Return both losses per token, and the largest load of an expert relative to an even load.

    Args:
        sums: of both losses, on this rank.
        load: the number of tokens that each expert got on this rank, [layers, experts].
        counts: tokens that are trained on, and all tokens, on all ranks.
    """
    sums = layout.sum_over_tokens(sums, is_training)
    load = layout.sum_over_tokens(load, is_training)
    loss, aux_loss = (sums / counts).tolist()
    largest = (load / load.mean(1, keepdim=True)).max().item()
    return {"loss": loss, "aux_loss": aux_loss, "max_expert_load": largest}


@torch.no_grad()
def evaluate(
    run: Run,
    layout: Layout,
    model: torch.nn.Module,
    token_loss: LossInHead,
    loader: DataLoader,
    *,
    top_k: int,
) -> None:
    """Log the losses and the perplexity of exactly the evaluation rows."""
    model.eval()
    sums = torch.zeros(2, device=layout.device)  # cross-entropy and router loss
    load = torch.zeros((), device=layout.device)  # becomes [layers, experts]
    counts = torch.zeros(2, dtype=torch.long, device=layout.device)
    for batch in run.interruptible(loader):
        with layout.part_of(batch, is_training=False) as part:
            loss, aux_loss, batch_load = summed_losses(
                layout, model, token_loss, part, top_k, is_training=False
            )
        sums = sums + torch.stack([loss, aux_loss])
        load = load + batch_load
        counts = counts + batch["counts"]
    model.train()
    counts = layout.sum_over_rows(counts)
    means = mean_losses(layout, sums, load, counts, is_training=False)
    metrics = {f"eval_{name}": mean for name, mean in means.items()}
    metrics["eval_perplexity"] = perplexity_of(means["loss"])
    run.log_evaluation(metrics)


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
    collator = RoutedCollator(
        pad_token_id=tokenizer.pad_token_id,
        one_line=takes_one_line(args.attn_implementation),
        pad_to_multiple_of=layout.multiple_of,
    )
    train_loader = plan.training_loader(train_rows, collator, first_step=run.step)
    eval_loader = plan.evaluation_loader(eval_rows, collator)

    # ---- Model, optimizer, schedule ----
    model = load_model(args, layout)
    top_k = base_model_of(model).config.get_text_config().num_experts_per_tok
    factor = router_loss_factor(model, args)
    # EDIT: another loss of a token is one line of token_losses in core/loss.py, as in
    #     cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)
    token_loss = LossInHead(model, args.max_logits_mib, accelerator.device)
    check_model(
        model,
        train_rows.largest_token(tokenizer),
        shares_lines=collator.one_line,
        gives_ends=collator.one_line,
    )
    notes = describe_rows(train_rows, eval_rows)
    notes["batch"] = plan.describe_batch()
    notes["experts"] = f"{top_k} per token; {factor:g} x the router's loss is added"
    notes["loss"] = str(token_loss)
    notes["sample"] = show_trained_tokens(train_rows.dataset[0], tokenizer)
    run.summarize(model, notes)
    optimizer, schedule = make_optimizer(model, args, accelerator, plan.total_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.resume(model, optimizer, schedule)

    # ---- Train ----
    measure = partial(evaluate, run, layout, model, token_loss, top_k=top_k)
    if eval_loader and run.owes_evaluation(plan.evaluate_after):
        measure(eval_loader)
    model.train()
    batches = iter(train_loader)
    for step in run.steps():
        micro_batches = [next(batches) for _ in range(args.gradient_accumulation_steps)]
        # Tokens that are trained on, and all tokens without padding.
        # Divided by the counts of the whole step on all ranks, the loss is the same for any number
        # of ranks and micro-batches.
        counts = layout.sum_over_rows(sum(batch["counts"] for batch in micro_batches))
        num_trained_on, num_tokens = counts
        losses = []
        sums = torch.zeros(2, device=layout.device)  # cross-entropy and router loss
        load = torch.zeros((), device=layout.device)  # becomes [layers, experts]
        grad_norm = None
        for batch in micro_batches:
            with accelerator.accumulate(model), layout.part_of(batch) as part:
                token_sum, aux_sum, batch_load = summed_losses(
                    layout, model, token_loss, part, top_k
                )
                sums = sums + torch.stack([token_sum.detach(), aux_sum.detach()])
                load = load + batch_load
                loss = token_sum / num_trained_on + factor * aux_sum / num_tokens
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
            None,  # mean_losses reports each loss by itself
            grad_norm,
            num_tokens,
            epoch=step / plan.steps_per_epoch,
            more=partial(mean_losses, layout, sums, load, counts),
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
