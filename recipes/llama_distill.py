# SPDX-License-Identifier: Apache-2.0
r"""Distillation: a student learns what a teacher with the same tokens says, Llama as the example.

The YAML file owns the strategy, the command line everything about learning:

    accelerate launch --config_file accelerate_configs/fsdp.yaml recipes/llama_distill.py
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 \
        recipes/llama_distill.py --dataset_name rows.jsonl --loss_type reverse_kl \
        --teacher_model_name_or_path meta-llama/Llama-3.1-8B-Instruct --teacher_load_in_4bit
    accelerate launch --config_file accelerate_configs/deepspeed_zero3.yaml --num_processes 8 \
        recipes/llama_distill.py --teacher_model_name_or_path Qwen/Qwen3-32B --loss_type jsd

A good run prints a summary with one row as both models see it, a divergence that falls, and the
folder that `from_pretrained` loads. The same command again continues from the newest checkpoint.
Exit codes: core/exits.py. To make it yours: python scripts/copy_recipe.py llama_distill my_project,
then look for EDIT.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
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
from core.cli import POSITIVE, SHARE, arg, free, parse
from core.data import Rows, describe_rows, hold_out_and_mix, read_rows
from core.engine import Layout, backward_of_sum, make_accelerator
from core.export import save_model
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
from tasks.distillation import DistillationInHead, FrozenModel, check_same_tokens

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
    """Distillation."""

    EXTRAS = ("configs", "hosts", "object_store", "varlen")
    model_name_or_path: str = "HuggingFaceTB/SmolLM2-135M-Instruct"  # Apache-2.0
    # EDIT: your data set. Default: 2,260 rows (Apache-2.0 license)
    dataset_name: list[str] = arg(["HuggingFaceTB/smoltalk"])
    output_dir: str = "runs/llama_distill"
    COLUMN_ROLES = (*CHAT_COLUMNS, *PROMPT_AND_ANSWER, *PROMPT_AND_ANSWER.values())
    teacher_model_name_or_path: str = arg(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct", "hub id or folder of the teacher"
    )
    teacher_load_in_4bit: bool = arg(False, "load the teacher in 4 bits, whole on each rank")
    loss_type: Literal["forward_kl", "reverse_kl", "jsd"] = arg(
        "forward_kl",
        "forward_kl: KL(teacher, student); reverse_kl: KL(student, teacher); jsd: between them",
    )
    beta: float = arg(0.5, "share of the teacher in the mixture of jsd, between 0 and 1", SHARE)
    temperature: float = arg(1.0, "divides the logits of both models", POSITIVE)
    hard_loss_share: float = arg(
        0.0,
        "share of the cross-entropy of the rows' tokens. Only above 0 is the other part multiplied "
        "by the square of the temperature",
        SHARE,
    )
    packing: bool = arg(
        False, "pack whole rows into sequences of --max_length tokens, which batch sizes count"
    )
    padding_free: bool = free(
        False, "concatenate the rows of each batch instead of padding them; the loss stays the same"
    )

    def conflicts(self) -> Iterator[str]:
        if self.loss_type == "jsd" and self.beta == 0:
            yield "--beta 0: jsd would always be 0: use --loss_type forward_kl"
        if self.loss_type != "jsd" and self.beta != 0.5:
            yield f"--beta is for --loss_type jsd, not {self.loss_type}: leave it out"
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


@torch.no_grad()
def evaluate(
    run: Run,
    layout: Layout,
    model: torch.nn.Module,
    token_loss: DistillationInHead,
    loader: DataLoader,
) -> None:
    """Log the loss of exactly the evaluation rows, per token trained on, as in training."""
    model.eval()
    total = torch.zeros(2, device=layout.device)
    for batch in run.interruptible(loader):
        total += torch.stack([token_loss(model, batch), batch["counts"][0]])
    model.train()
    loss, num_trained_on = layout.sum_over_rows(total).tolist()
    run.log_evaluation({"eval_loss": loss / num_trained_on})


def train(args: Arguments, run: Run) -> None:
    accelerator, layout = make_accelerator(args)
    run.start(layout)
    set_seed(args.seed)

    # ---- Data ----
    tokenizer = load_tokenizer(args)
    check_same_tokens(args.teacher_model_name_or_path, tokenizer)
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
    )
    packer = dataclasses.replace(collator, width=args.max_length if lines else 0)
    train_loader = plan.training_loader(train_rows, packer, first_step=run.step, lines=lines)
    eval_loader = plan.evaluation_loader(eval_rows, collator)

    # ---- Model, optimizer, schedule ----
    model = load_model(args, layout)
    check_rows = partial(
        check_model,
        largest_token=train_rows.largest_token(tokenizer),
        shares_lines=args.packing or args.padding_free or collator.one_line,
        gives_ends=collator.one_line,
    )
    check_rows(model)
    notes = describe_rows(train_rows, eval_rows)
    notes["teacher"] = f"{args.teacher_model_name_or_path}, {args.loss_type}"
    notes["batch"] = plan.describe_batch()
    notes["sample"] = show_trained_tokens(train_rows.dataset[0], tokenizer)
    run.summarize(model, notes)  # A dry run ends here
    teacher = FrozenModel(
        args.teacher_model_name_or_path,
        accelerator,
        args.dtype,
        args.teacher_load_in_4bit,
        attn_implementation=args.attn_implementation,
    )
    check_rows(teacher.model)
    # EDIT: another divergence of a token is a line of divergence in tasks/distillation.py
    token_loss = DistillationInHead(model, args, accelerator.device, teacher)
    optimizer, schedule = make_optimizer(model, args, accelerator, plan.total_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.resume(model, optimizer, schedule)

    # ---- Train ----
    measure = partial(evaluate, run, layout, model, token_loss)
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
            with accelerator.accumulate(model):
                loss = token_loss(model, batch) / num_trained_on
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
