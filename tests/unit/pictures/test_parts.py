# SPDX-License-Identifier: Apache-2.0
"""Parts that ranks noted are found in the whole by their values, or are an error."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from pictures import real_runs
from pictures.parts import (
    UnknownPartError,
    find_box,
    find_row,
    lines_of_tokens,
    spans_of,
)
from proof.jobs import ranks_per_row

WHOLE = np.arange(24.0).reshape(6, 4)
ROWS = [dict(enumerate(row)) for row in ([1, 5, 7, 9], [1, 5, 8], [1, 6, 7, 9])]


@pytest.mark.parametrize("box", [(0, 0, 6, 4), (2, 0, 4, 4), (0, 1, 6, 3), (3, 2, 6, 4)])
def test_a_block_is_found_where_it_is(box):
    top, left, bottom, right = box
    assert find_box(WHOLE[top:bottom, left:right], WHOLE) == box


def test_the_same_first_number_elsewhere_does_not_mislead():
    whole = WHOLE.copy()
    whole[0, 0] = whole[3, 1]
    assert find_box(whole[3:5, 1:3], whole) == (3, 1, 5, 3)


def test_a_line_of_numbers_is_found_as_whole_rows():
    assert find_box(WHOLE.flatten()[8:16], WHOLE) == (2, 0, 4, 4)


@pytest.mark.parametrize("part", [WHOLE[2:4] + 1, WHOLE.flatten()[8:15], WHOLE[:, ::2]])
def test_what_is_not_in_the_whole_is_an_error(part):
    with pytest.raises(UnknownPartError, match="nowhere in a matrix"):
        find_box(part, WHOLE)


def test_tokens_have_their_positions_and_no_padding():
    noted = {"ids": [[7, 9, 0], [8, 0, 0]], "positions": [[2, 3, 4]]}
    assert lines_of_tokens(noted, pad=0) == [{2: 7, 3: 9}, {2: 8}]
    assert lines_of_tokens(noted | {"positions": None}, pad=0) == [{0: 7, 1: 9}, {0: 8}]


def test_a_piece_belongs_to_the_row_that_has_its_tokens_there():
    assert find_row({2: 8}, ROWS) == 1
    assert find_row({1: 6, 3: 9}, ROWS) == 2


@pytest.mark.parametrize("tokens", [{2: 7, 3: 9}, {2: 4}])
def test_a_piece_of_several_rows_or_of_none_is_an_error(tokens):
    with pytest.raises(UnknownPartError, match="are in the rows"):
        find_row(tokens, ROWS)


def test_positions_become_spans():
    assert spans_of([9, 0, 1, 8, 2]) == [(0, 3), (8, 10)]


def write_rank(path, passes):
    path.write_text("".join(json.dumps(line) + "\n" for line in passes))


def test_a_rank_with_hidden_states_has_the_rows_of_the_one_before_it(tmp_path):
    ranks = [tmp_path / f"parts.{rank}" for rank in range(4)]
    for rank, row in enumerate(([1, 5, 8], [1, 6, 7, 9])):
        write_rank(ranks[rank], [{"ids": [row], "positions": None}])
        write_rank(ranks[rank + 2], [{"ids": None, "positions": None}])
    found = real_runs.tokens_of_ranks(ranks, ROWS, pad=0)
    assert found == [{1: [(0, 3)]}, {2: [(0, 4)]}] * 2


def test_boxes_are_those_of_held_and_of_used_weights(tmp_path):
    path = tmp_path / "parts.0"
    save_file({"held.up_proj": WHOLE[:2].copy(), "used.up_proj": WHOLE}, f"{path}.safetensors")
    assert real_runs.boxes_of(path, {"up_proj": WHOLE}) == {
        "held": {"up_proj": (0, 0, 2, 4)},
        "used": {"up_proj": (0, 0, 6, 4)},
    }


def test_bytes_are_those_of_the_shard_report(tmp_path):
    rows = [{"class": "parameters", "held_bytes": size} for size in (5, 6)]
    (tmp_path / "report.json").write_text(json.dumps({"rows": rows}))
    assert real_runs.bytes_by_class(tmp_path) == {"parameters": [5, 6]}


def test_each_run_has_the_rows_of_one_step():
    for run in real_runs.runs_of_meshes():
        groups = run.ranks // ranks_per_row(run.config, run.sizes)
        assert groups * run.batch == real_runs.MESH_ROWS
