# SPDX-License-Identifier: Apache-2.0
r"""Instruction tuning over a pipeline: each rank has some of the layers of a Llama-like model.

The YAML file gives ranks and precision, the command line the pipeline and everything about
learning:

    accelerate launch --config_file accelerate_configs/pp.yaml --num_processes 2 \
        recipes/llama_pipeline.py --pp_size 2
    accelerate launch --config_file accelerate_configs/pp.yaml --num_processes 8 \
        recipes/llama_pipeline.py --pp_size 4 --shard_stages --pipeline_schedule zbv \
        --model_name_or_path meta-llama/Llama-3.1-8B --dataset_name rows.jsonl \
        --per_device_train_batch_size 16

It is for links between hosts that are too slow for FSDP: only hidden states go from stage to stage.
Where FSDP works well, use recipes/llama.py, whose ranks never wait for micro-batches. Run and
result are the same: the same command again continues from the newest checkpoint, which
recipes/llama.py can continue too, and the other way round. Exit codes: core/exits.py.
To make it yours: python scripts/copy_recipe.py llama_pipeline my_project, then look for EDIT.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import set_seed

from core.arguments import (
    ChatArguments,
    CommonArguments,
    InstructionTuningArguments,
    LengthArguments,
    LossInHeadArguments,
    MixtureArguments,
    RowArguments,
)
from core.batches import Plan, TokenCollator, pack
from core.chat import (
    CHAT_COLUMNS,
    ChatTemplate,
    read_conversation,
    show_trained_tokens,
    tokenize_conversation,
)
from core.cli import arg, parse
from core.data import Rows, describe_rows, hold_out_and_mix, read_rows
from core.engine import Layout, make_accelerator
from core.export import save_model
from core.loss import perplexity_of
from core.model import (
    add_neftune,
    check_model,
    load_pretrained,
    load_tokenizer,
    make_optimizer,
    set_up_layers,
)
from core.run import Run
from extras.pipeline.batches import PipelineCollator
from extras.pipeline.layout import PipelineLayout
from extras.pipeline.pipeline import Pipeline
from extras.pipeline.schedules import num_microbatches
from extras.pipeline.stages import (
    PartOfModel,
    Stage,
    check_stages,
    describe_pipeline,
    outline_of,
    stages_of_rank,
)

# EDIT: your columns, {prompt: answer}; a column named messages needs no entry
PROMPT_AND_ANSWER = {"prompt": "completion", "instruction": "output", "question": "answer"}


@dataclass(kw_only=True)
class Arguments(
    LossInHeadArguments,
    CommonArguments,
    MixtureArguments,
    LengthArguments,
    RowArguments,
    ChatArguments,
    InstructionTuningArguments,
):
    """Instruction tuning over a pipeline."""

    EXTRAS = ("configs", "hosts", "object_store", "pipeline", "varlen")
    model_name_or_path: str = "HuggingFaceTB/SmolLM2-135M"
    # EDIT: your data set. Default: 2,260 rows (Apache-2.0 license)
    dataset_name: list[str] = arg(["HuggingFaceTB/smoltalk"])
    output_dir: str = "runs/llama_pipeline"
    COLUMN_ROLES = (*CHAT_COLUMNS, *PROMPT_AND_ANSWER, *PROMPT_AND_ANSWER.values())
    packing: bool = arg(
        False, "pack whole rows into sequences of --max_length tokens, which batch sizes count"
    )

    def conflicts(self) -> Iterator[str]:
        if self.use_peft:
            yield (
                "--use_peft: this recipe trains all weights: for adapters use recipes/llama.py, "
                "with fsdp2_full_shard.yaml to split their base"
            )
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


def make_collators(args: Arguments, pad: int) -> tuple[PipelineCollator, PipelineCollator]:
    """Return what makes the batches to train on, and those to evaluate on.

    All ranks of a pipeline get the same ones, cut into micro-batches of one shape.
    """
    collator = PipelineCollator(
        TokenCollator(pad), args.per_device_train_batch_size, num_microbatches(args)
    )
    packer = collator
    if args.packing:  # Lines of one width
        packer = dataclasses.replace(collator, collate=TokenCollator(pad, width=args.max_length))
    return packer, collator.for_rows(args.per_device_eval_batch_size)


# ---- Model ----
def load_part(args: Arguments, layout: Layout, stages: Sequence[Stage]) -> Any:
    """Return the part of the model that this rank trains; it reads no other weights.

    Args:
        stages: those of this rank.
    """
    model, _ = load_pretrained(PartOfModel(stages), args, layout)
    set_up_layers(model, args)
    add_neftune(model, args.neftune_noise_alpha)
    return model.to(layout.device)


@torch.no_grad()
def evaluate(
    run: Run, layout: PipelineLayout, pipeline: Pipeline, batches: Iterable[Mapping[str, Any]]
) -> None:
    """Log the loss and the perplexity of the evaluation batches. Every rank takes part."""
    pipeline.eval()
    loss = torch.zeros((), device=layout.device)
    num_trained_on = torch.zeros((), dtype=torch.long, device=layout.device)
    for batch in run.interruptible(batches):
        loss += pipeline.evaluate(batch)
        num_trained_on += batch["counts"][0]
    pipeline.train()
    loss = layout.sum_over_tokens(loss)  # 0 on ranks without the last stage
    num_trained_on = layout.sum_over_rows(num_trained_on)
    mean = loss.item() / num_trained_on.item()
    run.log_evaluation({"eval_loss": mean, "eval_perplexity": perplexity_of(mean)})


def train(args: Arguments, run: Run) -> None:
    accelerator, layout = make_accelerator(args)
    assert isinstance(layout, PipelineLayout)  # what its extra makes
    run.start(layout)
    set_seed(args.seed)

    # ---- Data ----
    tokenizer = load_tokenizer(args)
    with accelerator.local_main_process_first():  # the other ranks read its cache
        train_rows, eval_rows = load_data(args, tokenizer)
    lengths = train_rows.lengths
    # In the order of their first rows
    lines = sorted(pack(lengths, args.max_length), key=min) if args.packing else None
    plan = Plan(args, layout, len(lines or lengths), lengths)
    run.check_plan(plan, train_rows, eval_rows)
    train_collator, eval_collator = make_collators(args, tokenizer.pad_token_id)
    train_loader = plan.training_loader(
        train_rows, train_collator, first_step=run.step, lines=lines
    )
    eval_loader = plan.evaluation_loader(eval_rows, eval_collator)

    # ---- Model, optimizer, schedule ----
    outline = outline_of(args)  # the whole model without its weights
    stages = check_stages(args, outline)
    check_model(outline, train_rows.largest_token(tokenizer), shares_lines=args.packing)
    notes = describe_rows(train_rows, eval_rows)
    notes["batch"] = plan.describe_batch()
    notes["pipeline"] = describe_pipeline(args, stages)
    notes["sample"] = show_trained_tokens(train_rows.dataset[0], tokenizer)
    run.summarize(outline, notes)

    own_stages = stages_of_rank(args, layout, stages)
    model = load_part(args, layout, own_stages)
    model.left_out = getattr(outline, "left_out", ("", {}))  # What the result keeps of the base
    # With --shard_stages the weights are shards from here on
    pipeline = Pipeline(args, layout, own_stages, model)
    optimizer, schedule = make_optimizer(model, args, accelerator, plan.total_steps)
    optimizer = accelerator.prepare(optimizer)
    run.resume(model, optimizer, schedule)

    # ---- Train ----
    measure = partial(evaluate, run, layout, pipeline)
    if eval_loader and run.owes_evaluation(plan.evaluate_after):
        measure(eval_loader)
    pipeline.train()
    batches = iter(train_loader)
    for step in run.steps():
        window = [next(batches) for _ in range(args.gradient_accumulation_steps)]
        # Tokens that are trained on, and all tokens without padding.
        # Divided by the counts of the whole step over all pipelines, the loss is the same for any
        # number of stages, pipelines and micro-batches.
        counts = layout.sum_over_rows(sum(batch["counts"] for batch in window))
        num_trained_on, num_tokens = counts
        losses = []
        grad_norm = None
        for batch in window:
            with accelerator.accumulate():
                # Forward and backward passes of all micro-batches, in the order of the schedule;
                # the loss is 0 on ranks without the last stage
                losses.append(pipeline.step(batch, num_trained_on))
                if accelerator.sync_gradients:
                    pipeline.reduce_gradients()
                    max_norm = args.max_grad_norm or math.inf  # 0 only measures the norm
                    grad_norm = pipeline.clip_gradients(max_norm)
                    # Has optimizer.step() change nothing if the gradient is NaN or infinite
                    run.skip_if_not_finite(grad_norm, losses, window)
                # These act after the last batch of the window only
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
