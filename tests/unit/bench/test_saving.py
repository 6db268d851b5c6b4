# SPDX-License-Identifier: Apache-2.0
"""How long saves hold up training: medians of the rank that takes longest."""

from bench.saving import Job, seconds_of
from bench.saving_rank import Stopwatch
from bench.saving_tables import NOT_MEASURED, block


def rank(held_up, beside=()):
    return {
        "held_up": held_up,
        "until_whole": [4 * seconds for seconds in held_up],
        "beside": list(beside),
        "apart": [1.0, 2.0, 9.0],
        "training": 30.0,
    }


def test_the_last_save_does_not_count_and_the_slowest_rank_does():
    ranks = [rank([1.0, 2.0, 3.0, 90.0]), rank([2.0, 2.5, 3.0, 90.0], beside=[5.0])]
    seconds = seconds_of(ranks, saves=3)
    assert seconds["held_up_seconds"] == 2.5 and seconds["until_whole_seconds"] == 10
    assert seconds["step_beside_seconds"] == 5 and seconds["step_seconds"] == 2


def test_a_run_ends_with_a_save_more_than_is_measured():
    assert Job(ranks=1, in_background=True, saves=3).steps == 24


def test_a_table_has_no_step_beside_a_save_where_the_run_waits():
    seconds = seconds_of([rank([2.0])], saves=1)
    row = {"ranks": 4, "in_background": False, "saves": 1, "checkpoint_bytes": 1e9} | seconds
    line = block({"rows": [row]}).splitlines()[2]
    assert [cell.strip() for cell in line.split("|")[1:-1]] == [
        *("4", "", "1,000", "2.00", "8.00", "2.00", "", "30.0")
    ]
    assert block(None) == NOT_MEASURED


class Saves:
    """A run whose method of a save calls another timed one."""

    def save(self):
        self.finish()

    def finish(self):
        pass


def test_a_call_within_a_save_is_counted_once(monkeypatch):
    kind = type("Kind", (Saves,), {"save": Saves.save, "finish": Saves.finish})
    seconds = iter(range(100))
    monkeypatch.setattr("bench.saving_rank.time.perf_counter", lambda: next(seconds))
    stopwatch = Stopwatch()
    stopwatch.watch(kind, "save", before=stopwatch.begin_save)
    stopwatch.watch(kind, "finish")
    kind().finish()  # belongs to no save
    kind().save()
    kind().finish()
    assert stopwatch.held_up == [2.0]
    stopwatch.note_whole(is_pending=True)
    assert stopwatch.until_whole == []
    stopwatch.note_whole(is_pending=False)
    assert stopwatch.until_whole == [4]
