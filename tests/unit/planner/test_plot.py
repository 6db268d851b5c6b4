# SPDX-License-Identifier: Apache-2.0
"""The pictures of `plan_memory.py --plot`: which strategies they show, and with which bytes."""

import sys

import pytest

import plan_memory
from planner import plot
from planner.answer import plans_on, read_question
from planner.cards import GIB
from planner.request import Request
from planner_jobs import BASE, config_of, mixture_of

SHAPE = BASE | {"width": 128, "depth": 2, "vocab": 1000}
MAKERS = {"llama.py": config_of, "mixtral.py": mixture_of}
PNG = b"\x89PNG\r\n\x1a\n"


def question_of(recipe, folder, *words):
    """What a call on four cards of 24 GB asks about a small model."""
    MAKERS[recipe](SHAPE).save_pretrained(folder)
    words = ["--model_name_or_path", str(folder), "--max_length", "64", *words]
    request = Request(model=f"recipes/{recipe}", words=words, gpu="24GB", num_processes=4)
    return read_question(request)


def drawn(question):
    """(plans, bars, curves): the plans on four ranks by name, and both pictures of them."""
    plans = plans_on(question, 4)
    figure = plot.draw("title", plans, question.config, question.batch, question.card)
    return plans, *figure.axes


def names_of(bars):
    return [label.get_text() for label in bars.get_yticklabels()]


def widths_of(bars):
    """{name: GiB of all parts of its bar}."""
    widths = dict.fromkeys(names_of(bars), 0.0)
    for part in bars.containers:
        for name, bar in zip(widths, part, strict=True):
            widths[name] += bar.get_width()
    return widths


@pytest.mark.parametrize("size", [None, 4])
def test_experts_are_drawn_with_each_size_of_a_group(size, tmp_path):
    words = ["--ep_size", str(size)] if size else []
    question = question_of("mixtral.py", tmp_path, *words)
    plans, bars, _ = drawn(question)
    sizes = [size] if size else [2, 4]
    of_experts = {f"{stem}, EP {ep}" for stem in ("ep", "fsdp2_ep") for ep in sizes}
    assert {name for name in names_of(bars) if "EP" in name} == of_experts
    assert ("ddp" in names_of(bars)) == (size is None)
    for name in of_experts:
        assert plans[name].ep == int(name.split()[-1])


def test_meshes_are_drawn_with_each_size_and_no_experts(tmp_path):
    question = question_of("llama.py", tmp_path)
    _, bars, _ = drawn(question)
    names = names_of(bars)
    expected = {"fsdp2_cp, CP 2", "fsdp2_cp, CP 4", "tp, TP 4", "fsdp2_tp, TP 2", "ddp", "fsdp"}
    assert expected <= set(names)
    assert not any("EP" in name for name in names)


@pytest.mark.parametrize("recipe", MAKERS)
def test_bars_and_curves_have_the_planned_bytes(recipe, tmp_path):
    question = question_of(recipe, tmp_path)
    plans, bars, curves = drawn(question)
    widths = widths_of(bars)
    for name, width in widths.items():
        held = plot.held(plans[name], question.config, question.batch)
        assert width == pytest.approx(sum(held.values()) / GIB)
    assert list(widths.values()) == sorted(widths.values(), reverse=True)
    *lines, card = curves.get_lines()
    assert len(lines) == plot.CURVES
    for line in lines:
        assert list(line.get_xdata()) == plot.LENGTHS
        plan = plans[line.get_label()]
        for length, size in zip(plot.LENGTHS, line.get_ydata(), strict=True):
            expected = plot.peak_in_gib(plan, question.config, question.batch, length)
            assert size == pytest.approx(expected)
    assert card.get_ydata()[0] == pytest.approx(question.card / GIB)


def test_a_png_is_written(tmp_path, capsys, monkeypatch):
    mixture_of(SHAPE).save_pretrained(tmp_path)
    picture = tmp_path / "plan.png"
    options = f"--gpu 24GB --num_gpus 2 --plot {picture} --json {tmp_path / 'plan.json'}"
    model = f"recipes/mixtral.py --model_name_or_path {tmp_path} --max_length 64"
    monkeypatch.setattr(sys, "argv", ["plan_memory.py", *options.split(), *model.split()])
    assert plan_memory.main() == 0
    assert picture.read_bytes().startswith(PNG)
    assert picture.stat().st_size > 10_000


def test_a_picture_of_no_known_format_is_refused_in_one_line(tmp_path, capsys, monkeypatch):
    config_of(SHAPE).save_pretrained(tmp_path)
    picture = tmp_path / "plan.sheep"
    words = f"--gpu 24GB --plot {picture} {tmp_path} --max_length 64"
    monkeypatch.setattr(sys, "argv", ["plan_memory.py", *words.split()])
    assert plan_memory.main() == 73
    assert f"cannot write {picture}" in capsys.readouterr().err
