# SPDX-License-Identifier: Apache-2.0
"""Trackers are told the name of a run, and one that is not installed is named."""

from types import SimpleNamespace

import pytest
from accelerate.utils import LoggerType

from core.metrics import find_missing_tracker


@pytest.mark.parametrize(
    ("name", "word"),
    [("none", ""), ("tensorboard", ""), ("all", ""), ("wandb", "wandb"), ("comet_ml", "comet_ml")],
)
def test_a_tracker_that_is_not_installed(name, word, monkeypatch):
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType.TENSORBOARD])
    found = list(find_missing_tracker(SimpleNamespace(report_to=name)))
    assert len(found) == bool(word) and all(word in line for line in found)
