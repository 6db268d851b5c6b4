# SPDX-License-Identifier: Apache-2.0
"""The passes that ranks of a pipeline note become batches, with times and idle shares."""

import json

import pytest

from pictures.passes import batches_of, duration_of, idle_share, read_passes, shortest_batch
from proof import stage_probe


def one(kind, micro_batch, start, end, stage=0):
    return {
        "kind": kind,
        "stage": stage,
        "micro_batch": micro_batch,
        "start": start,
        "end": end,
    }


# Three batches of one micro-batch on two ranks
FIRST = [
    *(one("forward", 0, start, start + 1) for start in (0, 10, 20)),
    *(one("backward", 0, start, start + 2) for start in (5, 13, 26)),
]
SECOND = [
    *(one("forward", 0, start, start + 1, stage=1) for start in (1, 11, 21)),
    *(one("backward", 0, start, start + 1, stage=1) for start in (2, 12, 22)),
]


def test_each_pass_is_once_in_a_batch():
    batches = batches_of(sorted(FIRST, key=lambda found: found["end"]))
    assert [[found["start"] for found in batch] for batch in batches] == [
        [0, 5],
        [10, 13],
        [20, 26],
    ]


def test_the_shortest_batch_but_the_first_is_chosen_and_begins_at_0():
    batch = shortest_batch([FIRST, SECOND])
    assert [[(found["start"], found["end"]) for found in passes] for passes in batch] == [
        [(0, 1), (3, 5)],
        [(1, 2), (2, 3)],
    ]
    assert duration_of(batch) == 5


def test_the_idle_share_is_over_all_ranks():
    assert idle_share(shortest_batch([FIRST, SECOND])) == pytest.approx(1 - (3 + 2) / (2 * 5))


def test_the_probe_notes_kind_stage_micro_batch_and_times(tmp_path):
    class Stage:
        stage_index = 3

        def pass_of(self, number):
            return number + 1

    path = tmp_path / "stages.0"
    with open(path, "w") as file:
        timed = stage_probe.timed(Stage.pass_of, "forward", file.write)
        assert timed(Stage(), 5) == 6
    [noted] = read_passes(path)
    assert noted["end"] >= noted["start"]
    assert json.loads(path.read_text()) == noted
    assert {**noted, "start": 0, "end": 0} == one("forward", 5, 0, 0, stage=3)
