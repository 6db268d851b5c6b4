# SPDX-License-Identifier: Apache-2.0
"""Lines of steps that are done again are cut off, and trackers are told the name of a run."""

import inspect
import json
from types import SimpleNamespace

import pytest
from accelerate import tracking
from accelerate.utils import LoggerType

from core.metrics import cut_after, find_missing_tracker, start_trackers
from example_arguments import language_model_arguments

LINES = [
    {"step": 1, "epoch": 0.1},
    {"step": 2, "epoch": 0.2},
    {"step": 2, "eval_loss": 1.0},
    {"step": 3, "epoch": 0.3},
]


@pytest.mark.parametrize(
    ("step", "evaluated", "kept"), [(0, True, 0), (1, True, 1), (2, False, 2), (2, True, 3)]
)
def test_what_a_run_wrote_after_its_checkpoint_is_cut_off(step, evaluated, kept, tmp_path):
    texts = [json.dumps(line) + "\n" for line in LINES]
    (tmp_path / "metrics.jsonl").write_text("".join(texts) + '{"step": 4, "ep')
    cut_after(tmp_path / "metrics.jsonl", step, evaluated)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(texts[:kept])


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
