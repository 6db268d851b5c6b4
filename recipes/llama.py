# SPDX-License-Identifier: Apache-2.0
r"""Instruction tuning of any causal language model, Llama as the example: full, LoRA or QLoRA.

The YAML file owns the strategy, the command line everything about learning:

    accelerate launch --config_file accelerate_configs/fsdp.yaml recipes/llama.py
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 \
        recipes/llama.py --model_name_or_path meta-llama/Llama-3.2-1B \
        --dataset_name rows.jsonl --use_peft --learning_rate 2e-4
    accelerate launch --config_file accelerate_configs/deepspeed_zero3.yaml --num_processes 8 \
        recipes/llama.py --packing

A good run prints a summary with one row as the model sees it, a loss that falls, and the folder
that `from_pretrained` loads. The same command again continues from the newest checkpoint. Exit
codes: core/exits.py. To make it yours: python scripts/copy_recipe.py llama my_project, then
look for EDIT.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM

from core.arguments import (
    ChatArguments,
    CommonArguments,
    DenseModelArguments,
    InstructionTuningArguments,
    LengthArguments,
    LigerArguments,
    LossInHeadArguments,
    MixtureArguments,
    RowArguments,
)
from core.batches import Plan, TokenCollator, pack, takes_one_line
from core.chat import (
    CHAT_COLUMNS,
    ChatTemplate,
    Conversation,
    read_conversation,
    show_trained_tokens,
    tokenize_conversation,
)
from core.cli import arg, free, parse
from core.data import Rows, describe_rows, hold_out_and_mix, read_rows
from core.engine import Layout, backward_of_sum, is_compiled, make_accelerator
from core.export import save_model
from core.extras import first_of
from core.loss import LossInHead, evaluate_perplexity
from core.model import (
    add_adapters,
    add_neftune,
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
    DenseModelArguments,
    LossInHeadArguments,
    LigerArguments,
    MixtureArguments,
    LengthArguments,
    RowArguments,
    ChatArguments,
    InstructionTuningArguments,
):
    """Instruction tuning."""

    EXTRAS = ("configs", "hosts", "object_store", "mesh", "predict", "varlen", "float8")
    MESH = ("tp", "cp", "sp")
    model_name_or_path: str = "HuggingFaceTB/SmolLM2-135M"
    # EDIT: your data set. Default: 2,260 rows (Apache-2.0 license)
    dataset_name: list[str] = arg(["HuggingFaceTB/smoltalk"])
    output_dir: str = "runs/llama"
    COLUMN_ROLES = (*CHAT_COLUMNS, *PROMPT_AND_ANSWER, *PROMPT_AND_ANSWER.values())
    packing: bool = arg(
        False, "pack whole rows into sequences of --max_length tokens, which batch sizes count"
    )
    padding_free: bool = free(
        False, "concatenate the rows of each batch instead of padding them; the loss stays the same"
    )

    def conflicts(self) -> Iterator[str]:
        if self.packing and self.padding_free:
            yield "--packing and --padding_free: choose one; packed rows have almost no padding"
        if self.packing and self.train_sampling_strategy == "group_by_length":
            yield (
                "--train_sampling_strategy group_by_length is for padded rows, and packed "
                "sequences all have one length: use random"
            )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset_name == ["HuggingFaceTB/smoltalk"] and self.dataset_config is None:
            self.dataset_config = "everyday-conversations"


# ---- Data ----
def row_to_conversation(
    row: Mapping[str, Any], columns: Mapping[str, str] | None = None
) -> Conversation:
    """Return a row as a conversation; a ValueError says why it is not one. EDIT: your columns.

    Args:
        columns: {role: name of its column}, from --columns.
    """
    return read_conversation(row, PROMPT_AND_ANSWER, columns)


def tokenize_row(
    row: Mapping[str, Any],
    template: ChatTemplate,
    max_length: int,
    columns: Mapping[str, str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the tokens of a row and their labels: by default, the answers are trained on."""
    conversation = row_to_conversation(row, columns)
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


# ---- Model ----
def load_model(args: Arguments, layout: Layout) -> torch.nn.Module:
    """Return the model, quantized and with adapters if the arguments request it."""
    model, _ = load_pretrained(AutoModelForCausalLM, args, layout)
    set_up_layers(model, args)
    # EDIT: to freeze layers without --use_peft: model.model.layers[0].requires_grad_(False)
    model = add_adapters(model, args, layout, task_type="CAUSAL_LM")
    add_neftune(model, args.neftune_noise_alpha)
    return model


def train(args: Arguments, run: Run) -> None:
    accelerator, layout = make_accelerator(args)
    run.start(layout)
    set_seed(args.seed)

    # ---- Data ----
    tokenizer = load_tokenizer(args)
    with accelerator.local_main_process_first():  # the other ranks read its cache
        train_rows, eval_rows = load_data(args, tokenizer)
    lengths = train_rows.lengths
    lines = None
    if args.packing:
        lines = sorted(pack(lengths, args.max_length), key=min)  # by their first rows
    plan = Plan(args, layout, len(lines or lengths), lengths)
    run.check_plan(plan, train_rows, eval_rows)
    # The collator makes batches of rows, for evaluation always. The packer makes those to train on:
    # with --packing all have one shape, --max_length wide, for which layers are compiled once.
    collator = TokenCollator(
        pad_token_id=tokenizer.pad_token_id,
        height=args.per_device_train_batch_size,
        refit=args.padding_free,  # fit the rows of a batch into fewer lines, in place of padding
        one_line=takes_one_line(args.attn_implementation),
        pad_to_multiple_of=layout.multiple_of,
    )
    packer = dataclasses.replace(collator, width=args.max_length if lines else 0)
    train_loader = plan.training_loader(train_rows, packer, first_step=run.step, lines=lines)
    eval_loader = plan.evaluation_loader(eval_rows, collator)

    # ---- Model, optimizer, schedule ----
    model = load_model(args, layout)
    # EDIT: another loss of a token is one line of token_losses in core/loss.py, as in
    #     cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)
    token_loss = LossInHead(model, args.max_logits_mib, layout.device, is_compiled(accelerator))
    check_model(
        model,
        train_rows.largest_token(tokenizer),
        shares_lines=args.packing or args.padding_free or collator.one_line,
        gives_ends=collator.one_line or layout.parts_of_row() > 1,
    )
    predictor = first_of(
        args.EXTRAS, "predictor", args, run, accelerator, plan, eval_rows, tokenizer, model
    )
    notes = describe_rows(train_rows, eval_rows)
    if predictor is not None:
        notes["predictions"] = str(predictor)
    notes["batch"] = plan.describe_batch()
    notes["loss"] = str(token_loss)
    notes["sample"] = show_trained_tokens(train_rows.dataset[0], tokenizer)
    run.summarize(model, notes)
    optimizer, schedule = make_optimizer(model, args, accelerator, plan.total_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.resume(model, optimizer, schedule)

    # ---- Train ----
    measure = partial(evaluate_perplexity, run, layout, model, token_loss, predictor=predictor)
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
        grad_norm = None
        for batch in micro_batches:
            with accelerator.accumulate(model), layout.part_of(batch) as part:
                loss = token_loss(model, part) / num_trained_on
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
        # EDIT: to log a metric of your own, as in more=lambda: {"trained": num_trained_on.item()}
        run.finish_step(losses, grad_norm, num_tokens, epoch=step / plan.steps_per_epoch)
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
