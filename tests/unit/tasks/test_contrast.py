# SPDX-License-Identifier: Apache-2.0
"""A query is compared with every other document of the rows once, and not with its own others."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.nn.functional import normalize

from core.engine import Layout
from tasks import contrast

SCALE = 20.0


def make_rows(num_rows, num_texts=3):
    """Embeddings and hashes of texts that all differ."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randn(num_texts, num_rows, 8, generator=generator)
    return texts, np.arange(num_texts * num_rows).reshape(num_texts, num_rows)


def loss_of(query, right, wrong):
    """The loss of a query beside its document and others, by hand."""
    scores = SCALE * normalize(torch.stack([right, *wrong]), dim=1) @ normalize(query, dim=0)
    return torch.logsumexp(scores, 0) - scores[0]


def test_a_text_of_several_rows_is_one_document_and_an_answer_of_its_query_is_none_to_avoid():
    texts, hashes = make_rows(4)
    queries, answers, avoided = texts
    avoided[2], hashes[2, 2] = answers[0], hashes[1, 0]  # avoided there, and right in the first row
    queries[3], hashes[0, 3] = queries[1], hashes[0, 1]  # one query with two answers
    losses = contrast.info_nce(*contrast.compare(texts, hashes, np.arange(4), [8]), SCALE)
    others = [avoided[0], avoided[1], avoided[3]]
    assert losses[0] == pytest.approx(loss_of(queries[0], answers[0], [*answers[1:], *others]))
    both = [answers[0], answers[2], *others]
    assert losses[1] == pytest.approx(loss_of(queries[1], answers[1], both))
    assert losses[3] == pytest.approx(loss_of(queries[1], answers[3], both))


def test_many_queries_have_the_gradients_of_all_at_once(monkeypatch):
    texts, hashes = make_rows(11)
    layout = Layout(Accelerator(cpu=True))
    batches = [{"hashes": hashes}]
    losses, gradients = contrast.contrast(layout, [texts], batches, SCALE, [8, 4])
    metrics = contrast.retrieval_metrics(texts, hashes, SCALE, [8, 4])
    monkeypatch.setattr(contrast, "QUERIES_AT_A_TIME", 4)
    few, again = contrast.contrast(layout, [texts], batches, SCALE, [8, 4])
    torch.testing.assert_close(again, gradients)
    torch.testing.assert_close(few, losses)
    assert contrast.retrieval_metrics(texts, hashes, SCALE, [8, 4]) == pytest.approx(metrics)
