# SPDX-License-Identifier: Apache-2.0
"""Embeddings of texts, and their contrast: each query beside the documents of a whole step.

The negatives of a query are the documents of all rows of an optimizer step, on all ranks, so that
the loss does not depend on how the step is cut. Gradients at the embeddings are computed first, and
then passed on through the model, micro-batch by micro-batch (GradCache, arXiv 2101.06983).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import cross_entropy, normalize

from core.batches import Line, rows_of_lines
from core.data import Rows
from core.engine import Layout
from core.exits import Exit, fail

QUERIES_AT_A_TIME = 1000  # whose scores are held


# ---- Batches ----
def check_num_texts(*parts: Rows | None) -> None:
    """End with 65 if not all rows of a part have the same number of documents to avoid."""
    for rows in filter(None, parts):
        numbers = rows.column("num_texts")
        others = np.flatnonzero(numbers != numbers[0])
        if len(others):
            place = rows.place(others[0])
            fail(Exit.DATA, f"{place}: has another number of documents to avoid than the first row")


@dataclass(frozen=True)
class TextsCollator:
    """Make a batch of n rows, each of the same number of texts: a query and its documents.

    A batch has these entries:
        inputs: what the model takes, of the queries, [n, tokens], and of the documents, [documents
            of a row x n, tokens], of which the first n are right; both padded on the right.
        hashes: of the texts, [texts of a row, n], on the host.
        counts: n, and the number of tokens without padding.
        row: numbers of the rows in their file, from 1, on the host.
    """

    columns: ClassVar[list[str]] = ["input_ids", "hashes", "row"]
    tokenizer: Any

    def __call__(self, source: Any, lines: Sequence[Line]) -> dict[str, Any]:
        rows = rows_of_lines(source, lines)
        num_texts = len(source[0]["hashes"])
        texts = []
        for place in range(num_texts):
            texts += [row["input_ids"][place] for row in rows]
        inputs = []
        for part in (texts[: len(rows)], texts[len(rows) :]):
            ids = {"input_ids": part or [[self.tokenizer.pad_token_id]]}  # A rank may have no rows
            inputs.append(dict(self.tokenizer.pad(ids, padding_side="right", return_tensors="pt")))
        hashes = np.array([row["hashes"] for row in rows], dtype=np.int64)
        return {
            "inputs": inputs,
            "hashes": hashes.reshape(len(rows), num_texts).T,
            "counts": torch.tensor([len(rows), sum(len(ids) for ids in texts)]),
            "row": [int(row["row"]) for row in rows],
        }


# ---- Embeddings ----
def embed(model: torch.nn.Module, batch: Mapping[str, Any], pooling_mode: str) -> torch.Tensor:
    """Return the embeddings of a batch's texts in fp32, not normalized: [texts, rows, size]."""
    found = []
    for inputs in batch["inputs"]:
        hidden = model(**inputs).last_hidden_state.float()
        mask = inputs["attention_mask"]
        lengths = mask.sum(1)
        if pooling_mode == "mean":
            sums = (hidden * mask[..., None]).sum(1)
            found.append(sums / lengths[:, None])
        elif pooling_mode == "cls":
            found.append(hidden[:, 0])
        else:  # Padding is on the right
            found.append(hidden[range(len(hidden)), lengths - 1])
    num_texts, num_rows = batch["hashes"].shape
    kept = torch.cat(found)[: num_texts * num_rows]
    return kept.view(num_texts, num_rows, kept.shape[1])


# ---- The loss ----
def compare(
    texts: torch.Tensor, hashes: np.ndarray, rows: np.ndarray, dims: Sequence[int]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the cosines of some rows' queries with all documents, and which one is right.

    They are [queries, documents] for each of `dims`, and [queries]. A text that several rows have
    is one document. The right documents of other rows with the same query have -inf: they are no
    wrong answers.

    Args:
        texts: embeddings of all rows, [texts, all rows, size], of which the first are queries, and
            the second their right documents.
        hashes: of the texts, [texts, all rows].
        dims: sizes of the beginnings of embeddings that are compared.
    """
    _, places, numbers = np.unique(hashes[1:], return_index=True, return_inverse=True)
    right = numbers.ravel()[: hashes.shape[1]]
    query, other = np.nonzero(hashes[0, rows, None] == hashes[0])
    is_more = right[rows][query] != right[other]
    documents = texts[1:].flatten(0, 1)[places]
    found = []
    for dim in dims:
        queries = normalize(texts[0, rows, :dim], dim=1)
        cosines = queries @ normalize(documents[:, :dim], dim=1).T
        cosines[query[is_more], right[other[is_more]]] = -torch.inf
        found.append(cosines)
    return found, torch.from_numpy(right[rows]).to(texts.device)


def info_nce(cosines: Sequence[torch.Tensor], right: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the loss of each query, [queries], in nats.

    That is sentence-transformers' MultipleNegativesRankingLoss; for several sizes its
    MatryoshkaLoss, their sum.

    Args:
        cosines, right: as `compare` returns them.
        scale: by which cosines are multiplied.
    """
    losses = [cross_entropy(scale * one, right, reduction="none") for one in cosines]
    return torch.stack(losses).sum(0)


def contrast(
    layout: Layout,
    embedded: Sequence[torch.Tensor],
    micro_batches: Sequence[Mapping[str, Any]],
    scale: float,
    dims: Sequence[int],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return this rank's parts of the step's loss, and its gradients at this rank's embeddings.

    Both are lists by micro-batch. The loss is the mean over all queries of the step. Each rank
    computes the gradient of its own queries' part at the embeddings of all; their sum is the whole.

    Args:
        embedded: of this rank's micro-batches, [texts, rows, size] each, without gradients.
    """
    own = torch.cat(list(embedded), dim=1)
    num_texts, num_rows, size = own.shape
    parts = layout.gather([batch["hashes"] for batch in micro_batches])
    widths = [part.shape[1] for part in parts]
    first = sum(widths[: layout.data_rank * len(micro_batches)])
    rows = np.arange(first, first + num_rows)
    hashes = np.concatenate(parts, axis=1)
    whole = own.new_zeros(num_texts, hashes.shape[1], size)
    whole[:, rows] = own
    whole = layout.sum_over_rows(whole).requires_grad_()
    losses = own.new_zeros(num_rows)
    gradient = torch.zeros_like(whole)
    for few in split(rows):
        part = info_nce(*compare(whole, hashes, few, dims), scale) / hashes.shape[1]
        gradient += torch.autograd.grad(part.sum(), whole)[0]
        losses[few - first] = part.detach()
    gradient = layout.sum_over_rows(gradient)[:, rows]
    sizes = [part.shape[1] for part in embedded]
    of_micro_batches = [part.sum() for part in losses.split(sizes)]
    return of_micro_batches, list(gradient.split(sizes, dim=1))


def split(rows: np.ndarray) -> list[np.ndarray]:
    """Return rows in parts, so that the scores of all of them are never held at once."""
    return np.split(rows, range(QUERIES_AT_A_TIME, len(rows), QUERIES_AT_A_TIME))


# ---- Evaluation ----
def retrieval_metrics(
    texts: torch.Tensor, hashes: np.ndarray, scale: float, dims: Sequence[int]
) -> dict[str, float]:
    """Return the loss, and recall and nDCG at 10, where each query looks among all documents.

    As sentence-transformers' InformationRetrievalEvaluator has them for whole embeddings; `texts`
    and `hashes` are as in `compare`.
    """
    _, num_rows, size = texts.shape
    losses = []
    ranks = []
    for rows in split(np.arange(num_rows)):
        (*cosines, whole), right = compare(texts, hashes, rows, [*dims, size])
        losses.append(info_nce(cosines, right, scale))
        ranks.append((whole > whole.gather(1, right[:, None])).sum(1))
    rank = torch.cat(ranks)
    is_found = rank < 10
    gain = is_found / torch.log2(rank + 2.0)
    return {
        "eval_loss": torch.cat(losses).mean().item(),
        "eval_recall@10": is_found.float().mean().item(),
        "eval_ndcg@10": gain.mean().item(),
    }
