# SPDX-License-Identifier: Apache-2.0
"""What a run has written is read as it is, and refused with its place if it is none."""

import pytest

from plotting.runs import read_run
from recorded_runs import write_run


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nonsense", "line 1: "),
        ('{"step": 1, "loss": null}', "no line with a loss"),
        ("", "no line with a loss"),
    ],
)
def test_metrics_that_cannot_be_drawn_are_refused_with_65(text, problem, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(SystemExit) as ended:
        read_run(str(tmp_path))
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 65 and problem in line


def test_a_loss_that_was_not_finite_is_in_no_curve(tmp_path):
    folder = write_run(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 3, "loss": null}')
    assert read_run(folder).curve("loss") == ([1, 2], [4.0, 2.0])
