# SPDX-License-Identifier: Apache-2.0
"""A classifier: a model with a new head, which is trained as a whole even beside adapters."""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from components.labels import compared, label_metrics, names_of_head
from core import workarounds
from core.arguments import CommonArguments
from core.engine import Layout
from core.model import (
    add_adapters,
    is_of_body,
    load_pretrained,
    read_config,
    set_up_layers,
)
from core.run import Run


def load_classifier(
    auto_class: Any,
    args: CommonArguments,
    class_names: Sequence[str],
    layout: Layout,
    task_type: str | None = None,
) -> tuple[torch.nn.Module, dict[str, str]]:
    """Return a model with a head for these classes, quantized and with adapters if requested.

    What the weights on disk do not contain is new: the head and, in some models, a pooler. So is a
    head for other classes than these. It is drawn from the seed, alike on every rank, and trained
    as a whole even beside adapters. With the model comes a line of the summary if its head is new.

    Args:
        auto_class: one of transformers' AutoModel classes.
        class_names: [] for the regression of one number.
        task_type: peft's name of the task, if it has one.
    """
    old_names = names_of_head(read_config(args))
    model, new_weights = load_pretrained(
        auto_class, args, layout, **head_options(class_names, task_type)
    )
    if class_names and old_names != [compared(name) for name in class_names]:
        # transformers keeps the head of other classes if they are as many
        new_weights |= draw_rows(model, len(class_names), args.seed, besides=new_weights)
    new_modules = find_new_modules(new_weights)
    workarounds.share_new_modules(model, new_modules, layout.accelerator)
    set_seed(args.seed)  # ranks that made no new weights drew less, and adapters are drawn next
    set_up_layers(model, args)
    notes = {"head": "new: the base has none for these classes"} if new_modules else {}
    return add_adapters(model, args, layout, new_modules, task_type=task_type), notes


def draw_rows(model: Any, num_classes: int, seed: int, besides: Collection[str]) -> set[str]:
    """Draw the weights of a head with a row per class from the seed, and return their names.

    Args:
        besides: names of weights that are new already.
    """
    names = set()
    set_seed(seed)
    for name, weight in model.named_parameters():
        shape = getattr(weight, "ds_shape", weight.shape)
        if name in besides or is_of_body(name, model) or shape[:1] != (num_classes,):
            continue
        names.add(name)
        weight._is_hf_initialized = False
        gathered = contextlib.nullcontext()
        if hasattr(weight, "ds_shape"):  # ZeRO-3 has split the weight
            import deepspeed

            gathered = deepspeed.zero.GatheredParameters([weight], modifier_rank=0)
        with gathered:
            model._init_weights(model.get_submodule(name.rpartition(".")[0]))
        weight._is_hf_initialized = True
    return names


def head_options(class_names: Sequence[str], task_type: str | None) -> dict[str, Any]:
    """Return the options of the config that describe the head.

    transformers reads problem_type only where it labels a whole row, not each of its tokens.
    """
    if not class_names:
        return {"num_labels": 1, "problem_type": "regression"}
    options: dict[str, Any] = {
        "id2label": dict(enumerate(class_names)),
        "label2id": {name: number for number, name in enumerate(class_names)},
    }
    if task_type != "TOKEN_CLS":
        options["problem_type"] = "single_label_classification"
    return options


def find_new_modules(new_weights: Collection[str]) -> list[str]:
    """Return the names of the modules whose weights are new."""
    modules = set()
    for name in new_weights:
        if name.startswith(
            "classifier."
        ):  # peft trains a classifier of several layers as one module
            modules.add("classifier")
        else:
            modules.add(name.rpartition(".")[0])
    return sorted(modules)


def weighted_row_losses(
    model: torch.nn.Module, batch: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss summed over a batch's rows, each times its weight, and the logits.

    The loss is the cross-entropy, or the squared error in a regression. On a rank without rows the
    model runs too, but there are no logits.

    Returns:
        A scalar, and [rows, classes or 1]; both in fp32.
    """
    labels = batch["labels"]
    logits = model(**batch["inputs"]).logits.float()[: len(labels)]
    if labels.is_floating_point():
        losses = (logits[:, 0] - labels) ** 2
    else:
        losses = cross_entropy(logits, labels, reduction="none")
    return (losses * batch["weights"]).sum(), logits


@torch.no_grad()
def evaluate_classifier(
    run: Run, layout: Layout, model: torch.nn.Module, loader: DataLoader
) -> None:
    """Log the loss, computed as in training, and the metrics of exactly the evaluation rows."""
    model.eval()
    total = torch.zeros(2, device=layout.device)
    pairs = []
    for batch in run.interruptible(loader):
        loss, logits = weighted_row_losses(model, batch)
        total += torch.stack([loss, batch["counts"][0]])
        predicted = logits.argmax(1)
        if batch["labels"].is_floating_point():
            predicted = logits[:, 0]
        pairs.append(torch.stack([predicted, batch["labels"]]).cpu())
    model.train()
    loss, weight = layout.sum_over_rows(total).tolist()
    predicted, labels = torch.cat(layout.gather(pairs), dim=1)
    metrics = {"eval_loss": loss / weight, **label_metrics(predicted, labels)}
    listed = [f"{name.removeprefix('eval_')} {value:.4f}" for name, value in metrics.items()]
    run.log_evaluation(metrics, f"{', '.join(listed)} on held-out rows")


def pad_texts(rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> dict[str, Any]:
    """Return the model's arguments for a batch's rows, [rows, tokens], padded on the right.

    A rank without rows takes part with one token.

    Args:
        rows: with input_ids and token_type_ids, which are empty if the model takes none.
    """
    nothing = {"input_ids": [tokenizer.pad_token_id], "token_type_ids": []}
    texts = []
    for row in rows or [nothing]:
        names = [name for name in ("input_ids", "token_type_ids") if len(row[name])]
        texts.append({name: row[name] for name in names})
    return dict(tokenizer.pad(texts, padding_side="right", return_tensors="pt"))
