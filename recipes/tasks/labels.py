# SPDX-License-Identifier: Apache-2.0
"""Labels of rows, the classes that they name or the numbers that they are, and what learns them.

A classifier is a model with a new head, which is trained as a whole even beside adapters.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from core.arguments import CommonArguments
from core.cli import arg
from core.data import Rows
from core.engine import Layout
from core.exits import Exit, fail
from core.model import add_adapters, is_of_body, load_pretrained, read_config, set_up_layers
from core.run import Run
from core.workarounds import fsdp_plugin, workaround

NO_LABELS = ("", "nan", "inf", "-inf")


# ---- The arguments ----
@dataclass(kw_only=True)
class LabelArguments:
    """What the labels are, and how much each row weighs."""

    problem_type: Literal["single_label_classification", "regression"] | None = arg(
        None, "what the labels are [inferred from the labels]"
    )
    class_weights: Literal["none", "balanced"] = arg(
        "none", "weights of rows in the loss; balanced gives all classes the same total weight"
    )


# ---- Rows ----
def read_label(value: Any, column: str) -> dict[str, Any]:
    """Return the columns `label_text` and `number`, which is infinite of a text, of a row.

    Raises:
        ValueError: if there is no label in the column.
    """
    text = str(value).strip()
    if isinstance(value, float):  # Readers turn 2 into 2.0 if a number is missing elsewhere.
        text = text.removesuffix(".0")
    if not isinstance(value, str | int | float) or text in NO_LABELS:
        raise ValueError(f"has no label in {column}: {value!s:.80}")
    return {"label_text": text, "number": math.inf if isinstance(value, str) else float(value)}


def compared(name: Any) -> str:
    """Return the name of a class as it is compared: NEGATIVE is negative, and LABEL_1 is 1."""
    return str(name).strip().casefold().removeprefix("label_")


def names_of_head(config: Any) -> list[str]:
    """Return the names that a config gives to the rows of its model's head, as `compared`."""
    names = getattr(config, "id2label", None) or {}
    return [compared(name) for _, name in sorted(names.items())]


def find_classes(rows: Rows, args: Any, column: str, config: Any) -> dict[str, int]:
    """Return the classes that the labels of the training rows name, and how many rows have each.

    They are in the order of the base's head if that has the same ones, else in that of the data
    set's own names, else by number and alphabet. There are none if the labels are
    regression targets: --problem_type decides, or a fraction among them. Ends with 65 if all rows
    have the same label.

    Args:
        column: of the labels.
        config: of the base.
    """
    numbers = rows.column("number").tolist()
    texts = rows.column("label_text").tolist()
    is_regression = args.problem_type == "regression"
    if args.problem_type is None:
        is_regression = any(number % 1 > 0 for number in numbers)
    if is_regression:
        if args.class_weights == "balanced":
            problem = f"{column} has regression targets, not classes"
            fail(Exit.USAGE, f"--class_weights balanced: {problem}")
        return {}
    source = rows.sources[0]
    num_rows = Counter(texts)
    if len(num_rows) == 1:
        only = f"all rows have the label {texts[0]!r} in {column}: there is nothing to tell apart"
        fail(Exit.DATA, f"{source.name}: {only}")
    ordered = [text for _, text in sorted(set(zip(numbers, texts, strict=True)))]
    ordered = [name for name in source.class_names.get(column, ordered) if name in num_rows]
    of_head = names_of_head(config)
    by_compared = {compared(name): name for name in ordered}
    if sorted(of_head) == sorted(by_compared) and len(by_compared) == len(ordered):
        ordered = [by_compared[name] for name in of_head]
    return {name: num_rows[name] for name in ordered}


def describe_classes(classes: Mapping[str, int]) -> str:
    """Return the classes and their rows, for the start summary."""
    if not classes:
        return "numbers"
    listed = ", ".join(f"{name} {number}" for name, number in classes.items())
    return f"{len(classes)} classes: {listed[:400]}"


def add_labels(rows: Rows, classes: Mapping[str, int], args: Any) -> Rows:
    """Return the rows with the columns `labels` and `weights`, as the loss needs them.

    With --class_weights balanced, the rows of each class have the same total weight. Ends with 65
    if a label occurs in no training row, or is not a number as the others are.

    Args:
        classes: as `find_classes` returns them.
    """
    if classes:
        texts = rows.column("label_text").tolist()
        unknown = [text for text in texts if text not in classes]
        if unknown:
            place = rows.place(texts.index(unknown[0]))
            known = f"occurs in no training row: those have {', '.join(classes)[:200]}"
            fail(Exit.DATA, f"{place}: its label {unknown[0]!r} {known}")
        number_of = {label: number for number, label in enumerate(classes)}
        labels = np.array([number_of[text] for text in texts])
    else:
        labels = rows.column("number").astype(np.float32)
        no_numbers = np.flatnonzero(~np.isfinite(labels))
        if len(no_numbers):
            fail(Exit.DATA, f"{rows.place(int(no_numbers[0]))}: its label is not a number")
    weights = np.ones(len(labels), dtype=np.float32)
    if args.class_weights == "balanced":
        mean = sum(classes.values()) / len(classes)
        of_class = [mean / number for number in classes.values()]
        weights = np.array(of_class, dtype=np.float32)[labels]
    dataset = rows.dataset.add_column("labels", labels).add_column("weights", weights)
    return replace(rows, dataset=dataset.with_format("numpy"))


# ---- Metrics ----
def label_tensors(rows: Sequence[Mapping[str, Any]], source: Any) -> dict[str, torch.Tensor]:
    """Return labels and weights of a batch's rows, [rows] each; empty on a rank without rows."""
    tensors = {}
    for name in ("labels", "weights"):
        values = np.array([row[name] for row in rows], dtype=source.features[name].dtype)
        tensors[name] = torch.from_numpy(values)
    return tensors


def label_metrics(predicted: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Return accuracy and macro F1 of classes, or squared error and correlation of numbers.

    The former is of int64, the latter of float32. Macro F1 is the mean of F1 over the classes that
    occur or are predicted. Pearson's correlation is 0 if all predictions, or all labels, are equal.

    Args:
        predicted, labels: [rows] each.
    """
    if labels.is_floating_point():
        correlation = 0.0
        if len(predicted.unique()) > 1 and len(labels.unique()) > 1:
            correlation = float(np.corrcoef(predicted, labels)[0, 1])
        error = (predicted - labels).square().mean().item()
        return {"eval_mse": error, "eval_pearson": correlation}
    num_classes = int(max(predicted.max(), labels.max())) + 1
    correct = labels[predicted == labels].bincount(minlength=num_classes)
    found = predicted.bincount(minlength=num_classes)
    true = labels.bincount(minlength=num_classes)
    f1 = 2 * correct / (found + true)  # NaN for a class that neither occurs nor is predicted
    accuracy = (correct.sum() / true.sum()).item()
    return {"eval_accuracy": accuracy, "eval_f1": f1.nanmean().item()}


# ---- Model ----
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
    share_new_modules(model, new_modules, layout.accelerator)
    set_seed(args.seed)  # ranks that made no new weights drew less, and adapters are drawn next
    set_up_layers(model, args)
    notes = {"head": "new: the base has none for this task"} if new_modules else {}
    return add_adapters(model, args, layout, new_modules, task_type=task_type), notes


@workaround("transformers/modeling_utils.py, _initialize_missing_keys", seen="transformers 5.23")
def share_new_modules(
    model: torch.nn.Module, names: Iterable[str], accelerator: Accelerator
) -> None:
    """Under FSDP, give these modules the weights of rank 0 on every rank.

    transformers then makes new weights on rank 0 only. The other ranks have noise or meta tensors;
    accelerate cannot tell the latter apart, so that the optimizer would train only one of them.
    """
    if fsdp_plugin(accelerator) is None:
        return
    for name in names:
        module = model.get_submodule(name)
        weights = module.cpu().state_dict() if accelerator.is_main_process else None
        module.load_state_dict(gather_object([weights])[0], assign=True)


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
        module = name.rpartition(".")[0]
        if name.startswith("classifier."):  # of several layers, which peft trains as one module
            module = "classifier"
        modules.add(module)
    return sorted(modules)


# ---- Loss and evaluation ----
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
    run.log_evaluation(metrics)


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
