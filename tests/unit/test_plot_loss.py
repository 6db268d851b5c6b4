# SPDX-License-Identifier: Apache-2.0
"""The picture of a run says what happened, with names and units."""

import json
import subprocess
import sys

import pytest

import plot_loss
from launching import REPO


def metrics(losses):
    entries = []
    for number, loss in enumerate(losses, 1):
        entries.append({"step": number, "loss": loss, "learning_rate": 1e-3})
    return entries


def test_the_title_says_how_far_the_loss_fell():
    assert (
        plot_loss.title_of({"run": metrics([4.0, 2.0])}) == "The loss fell from 4 to 2 in 2 steps"
    )
    assert "did not fall" in plot_loss.title_of({"run": metrics([2.0, 4.0])})


def test_the_title_is_about_the_first_and_the_last_twentieth_of_the_steps():
    lucky = [6.0, 4.0, *[1.0] * 36, 0.06, 0.02]  # 40 steps: two at each end
    assert plot_loss.title_of({"run": metrics(lucky)}) == "The loss fell from 5 to 0.04 in 40 steps"


def test_the_smoothed_curve_does_not_drop_to_the_last_step():
    noise = [1.0, 3.0] * 200  # a mean of 2, and no trend
    smoothed = plot_loss.smooth(noise)
    # A window of 11 steps at the ends and of 21 between has one value more of one kind
    assert max(abs(value - 2) for value in smoothed) <= 1 / 11 + 1e-12
    assert len(smoothed) == 400


def test_a_trend_is_not_delayed_and_a_short_run_not_smoothed():
    line = [float(step) for step in range(400)]
    assert plot_loss.smooth(line)[10:-10] == pytest.approx(line[10:-10])
    assert plot_loss.smooth([3.0, 2.0, 1.0]) == [3.0, 2.0, 1.0]


def test_the_picture_is_beside_the_metrics_of_its_run(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    run.mkdir()
    lines = [json.dumps(entry) for entry in metrics([4.0, 2.0])]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["plot_loss.py", str(run)])
    plot_loss.main()
    assert capsys.readouterr().out == f"{run / 'loss.png'}\n"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["loss.png", "metrics.jsonl", "run"]


def test_a_run_is_named_by_what_differs_in_its_path():
    assert plot_loss.short_names(["runs/a/run", "runs/b/run"]) == {
        "runs/a/run": "a",
        "runs/b/run": "b",
    }
    assert plot_loss.short_names(["runs/a", "runs/a/run"]) == {"runs/a": "a", "runs/a/run": "a/run"}
    assert plot_loss.short_names(["runs/a"]) == {"runs/a": ""}


@pytest.mark.parametrize(
    ("losses", "expected"),
    [([4.0, 3.0], False), ([4.0, 0.1], True), ([4.0, 0.0], False), ([float("nan")], False)],
)
def test_a_loss_that_falls_far_is_on_a_log_scale(losses, expected):
    assert plot_loss.needs_log_scale({"run": metrics(losses)}) is expected


def test_the_loss_is_in_nats_per_token_and_the_curves_have_names():
    figure = plot_loss.draw({"x/ddp": metrics([4.0, 3.0]), "x/fsdp": metrics([4.0, 3.0])})
    axes = figure.axes[0]
    assert axes.get_ylabel() == "loss (nats per token)"
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["ddp: training, smoothed", "fsdp: training, smoothed"]


def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}))
    command = [sys.executable, REPO / "scripts" / "plot_loss.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 65
    assert len(done.stderr.splitlines()) == 1
    assert "no line with a loss" in done.stderr
