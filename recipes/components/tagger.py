# SPDX-License-Identifier: Apache-2.0
"""A tagger, a classifier of tokens: its loss, and how well it tags words."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from components.entities import are_of_entities, count_matches, tag_metrics
from components.tags import tag_words
from core.data import IGNORED
from core.engine import Layout
from core.run import Run


def summed_tag_loss(
    model: torch.nn.Module, batch: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropy summed over a batch's labeled tokens, and the logits.

    Returns:
        A scalar, and [rows, tokens, tags]; both in fp32.
    """
    logits = model(**batch["inputs"]).logits.float()
    loss = cross_entropy(
        logits.flatten(0, 1),
        batch["labels"].flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )
    return loss, logits


@torch.no_grad()
def evaluate_tags(
    run: Run,
    layout: Layout,
    model: torch.nn.Module,
    names: Sequence[str],
    loader: DataLoader,
) -> None:
    """Log the loss, as in training, and how well the words of the evaluation rows are tagged.

    Args:
        names: the names of the tags, in the order of the logits.
    """
    model.eval()
    has_entities = are_of_entities(names)
    total = torch.zeros(2, device=layout.device)
    counts = np.zeros(5, dtype=np.int64)
    for batch in run.interruptible(loader):
        loss, logits = summed_tag_loss(model, batch)
        num_labeled = batch["counts"][0]
        total += torch.stack([loss, num_labeled.float()])
        numbers = logits.argmax(-1).cpu().numpy()
        for row, tags in enumerate(batch["tags"]):
            word_ids = batch["word_ids"][row]
            predicted = tag_words(numbers[row], word_ids, names, len(tags))
            counts += count_matches(tags, predicted, has_entities)
    model.train()
    loss, num_labeled = layout.sum_over_rows(total).tolist()
    whole = torch.from_numpy(counts).to(layout.device)
    whole = layout.sum_over_rows(whole).tolist()
    metrics = {"eval_loss": loss / num_labeled}
    metrics |= tag_metrics(whole, has_entities)
    listed = [f"{name.removeprefix('eval_')} {value:.4f}" for name, value in metrics.items()]
    run.log_evaluation(metrics, f"{', '.join(listed)} on held-out rows")
