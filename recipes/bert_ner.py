# SPDX-License-Identifier: Apache-2.0
r"""Token classification, such as named entities, with any encoder or decoder, BERT as the example.

The YAML file owns the strategy, the command line everything about learning:

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/bert_ner.py
    accelerate launch --config_file accelerate_configs/fsdp.yaml --num_processes 4 \
        recipes/bert_ner.py --model_name_or_path answerdotai/ModernBERT-large \
        --dataset_name rows.jsonl --label_column_name ner_tags

A good run prints a summary with the tags and one row as the model sees it, a loss that falls, an
F1 of entities that rises, and the folder that `from_pretrained` loads. The same command again
continues from the newest checkpoint. Exit codes: core/exits.py. To make it yours:
python scripts/copy_recipe.py bert_ner my_project, then look for EDIT.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate.utils import set_seed
from transformers import AutoModelForTokenClassification

from core.arguments import CommonArguments, DenseModelArguments, LengthArguments, RowArguments
from core.batches import Line, Plan, rows_of_lines
from core.cli import POSITIVE, arg, parse
from core.data import IGNORED, Rows, describe_rows, hash_of_row, hold_out_and_mix, read_rows
from core.engine import backward_of_sum, make_accelerator
from core.export import save_model
from core.model import base_model_of, check_model, load_tokenizer, make_optimizer, read_config
from core.run import Run
from tasks.labels import load_classifier, pad_texts
from tasks.tags import (
    NO_WORD,
    check_tags,
    count_tags,
    describe_tags,
    evaluate_tags,
    label_tokens,
    names_in_config,
    order_tags,
    read_tags,
    read_words,
    show_tags,
    summed_tag_loss,
)

# EDIT: your columns of tags
TAG_COLUMNS = ["ner_tags", "labels", "tags"]


@dataclass(kw_only=True)
class Arguments(
    CommonArguments,
    DenseModelArguments,
    LengthArguments,
    RowArguments,
):
    """Token classification."""

    EXTRAS = ("configs", "hosts", "object_store", "mesh")
    LOSS_UNIT = "nats per label"
    model_name_or_path: str = "google-bert/bert-base-cased"  # Apache-2.0
    # EDIT: your data set. Default: 14,041 sentences, 4 kinds of entities (for research only)
    dataset_name: str = "lhoestq/conll2003"
    output_dir: str = "runs/bert_ner"
    COLUMN_ARGUMENTS = {"tokens": "text_column_name", "tags": "label_column_name"}
    max_length: int = arg(
        512, "tokens per row; longer rows cannot be used, since their tags would be lost", POSITIVE
    )
    text_column_name: str = arg("tokens", "column of the words, a list of texts")
    label_column_name: str | None = arg(
        None, "column of the tags, a list of names or numbers [the first of TAG_COLUMNS in a row]"
    )
    label_all_tokens: bool = arg(
        False, "train on the tag at all tokens of a word, I in place of B, not only at the first"
    )


# ---- Data ----
def tokenize_words(
    row: Mapping[str, Any],
    tokenizer: Any,
    max_length: int,
    word_column: str,
    tag_columns: Sequence[str],
    tag_names: Sequence[str] | None,
) -> dict[str, Any]:
    """Return the tokens of a row's words, the word of each token, and the tags of the words.

    Args:
        tag_columns: the tags are in the first of these columns that the row has.
        tag_names: of tags that are numbers, where the data set does not name them.
    """
    tag_column = next((name for name in tag_columns if name in row), tag_columns[0])
    words = read_words(row, word_column, tag_column)
    tags = read_tags(row[tag_column], tag_names, tag_column)
    if len(words) != len(tags):
        raise ValueError(
            f"has {len(words)} words in {word_column} and {len(tags)} tags in {tag_column}"
        )
    # To byte-level tokenizers the space before a word is part of it; others ignore it
    spaced = [f" {word}" for word in words]
    encoded = tokenizer(spaced, is_split_into_words=True, verbose=False)
    tokens = np.array(encoded["input_ids"], dtype=np.int32)
    if len(tokens) > max_length:
        raise ValueError(
            f"has {len(tokens)} tokens, more than --max_length {max_length}: cut it into sentences"
        )
    word_ids = [NO_WORD if word is None else word for word in encoded.word_ids()]
    if set(word_ids) <= {NO_WORD}:
        raise ValueError(f"has no word in {word_column} that becomes a token")
    content = tokens.tobytes() + "\n".join(tags).encode()
    return {
        "input_ids": encoded["input_ids"],
        "token_type_ids": encoded.get("token_type_ids", []),
        "word_ids": word_ids,
        "tags": tags,
        "length": len(tokens),
        "largest": int(tokens.max()),
        "hash": hash_of_row(content),
    }


def load_data(args: Arguments, tokenizer: Any) -> tuple[Rows, Rows | None, dict[str, int]]:
    """Return rows to train on, rows to evaluate on, and the id of each tag. EDIT: filters."""
    model_names = names_in_config(read_config(args))
    columns = TAG_COLUMNS
    if args.label_column_name is not None:
        columns = [args.label_column_name]
    prepare = partial(
        tokenize_words,
        tokenizer=tokenizer,
        max_length=args.max_length,
        word_column=args.text_column_name,
        tag_columns=columns,
        tag_names=model_names,
    )
    rows, eval_rows = read_rows(args, prepare)
    # EDIT: to filter rows, as in rows = rows.filter(lambda row: row["length"] >= 8)
    source = rows.sources[0]
    of_data = [source.class_names[name] for name in columns if name in source.class_names]
    tag_ids = order_tags(count_tags(rows), source.name, model_names, *of_data)
    if eval_rows is not None:
        check_tags(eval_rows, tag_ids)
    return *hold_out_and_mix(args, rows, eval_rows), tag_ids


@dataclass(frozen=True)
class TagCollator:
    """Make a batch of tagged words.

    A batch has these entries:
        inputs: what the model takes, [rows, tokens], padded on the right.
        labels: the ids of the tags, [rows, tokens].
        counts: the number of labeled tokens, and of tokens without padding.
        word_ids, tags, row: of each row, on the host; `row` is its number in its file, from 1.
    """

    columns: ClassVar[list[str]] = ["input_ids", "token_type_ids", "word_ids", "tags", "row"]
    tokenizer: Any
    tag_ids: dict[str, int]
    label_all_tokens: bool

    def __call__(self, source: Any, lines: Sequence[Line]) -> dict[str, Any]:
        rows = rows_of_lines(source, lines)
        inputs = pad_texts(rows, self.tokenizer)
        labels = torch.full(inputs["input_ids"].shape, IGNORED)
        for place, row in enumerate(rows):
            numbers = label_tokens(
                row["word_ids"], row["tags"], self.tag_ids, self.label_all_tokens
            )
            labels[place, : len(numbers)] = torch.from_numpy(numbers)
        num_labeled = (labels != IGNORED).sum()
        num_tokens = sum(len(row["input_ids"]) for row in rows)
        return {
            "inputs": inputs,
            "labels": labels,
            "counts": torch.tensor([num_labeled, num_tokens]),
            "word_ids": [row["word_ids"] for row in rows],
            "tags": [row["tags"].tolist() for row in rows],
            "row": [int(row["row"]) for row in rows],
        }


def train(args: Arguments, run: Run) -> None:
    accelerator, layout = make_accelerator(args)
    run.start(layout)
    set_seed(args.seed)

    # ---- Data ----
    tokenizer = load_tokenizer(args)
    with accelerator.local_main_process_first():  # the other ranks read its cache
        train_rows, eval_rows, tag_ids = load_data(args, tokenizer)
    names = list(tag_ids)
    lengths = train_rows.lengths
    plan = Plan(args, layout, len(train_rows), lengths)
    run.check_plan(plan, train_rows, eval_rows)
    collator = TagCollator(tokenizer, tag_ids, args.label_all_tokens)
    train_loader = plan.training_loader(train_rows, collator, first_step=run.step)
    eval_loader = plan.evaluation_loader(eval_rows, collator)

    # ---- Model, optimizer, schedule ----
    model, of_head = load_classifier(
        AutoModelForTokenClassification, args, names, layout, task_type="TOKEN_CLS"
    )
    config = base_model_of(model).config
    config.pad_token_id = tokenizer.pad_token_id
    check_model(model, train_rows.largest_token(tokenizer))
    notes = describe_rows(train_rows, eval_rows) | of_head
    notes["labels"] = describe_tags(count_tags(train_rows), tag_ids)
    notes["batch"] = plan.describe_batch()
    notes["sample"] = show_tags(train_rows.dataset[0], tokenizer, tag_ids)
    run.summarize(model, notes)
    optimizer, schedule = make_optimizer(model, args, accelerator, plan.total_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.resume(model, optimizer, schedule)

    # ---- Train ----
    measure = partial(evaluate_tags, run, layout, model, names)
    if eval_loader and run.owes_evaluation(plan.evaluate_after):
        measure(eval_loader)
    model.train()
    batches = iter(train_loader)
    for step in run.steps():
        micro_batches = [next(batches) for _ in range(args.gradient_accumulation_steps)]
        # Tokens that have a tag, and all tokens without padding.
        # Divided by the counts of the whole step on all ranks, the loss is the same for any number
        # of ranks and micro-batches.
        counts = layout.sum_over_rows(sum(batch["counts"] for batch in micro_batches))
        num_labeled, num_tokens = counts
        losses = []
        grad_norm = None
        for batch in micro_batches:
            with accelerator.accumulate(model):
                loss = summed_tag_loss(model, batch)[0] / num_labeled
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
    save_model(accelerator, model, tokenizer, args.output_dir, config=config)
    run.finish(f"Its curve: python scripts/plot_loss.py {args.output_dir}")


def main() -> None:
    args = parse(Arguments, __doc__)
    # From here on a signal stops the run cleanly, and status.json records how it ends
    with Run(args) as run:
        train(args, run)


if __name__ == "__main__":
    main()
