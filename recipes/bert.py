# SPDX-License-Identifier: Apache-2.0
r"""Text classification and regression with any encoder or decoder, BERT as the example.

The YAML file owns the strategy, the command line everything about learning:

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/bert.py
    accelerate launch --config_file accelerate_configs/fsdp.yaml --num_processes 4 \
        recipes/bert.py --model_name_or_path answerdotai/ModernBERT-large \
        --dataset_name rows.csv --text_columns premise hypothesis --label_column label

A good run prints a summary with the classes and one row as the model sees it, a loss that falls,
an accuracy that rises, and the folder that `from_pretrained` loads. The same command again
continues from the newest checkpoint. Exit codes: core/exits.py. To make it yours:
python scripts/copy_recipe.py bert my_project, then look for EDIT.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate.utils import set_seed
from transformers import AutoModelForSequenceClassification

from core.arguments import CommonArguments, DenseModelArguments, LengthArguments, RowArguments
from core.batches import Line, Plan, rows_of_lines
from core.cli import arg, parse
from core.data import (
    Rows,
    describe_rows,
    hash_of_row,
    hold_out_and_mix,
    missing_columns,
    read_rows,
)
from core.engine import backward_of_sum, make_accelerator
from core.export import save_model
from core.model import base_model_of, check_model, load_tokenizer, make_optimizer, read_config
from core.run import Run
from tasks.labels import (
    LabelArguments,
    add_labels,
    describe_classes,
    evaluate_classifier,
    find_classes,
    label_tensors,
    load_classifier,
    pad_texts,
    read_label,
    weighted_row_losses,
)

# EDIT: your columns, of a text or of a pair of texts
TEXT_COLUMNS = [
    ["text", "text_pair"],
    ["text"],
    ["text1", "text2"],
    ["sentence1", "sentence2"],
    ["premise", "hypothesis"],
    ["question1", "question2"],
    ["question", "sentence"],
    ["question", "passage"],
    ["sentence"],
]


@dataclass(kw_only=True)
class Arguments(
    CommonArguments,
    DenseModelArguments,
    LabelArguments,
    LengthArguments,
    RowArguments,
):
    """Text classification."""

    EXTRAS = ("configs", "hosts", "object_store", "mesh")
    LOSS_UNIT = "per row"
    model_name_or_path: str = "google-bert/bert-base-uncased"  # Apache-2.0
    # EDIT: your data set. Default: 10,003 rows, 77 intents (CC-BY-4.0 license)
    dataset_name: str = "legacy-datasets/banking77"
    output_dir: str = "runs/bert"
    COLUMN_ARGUMENTS = {
        "text": "text_columns",
        "text_pair": "text_columns",
        "label": "label_column",
    }
    max_length: int = 512
    text_columns: list[str] | None = arg(
        None, "column of the text, or both columns of a pair [the first of TEXT_COLUMNS found]"
    )
    label_column: str = arg(
        "label", "column of the label: text or whole numbers are classes, others a regression"
    )

    def conflicts(self) -> Iterator[str]:
        if "text_pair" in self.columns_by_role and "text" not in self.columns_by_role:
            yield "--columns text_pair: name the first text too, as text=COLUMN"
        if len(self.text_columns or []) > 2:
            yield "--text_columns: name one column, or both columns of a pair"


# ---- Data ----
def tokenize_text(
    row: Mapping[str, Any],
    tokenizer: Any,
    max_length: int,
    columns: Sequence[str] | None,
    label_column: str,
) -> dict[str, Any]:
    """Return the tokens of a row's text or pair of texts, and its label.

    Args:
        columns: of the text, or of the pair; None for the first entry of TEXT_COLUMNS found.
    """
    fitting = [entry for entry in TEXT_COLUMNS if set(entry) <= set(row)]
    columns = columns or [*fitting, ["text"]][0]
    needed = [*columns, label_column]
    if not set(needed) <= set(row):
        roles = ["text", "text_pair"][: len(columns)]
        raise ValueError(missing_columns(row, ", ".join(needed), *roles, "label"))
    texts = [row[name] for name in columns]
    if not all(isinstance(text, str) for text in texts) or not "".join(texts).strip():
        raise ValueError(f"has no text in {' and '.join(columns)}: {texts!s:.80}")
    label = read_label(row[label_column], label_column)
    encoded = tokenizer(*texts, truncation=True, max_length=max_length)
    tokens = np.array(encoded["input_ids"], dtype=np.int32)
    was_cut = bool(encoded.encodings and encoded.encodings[0].overflowing)
    content = tokens.tobytes() + label["label_text"].encode()
    return {
        "input_ids": encoded["input_ids"],
        "token_type_ids": encoded.get("token_type_ids", []),
        **label,
        "truncated": was_cut,
        "length": len(tokens),
        "largest": int(tokens.max()),
        "hash": hash_of_row(content),
    }


def load_data(args: Arguments, tokenizer: Any) -> tuple[Rows, Rows | None, dict[str, int]]:
    """Return the rows to train on, those to evaluate on, and the classes. EDIT: add filters."""
    known = [name for columns in TEXT_COLUMNS for name in columns]
    prepare = partial(
        tokenize_text,
        tokenizer=tokenizer,
        max_length=args.max_length,
        columns=args.text_columns,
        label_column=args.label_column,
    )
    rows, eval_rows = read_rows(args, prepare, text_columns=args.text_columns or known)
    # EDIT: to filter rows, as in rows = rows.filter(lambda row: row["length"] >= 8)
    classes = find_classes(rows, args, args.label_column, read_config(args))
    rows = add_labels(rows, classes, args)
    if eval_rows is not None:
        eval_rows = add_labels(eval_rows, classes, args)
    return *hold_out_and_mix(args, rows, eval_rows), classes


@dataclass(frozen=True)
class TextCollator:
    """Make a batch of labeled texts.

    A batch has these entries:
        inputs: what the model takes, [rows, tokens], padded on the right.
        labels, weights: [rows].
        counts: the sum of the weights, and the number of tokens without padding.
        row: numbers of the rows in their file, from 1, on the host.
    """

    columns: ClassVar[list[str]] = ["input_ids", "token_type_ids", "labels", "weights", "row"]
    tokenizer: Any

    def __call__(self, source: Any, lines: Sequence[Line]) -> dict[str, Any]:
        rows = rows_of_lines(source, lines)
        labels = label_tensors(rows, source)
        num_tokens = sum(len(row["input_ids"]) for row in rows)
        return {
            "inputs": pad_texts(rows, self.tokenizer),
            **labels,
            "counts": torch.tensor([labels["weights"].sum(), num_tokens]),
            "row": [int(row["row"]) for row in rows],
        }


def train(args: Arguments, run: Run) -> None:
    accelerator, layout = make_accelerator(args)
    run.start(layout)
    set_seed(args.seed)

    # ---- Data ----
    tokenizer = load_tokenizer(args)
    with accelerator.local_main_process_first():  # the other ranks read its cache
        train_rows, eval_rows, classes = load_data(args, tokenizer)
    lengths = train_rows.lengths
    plan = Plan(args, layout, len(train_rows), lengths)
    run.check_plan(plan, train_rows, eval_rows)
    collator = TextCollator(tokenizer)
    train_loader = plan.training_loader(train_rows, collator, first_step=run.step)
    eval_loader = plan.evaluation_loader(eval_rows, collator)

    # ---- Model, optimizer, schedule ----
    model, of_head = load_classifier(
        AutoModelForSequenceClassification, args, list(classes), layout, task_type="SEQ_CLS"
    )
    config = base_model_of(model).config
    config.pad_token_id = tokenizer.pad_token_id  # decoders classify at the last token before it
    check_model(model, train_rows.largest_token(tokenizer))
    notes = describe_rows(train_rows, eval_rows) | of_head
    first = train_rows.dataset[0]
    notes["labels"] = describe_classes(classes)
    notes["batch"] = plan.describe_batch()
    notes["sample"] = f"{tokenizer.decode(first['input_ids'])} -> {first['label_text']}"
    run.summarize(model, notes)
    optimizer, schedule = make_optimizer(model, args, accelerator, plan.total_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.resume(model, optimizer, schedule)

    # ---- Train ----
    measure = partial(evaluate_classifier, run, layout, model)
    if eval_loader and run.owes_evaluation(plan.evaluate_after):
        measure(eval_loader)
    model.train()
    batches = iter(train_loader)
    for step in run.steps():
        micro_batches = [next(batches) for _ in range(args.gradient_accumulation_steps)]
        # The sum of the rows' weights, and all tokens without padding.
        # Divided by the counts of the whole step on all ranks, the loss is the same for any number
        # of ranks and micro-batches.
        counts = layout.sum_over_rows(sum(batch["counts"] for batch in micro_batches))
        weight, num_tokens = counts
        losses = []
        grad_norm = None
        for batch in micro_batches:
            with accelerator.accumulate(model):
                loss = weighted_row_losses(model, batch)[0] / weight
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
        run.finish_step(losses, grad_norm, num_tokens.long(), epoch=step / plan.steps_per_epoch)
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
