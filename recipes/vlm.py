# SPDX-License-Identifier: Apache-2.0
r"""Instruction tuning of models that read images and text: SmolVLM, Qwen-VL, LLaVA, Gemma 3, ...

The YAML file owns the strategy, the command line everything about learning:

    accelerate launch --config_file accelerate_configs/fsdp.yaml recipes/vlm.py
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 \
        recipes/vlm.py --model_name_or_path google/gemma-3-4b-it \
        --dataset_name rows.jsonl --use_peft --learning_rate 2e-4
    accelerate launch --config_file accelerate_configs/deepspeed_zero3.yaml --num_processes 8 \
        recipes/vlm.py --freeze_vision_tower false --learning_rate 1e-5

A good run prints a summary with one row as the model sees it, a loss that falls, and the folder
that `pipeline("image-text-to-text")` loads. The same command again continues from the newest
checkpoint. Exit codes: core/exits.py. To make it yours:
python scripts/copy_recipe.py vlm my_project, then look for EDIT.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import set_seed
from transformers import AutoModelForImageTextToText

from core.arguments import (
    ChatArguments,
    CommonArguments,
    DenseModelArguments,
    InstructionTuningArguments,
    LengthArguments,
    LossInHeadArguments,
    MixtureArguments,
    RowArguments,
)
from core.batches import Plan
from core.chat import CHAT_COLUMNS, Conversation, show_trained_tokens
from core.cli import NOT_NEGATIVE, arg, free, parse
from core.data import (
    Rows,
    describe_rows,
    hold_out_and_mix,
    open_sources,
    prepare_rows,
    row_of,
)
from core.engine import Layout, backward_of_sum, make_accelerator
from core.exits import Exit, fail
from core.export import save_model
from core.loss import LossInHead, evaluate_perplexity
from core.model import (
    add_adapters,
    add_neftune,
    check_model,
    load_pretrained,
    loading,
    make_optimizer,
    set_up_layers,
)
from core.run import Run
from tasks.illustrated import (
    IMAGE_COLUMNS,
    IllustratedCollator,
    IllustratedTemplate,
    image_options,
    read_illustrated,
    tokenize_illustrated,
)
from tasks.images import (
    cast_pixels,
    choose_num_workers,
    load_picture,
    load_processor_of_text_and_images,
    open_images,
)

# EDIT: your columns, {prompt: answer}; a column named messages needs no entry
PROMPT_AND_ANSWER = {"prompt": "completion", "instruction": "output", "question": "answer"}


@dataclass(kw_only=True)
class Arguments(
    CommonArguments,
    DenseModelArguments,
    LossInHeadArguments,
    MixtureArguments,
    LengthArguments,
    RowArguments,
    ChatArguments,
    InstructionTuningArguments,
):
    """Instruction tuning with images."""

    EXTRAS = ("configs", "hosts", "object_store")
    model_name_or_path: str = "HuggingFaceTB/SmolVLM-256M-Instruct"  # Apache-2.0
    # EDIT: your data set. Default: 259,155 rows (CC-BY-NC-4.0 license)
    dataset_name: list[str] = arg(["HuggingFaceH4/llava-instruct-mix-vsft"])
    output_dir: str = "runs/vlm"
    COLUMN_ROLES = (*IMAGE_COLUMNS, *CHAT_COLUMNS, *PROMPT_AND_ANSWER, *PROMPT_AND_ANSWER.values())
    num_train_epochs: float | None = 1.0
    max_length: int = arg(4096, "tokens per row with those of its images; longer ones are refused")
    image_folder: str | None = arg(None, "where paths of images begin [beside the file of rows]")
    allow_image_urls: bool = arg(False, "fetch images from addresses, anew for each batch")
    freeze_vision_tower: bool = arg(True, "leave the layers that read images as they are")
    freeze_multi_modal_projector: bool | None = arg(
        None, "leave what maps their output to embeddings as it is [only beside adapters]"
    )
    # pyrefly: ignore[bad-override-mutable-attribute]  # wider: only recipes for images read it
    dataloader_num_workers: int | None = free(
        None, "processes per GPU that decode images [one per core of the GPU]", NOT_NEGATIVE
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.freeze_multi_modal_projector is None:
            self.freeze_multi_modal_projector = self.use_peft


# ---- Data ----
def row_to_conversation(
    row: Mapping[str, Any], columns: Mapping[str, str] | None = None
) -> Conversation:
    """Return a row as a conversation; a ValueError says why it is not one. EDIT: your columns.

    Args:
        columns: {role: name of its column}, from --columns.
    """
    return read_illustrated(row, PROMPT_AND_ANSWER, columns)


def load_data(args: Arguments, template: IllustratedTemplate) -> tuple[Rows, Rows | None]:
    """Return the rows to train on and those to evaluate on. EDIT: add filters or sources."""
    prepare = partial(
        tokenize_illustrated,
        read=partial(row_to_conversation, columns=args.columns_by_role),
        template=template,
        max_length=args.max_length,
        learn=args.learn,
        completion_only_loss=args.completion_only_loss,
        assistant_only_loss=args.assistant_only_loss,
    )
    of_source = partial(image_options, args=args)
    names = args.columns_by_role
    columns = [names.get(role, role) for role in IMAGE_COLUMNS]
    texts = [*args.COLUMN_ROLES, *names.values()]
    open_source = partial(open_images, columns=columns, text_columns=texts)
    train, test = open_sources(args, open_source)
    rows = prepare_rows(train, prepare, args, of_source)
    eval_rows = prepare_rows(test, prepare, args, of_source) if test else None
    # EDIT: to filter rows, as in rows = rows.filter(lambda row: row["num_images"] > 0)
    return hold_out_and_mix(args, rows, eval_rows)


def load_images(number: int, rows: Any, args: Arguments) -> list[Any]:
    """Return the images of a row, by its number `row`."""
    source, place = rows.find(number)
    conversation = row_to_conversation(row_of(source, place), args.columns_by_role)
    options = image_options(source, args)
    return [load_picture(image, **options)[0] for image in conversation.images]


# ---- Model ----
def load_processor(args: Arguments) -> Any:
    """Return what makes tokens and pixels, with a pad token and a chat template."""
    with loading("processor", args.model_name_or_path):
        name = args.model_name_or_path
        processor = load_processor_of_text_and_images(name, revision=args.model_revision)
    template = getattr(processor, "chat_template", None)
    if args.chat_template is not None:
        template = Path(args.chat_template).read_text(encoding="utf-8")
    if template is None or not hasattr(processor, "image_token"):
        problem = "it reads no images, or has no chat template: pass --chat_template"
        fail(Exit.USAGE, f"--model_name_or_path {name}: {problem}")
    tokenizer = processor.tokenizer
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    processor.chat_template = tokenizer.chat_template = template
    return processor


def find_parts(model: Any) -> dict[str, str]:
    """Return {part of the model: a pattern that is found in names in it}; Qwen's are nested."""
    paths = {module: re.escape(path) for path, module in model.named_modules()}
    tower = paths[model.get_encoder("image")]
    parent = tower.rpartition(r"\.")[0]
    text = f"{paths[model.get_decoder()]}|{paths[model.get_output_embeddings()]}"
    # Poolers, and layers behind the one whose output is mapped: DDP would wait for their gradients
    unread = ["head"]
    read = getattr(model.config, "vision_feature_layer", None)
    if read is not None:
        num_layers = model.config.vision_config.num_hidden_layers
        last = max(place % (num_layers + 1) for place in (read if type(read) is list else [read]))
        unread += ["post_layernorm", *[rf"layers?\.{place}" for place in range(last, num_layers)]]
    return {
        "vision tower": rf"^{tower}\.(?!\w*merger)",
        "projector": rf"^(?!({tower}|{text})(\.|$)|({parent})?$)|^{tower}\.\w*merger",
        "layers without effect": rf"^{tower}\.(.*\.)?({'|'.join(unread)})\.",
    }


def load_model(args: Arguments, layout: Layout, has_images: bool) -> tuple[Any, str]:
    """Return the model, quantized and with adapters on request, and what is frozen of it."""
    model, _ = load_pretrained(AutoModelForImageTextToText, args, layout)
    parts = find_parts(model)
    # EDIT: what is frozen. Without images nothing would train tower and projector.
    frozen = ["layers without effect"]
    if args.freeze_vision_tower or not has_images:
        frozen = ["vision tower"]
    if args.freeze_multi_modal_projector or not has_images:
        frozen.append("projector")
    set_up_layers(model, args, re.compile("|".join(parts[part] for part in frozen)))
    # A unit of FSDP of its own: FSDP1 would split what is frozen and what is trained as one tensor
    model._no_split_modules.add(type(model.get_encoder("image")).__name__)
    notes = []
    for part in frozen:
        names = [name for name, _ in model.named_parameters() if re.search(parts[part], name)]
        notes.append(f"{part} ({len(names)} tensors)")
    # Beside adapters the projector is trained whole or not at all
    found = {path for path, _ in model.named_modules() if re.search(parts["projector"], path)}
    outer = sorted(path for path in found if path.rpartition(".")[0] not in found)
    whole = [] if "projector" in frozen else outer
    without = re.compile("|".join(parts[part] for part in [*frozen, "projector"]))
    model = add_adapters(model, args, layout, whole, without, task_type="CAUSAL_LM")
    add_neftune(model, args.neftune_noise_alpha)
    cast_pixels(model)
    return model, ", ".join(notes)


def train(args: Arguments, run: Run) -> None:
    accelerator, layout = make_accelerator(args)
    run.start(layout)
    set_seed(args.seed)

    # ---- Data ----
    processor = load_processor(args)
    tokenizer = processor.tokenizer
    template = IllustratedTemplate(tokenizer, args.chat_template_kwargs or {}, processor)
    with accelerator.local_main_process_first():  # the other ranks read its cache
        train_rows, eval_rows = load_data(args, template)
    lengths = train_rows.lengths
    num_workers = choose_num_workers(args.dataloader_num_workers, accelerator)
    plan = Plan(replace(args, dataloader_num_workers=num_workers), layout, len(lengths), lengths)
    run.check_plan(plan, train_rows, eval_rows)
    num_images = sum(sum(rows.column("num_images")) for rows in (train_rows, eval_rows) if rows)
    collate = partial(IllustratedCollator, template, has_images=bool(num_images))
    collator = collate(partial(load_images, rows=train_rows, args=args))
    train_loader = plan.training_loader(train_rows, collator, first_step=run.step)
    collator = collate(partial(load_images, rows=eval_rows, args=args))
    eval_loader = plan.evaluation_loader(eval_rows, collator)

    # ---- Model, optimizer, schedule ----
    model, frozen = load_model(args, layout, has_images=bool(num_images))
    # EDIT: another loss of a token is one line of token_losses in core/loss.py
    token_loss = LossInHead(model, args.max_logits_mib, layout.device)
    check_model(model, train_rows.largest_token(tokenizer))
    notes = describe_rows(train_rows, eval_rows)
    notes["images"] = f"{num_images:,}, read by {num_workers} processes per rank"
    notes["frozen"] = frozen
    notes["batch"] = plan.describe_batch()
    notes["loss"] = str(token_loss)
    notes["sample"] = show_trained_tokens(train_rows.dataset[0], tokenizer)
    run.summarize(model, notes)
    optimizer, schedule = make_optimizer(model, args, accelerator, plan.total_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.resume(model, optimizer, schedule)

    # ---- Train ----
    measure = partial(evaluate_perplexity, run, layout, model, token_loss)
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
    tokenizer.backend_tokenizer.no_padding()  # Batches set it, and files would keep it
    save_model(accelerator, model, processor, args.output_dir, template.stop_tokens())
    run.finish(f'Ask it: python scripts/generate.py {args.output_dir} --image IMAGE --prompt "..."')


def main() -> None:
    args = parse(Arguments, __doc__)
    # From here on a signal stops the run cleanly, and status.json records how it ends
    with Run(args) as run:
        train(args, run)


if __name__ == "__main__":
    main()
