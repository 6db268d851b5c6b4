# SPDX-License-Identifier: Apache-2.0
"""The table, the files and the picture of an evaluation."""

import json
from types import SimpleNamespace

import pytest

from evaluation import plot, report
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


def test_without_bases_models_are_compared_with_the_first():
    models = [BASE, model("second", exact_match=1.0)]
    assert [report.compared_with(models, place) for place in range(2)] == [None, BASE]


def test_a_metric_that_one_model_lacks_leaves_its_cells_empty():
    run = model("run", "base", exact_match=0.5)
    assert cells_of(report.make_table([BASE, run]))[3][4:] == ["2.0000", "", ""]


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


def test_results_say_that_models_are_missing(tmp_path):
    report.write_results(tmp_path, [BASE], {}, number=2)
    assert not json.loads((tmp_path / "results.json").read_text())["complete"]


def test_a_write_that_fails_keeps_the_results_before(tmp_path, refused):
    (tmp_path / "results.json").write_text("before")
    (tmp_path / "results.json.unfinished").mkdir()
    code, line = refused(report.write, tmp_path, "results.json", "after")
    assert code == 73 and str(tmp_path / "results.json") in line
    assert (tmp_path / "results.json").read_text() == "before"


@pytest.mark.parametrize(
    "in_the_way", ["out", "out/samples", "out/results.json/x", "out/results.png/x"]
)
def test_a_folder_that_cannot_be_written_is_refused(in_the_way, tmp_path, refused):
    path = tmp_path / in_the_way
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    code, line = refused(report.check_folder, tmp_path / "out")
    assert code == 73 and line.startswith(f"error: cannot write {tmp_path / 'out'}")


def test_a_folder_that_can_be_written_keeps_its_results(tmp_path):
    (tmp_path / "results.json").write_text("before")
    report.check_folder(tmp_path)
    assert (tmp_path / "results.json").read_text() == "before"
    assert not (tmp_path / "results.md").exists()


def test_samples_have_a_file_for_each_model_and_task(tmp_path):
    report.write_samples(tmp_path, "runs-a-b", {"mine": [{"answer": "é"}, {"answer": "c"}]})
    lines = (tmp_path / "samples" / "runs-a-b" / "mine.jsonl").read_text().splitlines()
    assert [json.loads(line)["answer"] for line in lines] == ["é", "c"]


# ---- The picture ----
def test_the_picture_has_a_panel_for_each_metric_and_a_bar_for_each_model():
    run = model("run", "base", exact_match=0.75, loss=1.5, perplexity=4.5)
    panels = plot.draw([BASE, run]).axes
    assert [panel.get_title(loc="left") for panel in panels] == [
        "exact_match (higher is better)",
        "loss (lower is better)",
    ]
    widths = [[bar.get_width() for bar in panel.patches] for panel in panels]
    assert widths == [[0.25, 0.75], [2.0, 1.5]]


def test_only_the_base_is_gray():
    gray, blue = plot.colors_of([BASE, RUN])
    assert gray == plot.BASE != blue
    assert plot.BASE not in plot.colors_of([RUN, model("other", exact_match=0.5)])


def test_an_axis_begins_at_0_even_if_all_values_are_0():
    (panel,) = plot.draw([model("run", exact_match=0.0)]).axes
    assert panel.get_xlim()[0] == 0


def test_a_negative_value_is_shown():
    (panel,) = plot.draw([model("run", mcc=-0.5)]).axes
    assert panel.get_xlim()[0] <= -0.5


def test_a_picture_that_cannot_be_written_is_refused(tmp_path, refused):
    code, line = refused(plot.write_plot, tmp_path / "none" / "results.png", [BASE])
    assert code == 73 and "results.png" in line


def test_models_whose_names_differ_have_files_of_their_own():
    names = ["/runs/a b", "runs/a-b", "../runs/a/b", "other"]
    assert report.distinct_names(names) == ["runs-a-b", "runs-a-b-2", "runs-a-b-3", "other"]


def test_results_of_an_earlier_evaluation_are_not_in_a_new_folder(tmp_path):
    first = report.new_folder(tmp_path, "runs/a")
    assert first == tmp_path / "runs-a"
    report.write(first, report.RESULTS, "{}")
    assert report.new_folder(tmp_path, "runs/a") == tmp_path / "runs-a-2"
