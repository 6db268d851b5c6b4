# SPDX-License-Identifier: Apache-2.0
"""Each picture is drawn from results/, equal each time, and committed as it is drawn."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from launching import REPO
from pictures import memory, real_runs, speed, terminal
from pictures import recordings as recordings_module
from pictures.catalog import PICTURES, draw
from pictures.recordings import NotRecordedError, read_recordings, write_recording
from pictures.style import DARK, LIGHT, THEMES
from proof.jobs import expert_configs, mesh_configs
from tables_speed import cell_of

FOLDER = REPO / "docs" / "pictures"
COMMAND = [sys.executable, REPO / "scripts" / "draw.py"]


# What each picture of real runs needs in results/curves.json
RECORDED = {
    "parity": "parity",
    "resume": "resume",
    "quickstart_curve": "quickstart",
    "quickstart_terminal": "quickstart",
    "comparison": "comparison",
    "pipeline": "pipeline",
    "meshes": "meshes",
}
# Not drawn yet, though nothing is missing
NOT_DRAWN_YET: set[str] = set()
READY = [name for name in PICTURES if RECORDED.get(name) in (None, *read_recordings())]
DRAWN = [name for name in READY if name not in NOT_DRAWN_YET]
STEPS = [1, 2, 3, 4]
CURVE = {"steps": STEPS, "losses": [4.0, 3.0, 2.5, 2.25]}
KILLED = {"steps": STEPS[:3], "losses": CURVE["losses"][:3]}
RECORDINGS = {
    "parity": {"runs": {"single": CURVE, "ddp": CURVE | {"losses": [4.0, 3.5, 2.5, 2.25]}}},
    "resume": {
        "config": "ddp",
        "ranks": 2,
        "checkpoint": 2,
        "killed": KILLED,
        "resumed": CURVE,
        "uninterrupted": CURVE,
        "unequal": 0,
    },
    "quickstart": {
        "cores": 2,
        "exact_match": {"before": 0.0, "after": 0.75},
        "curve": CURVE,
        "output": ["== Training ==", "", *(f"line {number} <&>" for number in range(20))],
    },
}


def words_of(svg):
    """The text of an SVG."""
    return " ".join(" ".join(ElementTree.fromstring(svg).itertext()).split())


@pytest.fixture(scope="module")
def drawn():
    """{(name, theme): SVG} of all pictures whose runs are recorded."""
    return {(name, theme.name): draw(name, theme) for name in DRAWN for theme in THEMES}


@pytest.fixture
def recorded(monkeypatch):
    """A function that lets the pictures find these recordings in place of the real ones."""

    def put(recordings):
        monkeypatch.setattr(recordings_module, "read_recordings", lambda: recordings)

    return put


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_the_committed_picture_is_what_the_command_draws(name, theme, drawn):
    path = FOLDER / f"{name}_{theme.name}.svg"
    assert path.read_text() == drawn[name, theme.name], f"python evidence/draw.py {name}"


def test_no_other_pictures_are_committed():
    names = {f"{name}_{theme.name}.svg" for name in DRAWN for theme in THEMES}
    assert {path.name for path in FOLDER.glob("*.svg")} == names


def test_the_command_offers_every_picture():
    done = subprocess.run([*COMMAND, "--list"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(PICTURES)


@pytest.mark.parametrize("name", [name for name in DRAWN if name != "memory"])
def test_a_picture_drawn_again_is_equal(name, drawn):
    assert draw(name, LIGHT) == drawn[name, "light"]


@pytest.mark.parametrize("name", DRAWN)
def test_both_themes_say_the_same_in_other_colors(name, drawn):
    light = drawn[name, "light"]
    dark = drawn[name, "dark"]
    assert words_of(light) == words_of(dark)
    assert light != dark
    assert LIGHT.text in light
    assert DARK.text in dark


@pytest.mark.parametrize("name", RECORDED)
def test_a_picture_whose_runs_are_not_recorded_names_the_command(name, recorded):
    recorded({})
    with pytest.raises(NotRecordedError, match=f"record_curves.py {RECORDED[name]}"):
        draw(name, LIGHT)


def test_the_largest_distance_between_curves_is_in_the_title(recorded):
    recorded(RECORDINGS)
    assert "differ by at most 5.0e-01 nats" in words_of(draw("parity", LIGHT))


@pytest.mark.parametrize(
    ("unequal", "words"), [(0, "continues bit for bit"), (3, "differs in 3 steps or tensors")]
)
def test_a_resumed_run_is_called_equal_only_if_it_is(unequal, words, recorded):
    recorded({"resume": RECORDINGS["resume"] | {"unequal": unequal}})
    assert words in words_of(draw("resume", LIGHT))
    assert "SIGKILL after step 3" in words_of(draw("resume", LIGHT))


def test_the_score_before_and_after_is_in_the_title(recorded):
    recorded(RECORDINGS)
    assert "from 0% to 75%" in words_of(draw("quickstart_curve", LIGHT))


def test_a_long_section_of_a_terminal_has_its_first_and_last_lines(recorded):
    recorded(RECORDINGS)
    words = words_of(draw("quickstart_terminal", LIGHT))
    assert "line 0 <&>" in words
    assert "line 19 <&>" in words
    assert "line 10 <&>" not in words
    assert terminal.CUT in words


def test_a_terminal_shows_the_last_state_of_a_progress_bar():
    output = "\x1b[1mbold\x1b[0m\n10%\r100%\r\nin /x/out/run\n"
    lines = real_runs.printed_lines(output, Path("/x/out"))
    assert lines == ["bold", "100%", "in runs/quickstart/run", ""]


def test_a_terminal_shows_a_progress_bar_once_even_if_it_was_drawn_on_several_lines():
    output = "text\nWriting:   0%|  | 0/1\nWriting: 100%|##| 1/1\nLoading: 100%|##| 1/1"
    lines = real_runs.printed_lines(output, Path("/x/out"))
    assert lines == ["text", "Writing: 100%|##| 1/1", "Loading: 100%|##| 1/1"]


def test_a_recording_leaves_the_others_in_the_file(tmp_path):
    path = tmp_path / "curves.json"
    for name, number in (("resume", 1), ("parity", 2), ("resume", 3)):
        write_recording(path, name, {"number": number})
    found = read_recordings(path)
    assert list(found) == ["parity", "resume"]
    assert [found[name]["number"] for name in found] == [2, 3]


def test_what_was_not_measured_is_said(drawn):
    for name in {"memory", "agreement", "parity", "resume", "speed"}.intersection(DRAWN):
        assert "ot yet measured" in words_of(drawn[name, "light"])


def test_the_planned_parts_of_a_bar_add_up_to_the_plan():
    device = {"parameters": 2**30, "logits": 2**30, "optimizer": 2**29, "constants": 0}
    peak = memory.peak_of(device)
    assert peak["parameters"] == 1
    assert peak["activations and buffers"] == 1
    assert sum(peak.values()) == 2.5


def test_every_yaml_is_in_the_picture_of_memory(drawn):
    words = words_of(drawn["memory", "light"])
    shipped = {path.name for path in (REPO / "accelerate_configs").glob("*.yaml")}
    # The planner does not know what the ranks of a pipeline hold, and ranks that share experts
    others = ["pp", *mesh_configs(), *expert_configs()]
    shipped -= {f"{name}.yaml" for name in others}
    assert {name for name in shipped if name not in words} == set()


def test_a_part_that_the_picture_does_not_know_is_an_error():
    with pytest.raises(KeyError, match="something new"):
        memory.peak_of({"something new": 1})


def test_a_plan_as_large_as_the_card_fits():
    peak = memory.peak_of({"parameters": 2**30})
    assert memory.fits(peak, 1.0)
    assert not memory.fits(peak, 0.99)


def test_the_figure_at_a_bar_is_that_of_the_results(drawn):
    cell = cell_of(speed.CELL)
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
