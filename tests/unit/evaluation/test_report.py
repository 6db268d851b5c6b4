# SPDX-License-Identifier: Apache-2.0
"""The table, the files and the picture of an evaluation."""

import json
from types import SimpleNamespace

from evaluation import report
from evaluation.figures import Figure
from evaluation.report import Measured


def model(name, before=None, **values):
    """A model with a figure of the task "mine" for each value, whose rows are four."""
    figures = []
    for metric, value in values.items():
        residuals = [0.5, -0.5, 0.25, -0.25] if metric == "exact_match" else None
        stderr = 0.25 if residuals else None
        figures.append(Figure("mine", metric, value, stderr, 4, metric != "loss", residuals))
    source = SimpleNamespace(base=None, name=None)
    identity = {"name": name, "before": before}
    contestant = SimpleNamespace(
        name=name, before=before, source=source, to_json=lambda: dict(identity)
    )
    return Measured(contestant, figures, {"mine": {"num_fewshot": 0}}, 1.5)


BASE = model("base", exact_match=0.25, loss=2.0)
RUN = model("run", "base", exact_match=0.75, loss=1.5)


def cells_of(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_table_has_a_line_for_each_metric_and_what_training_changed():
    header, _, match, loss = cells_of(report.make_table([BASE, RUN]))
    assert header == ["task", "metric", "better", "rows", "base", "run", "difference from base"]
    # Both have the same residuals, so their difference has none
    assert match[4:] == ["0.2500 ± 0.2500", "0.7500 ± 0.2500", "+0.5000 ± 0.0000"]
    assert loss == ["mine", "loss", "lower", "4", "2.0000", "1.5000", "-0.5000"]


def test_runs_are_compared_with_their_own_base():
    other = model("other", exact_match=0.5)
    second = model("second", "other", exact_match=1.0)
    models = [BASE, RUN, other, second]
    compared = [report.compared_with(models, place) for place in range(4)]
    assert compared == [None, BASE, None, other]


def test_results_have_what_tells_one_evaluation_from_another(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["scripts/evaluate.py", "runs/my run"])
    report.write_results(tmp_path, [BASE, RUN], {"seed": 7}, number=2)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["complete"] and results["settings"] == {"seed": 7}
    assert results["command"] == "python scripts/evaluate.py 'runs/my run'"
    assert {"lm-eval", "torch", "accelerate-recipes", "python"} <= results["versions"].keys()
    task = results["models"][1]["tasks"]["mine"]
    assert task["num_fewshot"] == 0 and task["rows"] == 4
    difference = task["metrics"]["loss"]["difference"]
    assert difference == {"from": "base", "value": -0.5, "stderr": None}


# ---- The picture ----
