# SPDX-License-Identifier: Apache-2.0
r"""Embeddings of texts by contrast, with any encoder or decoder, for search and retrieval.

The YAML file owns the strategy, the command line everything about learning:

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/embeddings.py
    accelerate launch --config_file accelerate_configs/fsdp.yaml --num_processes 4 \
        recipes/embeddings.py --model_name_or_path Qwen/Qwen3-0.6B --pooling_mode lasttoken \
        --dataset_name pairs.jsonl --query_prompt "query: " --matryoshka_dims 1024 256 64

Each query is compared with the documents of the whole optimizer step, over all ranks and
micro-batches: these are a matter of memory alone. A good run prints a summary with the number of
those documents, a recall on held-out pairs that rises, and the folder that sentence-transformers
loads. The same command again continues from the newest checkpoint. Exit codes: core/exits.py. To
make it yours: python scripts/copy_recipe.py embeddings my_project, then look for EDIT.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModel

from core.arguments import (
    CommonArguments,
    DenseModelArguments,
    LengthArguments,
    MixtureArguments,
    RowArguments,
)
from core.batches import Plan
from core.cli import POSITIVE, arg, parse
from core.data import (
    Rows,
    describe_rows,
    hash_of_row,
    hold_out_and_mix,
    missing_columns,
    read_rows,
    rename_columns,
)
from core.engine import Layout, backward_of_sum, make_accelerator
from core.exits import Exit, fail
from core.export import save_model
from core.model import (
    add_adapters,
    check_model,
    load_pretrained,
    load_tokenizer,
    make_optimizer,
    read_config,
    set_up_layers,
)
from core.run import Run
from tasks.contrast import TextsCollator, check_num_texts, contrast, embed, retrieval_metrics

# EDIT: your columns of a query and of its document; those that begin with negative have documents
# to avoid. Of pairs with a label, leave out those that do not belong together first.
QUERY = ("query", "anchor", "question")
DOCUMENT = ("positive", "answer", "document")


@dataclass(kw_only=True)
class Arguments(
    CommonArguments,
    DenseModelArguments,
    MixtureArguments,
    LengthArguments,
    RowArguments,
):
    """Embeddings."""

    EXTRAS = ("configs", "hosts", "object_store", "mesh")
    LOSS_UNIT = "nats per query"
    model_name_or_path: str = "answerdotai/ModernBERT-base"  # Apache-2.0
    # EDIT: your data set. Default: 100,231 questions with their answers (CC-BY-SA-3.0 license)
    dataset_name: list[str] = arg(["sentence-transformers/natural-questions"])
    output_dir: str = "runs/embeddings"
    COLUMN_ROLES = ("query", "positive")
    per_device_train_batch_size: int = 32
    num_train_epochs: float | None = 1.0
    max_length: int = arg(256, "tokens of a text; longer ones lose their end")
    pooling_mode: Literal["mean", "cls", "lasttoken"] = arg(
        "mean", "what of the last hidden states is the embedding; lasttoken is for decoders"
    )
    scale: float = arg(20.0, "cosines are multiplied by this, 1 / temperature", POSITIVE)
    matryoshka_dims: list[int] = arg(
        [], "sizes of the beginnings that are embeddings too, as 768 256 64 [the whole one]"
    )
    query_prompt: str = arg("", "text before every query")
    document_prompt: str = arg("", "text before every document")


# ---- Data ----
def read_texts(row: Mapping[str, Any], columns: Mapping[str, str]) -> list[str]:
    """Return a row's query, document and documents to avoid, or raise ValueError. EDIT: columns."""
    row = rename_columns(row, columns)
    queries = [name for name in QUERY if name in row]
    documents = [name for name in DOCUMENT if name in row]
    if not queries or not documents:
        raise ValueError(missing_columns(row, "query and positive", "query", "positive"))
    texts = [row[queries[0]], row[documents[0]]]
    for name in sorted(row):
        if name.startswith("negative"):
            value = row[name]
            texts += value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"has no text in one of its columns: {text!s:.80}")
    return texts


def tokenize_texts(
    row: Mapping[str, Any],
    tokenizer: Any,
    max_length: int,
    columns: Mapping[str, str],
    prompts: Sequence[str],
) -> dict[str, Any]:
    """Return the tokens of a row's texts, the query first.

    Args:
        prompts: before the query, and before each document.
    """
    query, *documents = read_texts(row, columns)
    texts = [prompts[0] + query, *[prompts[1] + document for document in documents]]
    encoded = tokenizer(texts, truncation=True, max_length=max_length)
    tokens = [np.array(ids, dtype=np.int32) for ids in encoded["input_ids"]]
    hashes = np.array([hash_of_row(ids.tobytes()) for ids in tokens], dtype=np.int64)
    return {
        "input_ids": encoded["input_ids"],
        "num_texts": len(texts),
        "hashes": hashes,
        "truncated": any(one.overflowing for one in encoded.encodings or []),
        "length": sum(map(len, tokens)),
        "largest": max(int(ids.max()) for ids in tokens),
        "hash": hash_of_row(hashes.tobytes()),
    }


def load_data(args: Arguments, tokenizer: Any) -> tuple[Rows, Rows | None]:
    """Return the rows to train on and those to evaluate on. EDIT: add filters or sources."""
    prepare = partial(
        tokenize_texts,
        tokenizer=tokenizer,
        max_length=args.max_length,
        columns=args.columns_by_role,
        prompts=(args.query_prompt, args.document_prompt),
    )
    rows, eval_rows = read_rows(args, prepare)
    # EDIT: to filter rows, as in rows = rows.filter(lambda row: row["length"] >= 8)
    check_num_texts(rows, eval_rows)
    return hold_out_and_mix(args, rows, eval_rows)


# ---- Model ----
def load_model(args: Arguments, layout: Layout) -> torch.nn.Module:
    """Return the model without a head, quantized and with adapters if the arguments request it."""
    model, _ = load_pretrained(AutoModel, args, layout)
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # a layer behind the first token, which no embedding goes through
    set_up_layers(model, args)
    return add_adapters(model, args, layout, task_type="FEATURE_EXTRACTION")


# ---- Evaluation ----
@torch.no_grad()
def evaluate(
    run: Run,
    layout: Layout,
    model: torch.nn.Module,
    args: Arguments,
    dims: Sequence[int],
    loader: DataLoader,
) -> None:
    """Log the loss, recall and nDCG of the evaluation rows' queries among all their documents."""
    model.eval()
    embedded = []
    hashes = []
    for batch in run.interruptible(loader):
        embedded.append(embed(model, batch, args.pooling_mode).cpu())
        hashes.append(batch["hashes"])
    model.train()
    texts = torch.cat(layout.gather(embedded), dim=1)
    whole = np.concatenate(layout.gather(hashes), axis=1)
    run.log_evaluation(retrieval_metrics(texts, whole, args.scale, dims))


def train(args: Arguments, run: Run) -> None:
    accelerator, layout = make_accelerator(args)
    run.start(layout)
    set_seed(args.seed)

    # ---- Data ----
    tokenizer = load_tokenizer(args)
    with accelerator.local_main_process_first():  # the other ranks read its cache
        train_rows, eval_rows = load_data(args, tokenizer)
    plan = Plan(args, layout, len(train_rows), train_rows.lengths)
    run.check_plan(plan, train_rows, eval_rows)
    collator = TextsCollator(tokenizer)
    train_loader = plan.training_loader(train_rows, collator, first_step=run.step)
    eval_loader = plan.evaluation_loader(eval_rows, collator)

    # ---- Model, optimizer, schedule ----
    size = read_config(args).get_text_config().hidden_size
    dims = args.matryoshka_dims or [size]
    if not all(0 < dim <= size for dim in dims):
        fail(Exit.USAGE, f"--matryoshka_dims {dims}: must be between 1 and {size}, the whole size")
    model = load_model(args, layout)
    check_model(model, train_rows.largest_token(tokenizer))
    notes = describe_rows(train_rows, eval_rows)
    notes["batch"] = plan.describe_batch()
    first = train_rows.dataset[0]
    num_others = plan.rows_per_step * (len(first["hashes"]) - 1) - 1
    notes["contrast"] = f"each query's document with {num_others:,} others, of all rows of a step"
    notes["sample"] = " | ".join(tokenizer.batch_decode(list(first["input_ids"])))
    run.summarize(model, notes)
    optimizer, schedule = make_optimizer(model, args, accelerator, plan.total_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.resume(model, optimizer, schedule)

    # ---- Train ----
    measure = partial(evaluate, run, layout, model, args, dims)
    if eval_loader and run.owes_evaluation(plan.evaluate_after):
        measure(eval_loader)
    model.train()
    batches = iter(train_loader)
    for step in run.steps():
        micro_batches = [next(batches) for _ in range(args.gradient_accumulation_steps)]
        _, num_tokens = layout.sum_over_rows(sum(batch["counts"] for batch in micro_batches))
        # The embeddings of the whole step, without what a backward pass needs
        with torch.no_grad():
            embedded = [embed(model, batch, args.pooling_mode) for batch in micro_batches]
        # EDIT: another loss of embeddings is one line of info_nce in tasks/contrast.py
        losses, gradients = contrast(layout, embedded, micro_batches, args.scale, dims)
        grad_norm = None
        run.seed_dropout(step)  # The second pass drops what the first one has dropped
        for batch, gradient in zip(micro_batches, gradients, strict=True):
            with accelerator.accumulate(model):
                again = embed(model, batch, args.pooling_mode)
                # Backward, without the division by ranks and micro-batches that engines add
                backward_of_sum(layout, (again * gradient).sum())
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
    files = SentenceTransformerFiles(tokenizer, args, size)
    save_model(accelerator, model, files, args.output_dir)
    run.finish(f'Use it: SentenceTransformer("{args.output_dir}")')


# ---- The folder ----
@dataclass(frozen=True)
class SentenceTransformerFiles:
    """The tokenizer, and the files by which sentence-transformers makes the recipe's embeddings.

    They are those of its older versions, which all versions read, and which take each text as it
    is: newer ones would have it wrapped in the tokenizer's chat template, if there is one.
    """

    tokenizer: Any
    args: Arguments
    size: int  # of an embedding

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files into a folder, as a tokenizer does."""
        args = self.args
        modules = []
        for place, kind in enumerate(["Transformer", "Pooling", "Normalize"]):
            path = f"{place}_{kind}" if place else ""
            about = {"path": path, "type": f"sentence_transformers.models.{kind}"}
            modules.append({"idx": place, "name": str(place), **about})
        pooling = {"word_embedding_dimension": self.size, "pooling_mode": args.pooling_mode}
        prompts = {"query": args.query_prompt, "document": args.document_prompt}
        files = {
            "modules.json": modules,
            "1_Pooling/config.json": pooling,
            "config_sentence_transformers.json": {"prompts": prompts},
            "sentence_bert_config.json": {"max_seq_length": args.max_length},
        }
        self.tokenizer.save_pretrained(folder)
        for name, content in files.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(content, indent=2))


def main() -> None:
    args = parse(Arguments, __doc__)
    # From here on a signal stops the run cleanly, and status.json records how it ends
    with Run(args) as run:
        train(args, run)


if __name__ == "__main__":
    main()
