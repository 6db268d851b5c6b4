# SPDX-License-Identifier: Apache-2.0
"""A batch is cut into micro-batches of one shape; tests/launch/test_cells.py trains on them."""

from datasets import Dataset

from core.batches import TokenCollator
from extras.pipeline.batches import PipelineCollator, micro_batches_of


def test_packed_rows_keep_their_positions_in_each_micro_batch():
    rows = []
    for number, ids in enumerate(([5, 6, 7], [8, 9, 10, 11], [12, 13]), 1):
        rows.append({"input_ids": ids, "labels": ids, "row": number})
    collate = PipelineCollator(TokenCollator(0, width=8), num_rows=2, num_microbatches=2)
    first, second = micro_batches_of(collate(Dataset.from_list(rows), [[0, 1], [2]]))
    assert first["inputs"]["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert second["inputs"]["position_ids"].shape == (1, 8)
