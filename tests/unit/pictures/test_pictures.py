"""Each picture is drawn from results/, equal each time, and committed as it is drawn."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from bench.figures import named
from launching import REPO
from pictures import memory, speed
from pictures.catalog import PICTURES, draw
from pictures.style import DARK, LIGHT, THEMES

FOLDER = REPO / "docs" / "pictures"
COMMAND = [sys.executable, REPO / "scripts" / "draw.py"]


def words_of(svg):
    """The text of an SVG."""
    return " ".join(" ".join(ElementTree.fromstring(svg).itertext()).split())


@pytest.fixture(scope="module")
def drawn():
    """{(name, theme): SVG} of all pictures."""
    return {(name, theme.name): draw(name, theme) for name in PICTURES for theme in THEMES}


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_the_committed_picture_is_what_the_command_draws(name, theme, drawn):
    path = FOLDER / f"{name}_{theme.name}.svg"
    assert path.read_text() == drawn[name, theme.name], f"python scripts/draw.py {name}"


def test_no_other_pictures_are_committed():
    names = {f"{name}_{theme.name}.svg" for name in PICTURES for theme in THEMES}
    assert {path.name for path in FOLDER.iterdir()} == names


@pytest.mark.parametrize("name", [name for name in PICTURES if name != "memory"])
def test_a_picture_drawn_again_is_equal(name, drawn):
    assert draw(name, LIGHT) == drawn[name, "light"]


@pytest.mark.parametrize("name", PICTURES)
def test_both_themes_say_the_same_in_other_colors(name, drawn):
    light = drawn[name, "light"]
    dark = drawn[name, "dark"]
    assert words_of(light) == words_of(dark)
    assert light != dark
    assert LIGHT.text in light
    assert DARK.text in dark


def test_what_was_not_measured_is_said(drawn):
    for name in ("memory", "parity", "resume", "speed"):
        assert "ot yet measured" in words_of(drawn[name, "light"])


def test_the_planned_parts_of_a_bar_add_up_to_the_plan():
    device = {"parameters": 2**30, "logits": 2**30, "optimizer": 2**29, "constants": 0}
    peak = memory.peak_of(device)
    assert peak["parameters"] == 1
    assert peak["activations and buffers"] == 1
    assert sum(peak.values()) == 2.5


def test_a_part_that_the_picture_does_not_know_is_an_error():
    with pytest.raises(KeyError, match="something new"):
        memory.peak_of({"something new": 1})


def test_a_plan_as_large_as_the_card_fits():
    peak = memory.peak_of({"parameters": 2**30})
    assert memory.fits(peak, 1.0)
    assert not memory.fits(peak, 0.99)


def test_the_figure_at_a_bar_is_that_of_the_results(drawn):
    cell = named(json.loads(speed.BENCHMARK.read_text()), speed.CELL)
    assert f"{speed.ratio_to(cell, 'trainer'):.1f}x" in words_of(drawn["speed", "light"])


def test_an_unknown_picture_is_refused_in_one_line():
    done = subprocess.run([*COMMAND, "sped"], capture_output=True, text=True)
    assert done.returncode == 64
    assert len(done.stderr.splitlines()) == 1
    assert "no such picture" in done.stderr


def test_a_folder_that_cannot_be_written_is_told_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    command = [*COMMAND, "speed", "--output_dir", tmp_path / "file" / "pictures"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 73
    assert len(done.stderr.splitlines()) == 1
