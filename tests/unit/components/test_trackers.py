# SPDX-License-Identifier: Apache-2.0
"""The name of a run arrives at each tracker under the word that the tracker has for it."""

import inspect
import typing
from types import SimpleNamespace

import pytest
from accelerate import tracking
from accelerate.utils import LoggerType

from components.arguments import Tracker
from components.trackers import (
    NAME_OF_RUN,
    NAMED_AS_PROJECT,
    find_missing_tracker,
    log_table,
    markdown_table,
    start_trackers,
)
from example_arguments import language_model_arguments


def started(*flags, trackers=(), resumed=False):
    """What accelerate's init_trackers is called with, under these flags."""
    calls = []
    accelerator = SimpleNamespace(
        init_trackers=lambda *given: calls.append(given), is_main_process=True, trackers=trackers
    )
    start_trackers(accelerator, language_model_arguments(*flags), "llama", resumed)
    [(project, arguments, settings)] = calls
    return project, arguments, settings


def test_all_trackers_that_accelerate_knows_may_be_chosen():
    known = {tracker.value for tracker in LoggerType}
    assert set(typing.get_args(Tracker)) == known | {"none"}


@pytest.mark.parametrize("name", sorted(NAME_OF_RUN))
def test_a_tracker_is_told_the_name_in_its_own_words(name):
    project, arguments, settings = started("--report_to", name, "--run_name", "first")
    assert project == "llama" and arguments["run_name"] == "first"
    assert settings[name][NAME_OF_RUN[name]] == "first"


@pytest.mark.parametrize("name", NAMED_AS_PROJECT)
def test_where_accelerate_names_the_run_as_the_project_the_project_has_its_name(name):
    kind = tracking.LOGGER_TYPE_TO_CLASS[name]
    assert "run_name" in inspect.signature(kind.__init__).parameters
    assert started("--report_to", name, "--run_name", "first")[0] == "first"


def test_comet_is_told_after_its_start():
    names = []
    comet = SimpleNamespace(name="comet_ml", tracker=SimpleNamespace(set_name=names.append))
    started("--report_to", "comet_ml", "--run_name", "first", trackers=[comet])
    assert names == ["first"]


def test_without_a_name_the_trackers_choose():
    project, _, settings = started("--report_to", "wandb")
    assert (project, settings) == ("llama", {})


@pytest.mark.parametrize("tracker", ["trackio", "all"])
def test_trackio_continues_a_resumed_run_under_its_name(tracker):
    flags = ["--report_to", tracker, "--output_dir", "runs/a"]
    assert started(*flags)[2]["trackio"] == {"name": "runs/a", "resume": "never"}
    assert started(*flags, resumed=True)[2]["trackio"] == {"name": "runs/a", "resume": "allow"}
    named = started(*flags, "--run_name", "first", resumed=True)[2]["trackio"]
    assert named == {"name": "first", "resume": "allow"}


@pytest.mark.parametrize(
    ("installed", "name", "says"),
    [
        (["tensorboard"], "none", None),
        (["tensorboard"], "tensorboard", None),
        (["tensorboard"], "all", None),
        ([], "all", "no tracker is installed: pip install tensorboard"),
        (["tensorboard"], "wandb", "pip install wandb"),
        ([], "comet_ml", "pip install comet-ml"),
        (["tensorboard"], "trackio", "pip install trackio"),
    ],
)
def test_a_tracker_that_is_not_installed_is_told_with_its_package(
    installed, name, says, monkeypatch
):
    available = [LoggerType(tracker) for tracker in installed]
    monkeypatch.setattr(tracking, "_available_trackers", available)
    found = list(find_missing_tracker(language_model_arguments("--report_to", name)))
    assert len(found) == (says is not None)
    assert all(f"--report_to {name}" in line and says in line for line in found)


ROWS = [{"prompt": "a|b", "answer": "1\n2"}, {"prompt": "c", "answer": ""}]


class TestTable:
    def test_tensorboard_shows_it_as_text(self):
        texts = []
        writer = SimpleNamespace(
            add_text=lambda *given, **named: texts.append((*given, named)), flush=lambda: None
        )
        board = SimpleNamespace(name="tensorboard", tracker=writer)
        log_table(SimpleNamespace(trackers=[board]), "predictions", ROWS, 7)
        [(name, text, named)] = texts
        assert name == "predictions" and named == {"global_step": 7}
        assert text.splitlines()[2:] == ["| a\\|b | 1<br>2 |", "| c |  |"]

    def test_trackers_with_tables_get_columns_and_rows(self):
        tables = []
        wandb = SimpleNamespace(
            name="wandb", log_table=lambda *given, **named: tables.append((given, named))
        )
        log_table(SimpleNamespace(trackers=[wandb]), "predictions", ROWS, 7)
        data = [["a|b", "1\n2"], ["c", ""]]
        assert tables == [
            (("predictions",), {"columns": ["prompt", "answer"], "data": data, "step": 7})
        ]

    @pytest.mark.parametrize("name", ["wandb", "clearml"])
    def test_accelerate_has_this_function_for_them(self, name):
        kind = tracking.LOGGER_TYPE_TO_CLASS[name]
        assert {"table_name", "columns", "data", "step"} <= set(
            inspect.signature(kind.log_table).parameters
        )

    def test_the_others_get_nothing(self):
        log_table(SimpleNamespace(trackers=[SimpleNamespace(name="aim")]), "predictions", ROWS, 7)

    def test_its_head_names_the_columns(self):
        assert markdown_table(["a", "b"], []).splitlines() == ["| a | b |", "| --- | --- |"]
