# SPDX-License-Identifier: Apache-2.0
"""The name of a run arrives at each tracker under the word that the tracker has for it."""

import inspect
from types import SimpleNamespace

import pytest
from accelerate import tracking

from components.trackers import (
    NAME_OF_RUN,
    NAMED_AS_PROJECT,
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
