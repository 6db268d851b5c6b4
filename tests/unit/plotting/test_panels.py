# SPDX-License-Identifier: Apache-2.0
"""A picture has the panels that runs have recorded, and a line for each thing that is missing."""

import dataclasses

from plotting.panels import OF_SEVERAL_RUNS, choose_panels, loss_title
from recorded_runs import recorded

EVALUATION = {"step": 2, "eval_loss": 3.0, "eval_perplexity": 20.0, "eval_exact_match": 0.5}


def chosen(names, *runs):
    panels, lines = choose_panels(names, runs)
    return [panel.name for panel in panels], lines


def test_each_metric_of_an_evaluation_has_a_panel_and_the_loss_is_not_drawn_twice():
    run = recorded(evaluations=[EVALUATION | {"eval_f1": 0.2}])
    assert chosen(["eval"], run) == (["eval_exact_match", "eval_f1"], [])


def test_several_runs_have_all_panels_that_any_of_them_has_recorded():
    first = recorded([1.0] * 9, "x/a", [EVALUATION])
    names, lines = chosen(OF_SEVERAL_RUNS, first, recorded([1.0] * 9, "x/b"))
    assert names == ["loss", "eval_exact_match", "tokens_per_second", "memory", "learning_rate"]
    assert lines == ["panel eval_exact_match: not recorded by b"]


def test_what_no_run_has_recorded_is_a_line_instead_of_an_empty_panel():
    run = recorded()
    steps = [{"step": line["step"], "loss": line["loss"]} for line in run.steps]
    names, lines = chosen(OF_SEVERAL_RUNS, dataclasses.replace(run, steps=steps))
    assert names == ["loss"]
    assert lines == [
        "no panel eval: no run has evaluations with a metric besides the loss",
        "no panel tokens_per_second: no run has two logged steps with elapsed_seconds and without "
        "an evaluation between",
        "no panel memory: no run has peak_memory_gib in its metrics.jsonl",
        "no panel learning_rate: no run has learning_rate in its metrics.jsonl",
    ]


def test_any_metric_can_be_a_panel():
    run = recorded(evaluations=[EVALUATION])
    run.steps[0]["grad_norm"] = 1.5
    (panel,), lines = choose_panels(["grad_norm"], [run])
    assert panel.curves[0].values == [1.5] and panel.title == "grad norm" and lines == []
    assert chosen(["eval_exact_match"], run)[0] == ["eval_exact_match"]


def test_images_are_not_drawn_as_tokens():
    run = recorded([1.0] * 9, "x/a")
    renamed = []
    for line in run.steps:
        kept = {name.replace("tokens_per", "images_per"): value for name, value in line.items()}
        kept["num_images_seen"] = kept.pop("num_input_tokens_seen")
        renamed.append(kept)
    images = dataclasses.replace(run, folder="x/b", steps=renamed)
    names, lines = chosen(["tokens_per_second"], run, images)
    assert names == ["tokens_per_second", "images_per_second"]
    assert lines == [
        "panel tokens_per_second: not recorded by b",
        "panel images_per_second: not recorded by a",
    ]


def test_a_panel_that_no_run_has_comes_with_the_names_of_those_that_exist():
    run = recorded([1.0] * 9, evaluations=[EVALUATION])
    names, lines = chosen(["nonsense"], run)
    assert names == []
    assert lines == [
        "no panel nonsense: no run has nonsense in its metrics.jsonl",
        "panels that these runs have: loss, eval, tokens_per_second, memory, learning_rate, "
        "num_input_tokens_seen, elapsed_seconds, eval_loss, eval_perplexity, eval_exact_match",
    ]
    for name in lines[1].partition(": ")[2].split(", "):
        assert choose_panels([name], [run])[0], name


def test_the_unit_of_the_loss_is_that_of_the_recipe():
    run = recorded()
    pairs = dataclasses.replace(run, facts={"loss_unit": "per pair"})
    earlier = dataclasses.replace(run, facts={})
    assert loss_title([run, run]) == "loss (nats per token)"
    assert loss_title([pairs]) == "loss (per pair)"
    for runs in ([earlier], [run, pairs], [run, earlier], [earlier, run]):
        assert loss_title(runs) == "loss"
