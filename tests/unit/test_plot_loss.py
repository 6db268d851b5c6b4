# SPDX-License-Identifier: Apache-2.0
"""What a run has written is read as it is, and refused with its place if it is none."""

from plot_loss import read_run
from recorded_runs import write_run


def test_a_loss_that_was_not_finite_is_in_no_curve(tmp_path):
    folder = write_run(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 3, "loss": null}')
    assert read_run(folder).curve("loss") == ([1, 2], [4.0, 2.0])
