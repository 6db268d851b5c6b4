# SPDX-License-Identifier: Apache-2.0
"""The picture says what happened, with names and units."""

import dataclasses
import itertools

import pytest

from plotting.panels import OF_ONE_RUN, OF_SEVERAL_RUNS, choose_panels
from plotting.picture import MOST_RUNS, Look, draw, find_axis, needs_log_scale, positions, title_of
from recorded_runs import lines_of, recorded


def picture(*runs, names=None, axis="step"):
    names = names or (OF_SEVERAL_RUNS if len(runs) > 1 else OF_ONE_RUN)
    panels, _ = choose_panels(names, runs)
    return draw(runs, panels, axis)


def texts_of(legend):
    return [text.get_text() for text in legend.get_texts()]


def test_the_title_says_how_far_the_loss_fell():
    assert title_of([recorded([4.0, 2.0])]) == "The loss fell from 4 to 2 in 2 steps"
    assert "did not fall" in title_of([recorded([2.0, 4.0])])
    assert title_of([recorded(), recorded()]) == "2 runs compared"


def test_one_run_has_a_simple_picture():
    figure = picture(recorded([4.0, 3.0], evaluations=[{"step": 2, "eval_loss": 3.5}]))
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss (nats per token)", "learning rate"]
    assert texts_of(figure.axes[0].get_legend()) == ["training, smoothed", "evaluation"]
    assert figure.legends == []


def test_the_legend_of_several_runs_says_in_what_they_differ():
    first = recorded([4.0] * 9, "x/a", learning_rate=1e-3)
    second = recorded([3.0] * 9, "x/b", learning_rate=2e-3)
    figure = picture(first, second)
    assert texts_of(figure.legends[0]) == ["a: learning_rate=0.001", "b: learning_rate=0.002"]
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "loss (nats per token)",
        "tokens per second",
        "peak memory of\nrank 0 (GiB)",
        "learning rate",
    ]
    assert all(len(axes.lines) >= 2 for axes in figure.axes)


@pytest.mark.parametrize("number", range(1, 8))
def test_any_number_of_panels_has_room_and_the_lowest_name_the_axis(number):
    run = recorded([4.0] * 9)
    names = ["loss", *(f"metric_{i}" for i in range(1, number))]
    for line in run.steps:
        line |= dict.fromkeys(names[1:], 1.0)
    figure = picture(run, names=names)
    assert len(figure.axes) == number
    lowest = min(axes.get_position().y0 for axes in figure.axes)
    for axes in figure.axes:
        assert bool(axes.get_xlabel()) == (axes.get_position().y0 == pytest.approx(lowest))


def test_a_dollar_in_a_name_is_no_formula(tmp_path):
    figure = picture(recorded(folder="x/$a_{$"), recorded(folder="x/_b"))
    figure.savefig(tmp_path / "picture.svg")
    assert texts_of(figure.legends[0]) == [r"\$a_{\$", "_b"]


def test_runs_look_different_from_each_other():
    looks = [Look.of(number, MOST_RUNS) for number in range(MOST_RUNS)]
    for one, other in itertools.combinations(looks, 2):
        assert (one.color, one.marker) != (other.color, other.marker)
        assert one.width > other.width  # what is drawn later does not hide it


@pytest.mark.parametrize(
    ("losses", "expected"),
    [([4.0, 3.0], False), ([4.0, 0.1], True), ([4.0, 0.0], False), ([float("nan")], False)],
)
def test_a_loss_that_falls_far_is_on_a_log_scale(losses, expected):
    assert needs_log_scale([recorded(losses)]) is expected


# ---- The horizontal axis ----


def test_runs_are_drawn_over_steps_tokens_or_seconds():
    run = recorded([1.0, 1.0])  # 100 tokens and a second in each step
    assert positions(run, find_axis([run], "step"), [0, 2]) == [0, 2]
    assert positions(run, find_axis([run], "tokens"), [0, 1, 2]) == [0, 100, 200]
    assert positions(run, find_axis([run], "time"), [0, 1.5]) == [0, 1.5]
    assert picture(run, axis="num_input_tokens_seen").axes[-1].get_xlabel() == "tokens seen"


def test_a_run_without_times_is_only_drawn_over_steps():
    run = recorded()
    steps = [{"step": line["step"], "loss": line["loss"]} for line in run.steps]
    old = dataclasses.replace(run, steps=steps)
    assert find_axis([run, old], "step") == "step"
    for axis in ("tokens", "time"):
        with pytest.raises(ValueError, match=f"--x {axis}: run has not recorded"):
            find_axis([run, old], axis)


def test_tokens_and_images_are_not_on_one_axis():
    images = []
    for line in lines_of([1.0]):
        line["images_per_second"] = line.pop("tokens_per_second")
        line["num_images_seen"] = line.pop("num_input_tokens_seen")
        images.append(line)
    runs = [recorded(), dataclasses.replace(recorded(), steps=images)]
    assert find_axis(runs, "time") == "time"
    with pytest.raises(ValueError, match="some runs count tokens and some images"):
        find_axis(runs, "tokens")
