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
    start_trackers,
)
from example_arguments import language_model_arguments


def started(*flags, trackers=()):
    """What accelerate's init_trackers is called with, under these flags."""
    calls = []
    accelerator = SimpleNamespace(
        init_trackers=lambda *given: calls.append(given), is_main_process=True, trackers=trackers
    )
    start_trackers(accelerator, language_model_arguments(*flags), "llama")
    [(project, arguments, settings)] = calls
    return project, arguments, settings


def test_all_trackers_that_accelerate_knows_may_be_chosen():
    known = {tracker.value for tracker in LoggerType}
    assert set(typing.get_args(Tracker)) == known | {"none"}


@pytest.mark.parametrize("name", sorted(NAME_OF_RUN))
def test_a_tracker_is_told_the_name_in_its_own_words(name):
    project, arguments, settings = started("--report_to", name, "--run_name", "first")
    assert project == "llama" and arguments["run_name"] == "first"
    assert settings[name] == {NAME_OF_RUN[name]: "first"}


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


@pytest.mark.parametrize(
    ("installed", "name", "says"),
    [
        (["tensorboard"], "none", None),
        (["tensorboard"], "tensorboard", None),
        (["tensorboard"], "all", None),
        ([], "all", "no tracker is installed: pip install tensorboard"),
        (["tensorboard"], "wandb", "pip install wandb"),
        ([], "comet_ml", "pip install comet-ml"),
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
