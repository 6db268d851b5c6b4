# SPDX-License-Identifier: Apache-2.0
"""Trackers are told the name of a run, and one that is not installed is named."""

import inspect
from types import SimpleNamespace

import pytest
from accelerate import tracking
from accelerate.utils import LoggerType

from core.metrics import find_missing_tracker, start_trackers
from example_arguments import language_model_arguments


def started(*flags):
    """The project that accelerate's init_trackers is called with, under these flags."""
    calls = []
    accelerator = SimpleNamespace(init_trackers=lambda *given: calls.append(given))
    start_trackers(accelerator, language_model_arguments(*flags), is_resumed=False)
    [(project, _, _)] = calls
    return project


@pytest.mark.parametrize("name", ["tensorboard", "aim"])
def test_where_accelerate_names_the_run_as_the_project_the_project_has_its_name(name):
    kind = tracking.LOGGER_TYPE_TO_CLASS[name]
    assert "run_name" in inspect.signature(kind.__init__).parameters
    assert started("--report_to", name, "--run_name", "first") == "first"


@pytest.mark.parametrize(
    ("name", "word"),
    [("none", ""), ("tensorboard", ""), ("all", ""), ("wandb", "wandb"), ("comet_ml", "comet_ml")],
)
def test_a_tracker_that_is_not_installed(name, word, monkeypatch):
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType.TENSORBOARD])
    found = list(find_missing_tracker(SimpleNamespace(report_to=name)))
    assert len(found) == bool(word) and all(word in line for line in found)
