# SPDX-License-Identifier: Apache-2.0
"""Values of metrics, their errors, and the error of a difference between two models."""

import math
import statistics

import pytest

from evaluation.figures import Figure, error_of, metrics_of, read_figures, residuals_of

RIGHT = [1, 0, 1, 1, 0, 1]
BEFORE = [1, 0, 0, 0, 0, 1]


def results_of(values, metric="exact_match", filter_name="none"):
    """What lm-eval's evaluate returns for a task with one metric."""
    mean = sum(values) / len(values)
    metrics = {"alias": "mine", f"{metric},{filter_name}": mean, "sample_len": len(values)}
    metrics[f"{metric}_stderr,{filter_name}"] = "N/A"
    rows = [{"filter": filter_name, metric: value} for value in values]
    return {
        "results": {"mine": metrics},
        "higher_is_better": {"mine": {metric: True}},
        "n-samples": {"mine": {"effective": len(values)}},
        "samples": {"mine": rows},
    }


def figure_of(values):
    (figure,) = read_figures(results_of(values))
    return figure


def test_the_error_of_a_mean_is_that_of_statistics():
    figure = figure_of(RIGHT)
    assert figure.value == pytest.approx(4 / 6) and figure.num_rows == 6
    assert figure.stderr == pytest.approx(statistics.stdev(RIGHT) / math.sqrt(6))


def test_the_error_of_a_difference_is_that_of_the_pairs():
    gap, error = figure_of(RIGHT).difference_from(figure_of(BEFORE))
    pairs = [after - before for after, before in zip(RIGHT, BEFORE, strict=True)]
    assert gap == pytest.approx(statistics.mean(pairs))
    assert error == pytest.approx(statistics.stdev(pairs) / math.sqrt(6))
    # It would be larger if the rows were independent
    assert error < math.hypot(figure_of(RIGHT).stderr, figure_of(BEFORE).stderr)


def test_a_difference_has_no_error_where_the_rows_are_not_the_same():
    gap, error = figure_of(RIGHT).difference_from(figure_of(BEFORE[:4]))
    assert gap == pytest.approx(4 / 6 - 1 / 4) and error is None


@pytest.mark.parametrize("metric", ["loss", "perplexity"])
def test_rows_of_a_loss_count_by_their_tokens(metric):
    sums = [(6.0, 3), (1.0, 4), (9.0, 2), (2.5, 5), (4.0, 4)]
    total, number = sum(a for a, _ in sums), sum(b for _, b in sums)

    def value_of(total, number):
        mean = total / number
        return mean if metric == "loss" else math.exp(mean)

    residuals = residuals_of(metric, value_of(total, number), sums)
    # Each residual is the slope by which the value follows the weight of its row
    small = 1e-6
    for residual, (loss, tokens) in zip(residuals, sums, strict=True):
        heavier = value_of(total + small * loss, number + small * tokens)
        slope = (heavier - value_of(total, number)) / small
        assert residual == pytest.approx(len(sums) * slope, rel=1e-4)


def test_a_value_that_is_no_mean_of_its_rows_has_no_residuals():
    assert residuals_of("f1", 0.9, RIGHT) is None
    assert residuals_of("f1", 0.9, ["a", "b"]) is None
    assert residuals_of("f1", 0.9, []) is None


def test_one_row_has_no_error():
    assert error_of([0.0]) is None


def test_names_errors_and_counts_are_no_metrics():
    metrics = {"alias": "a", "name": "a", "sample_len": 3, "acc,none": 1, "acc_stderr,none": 0.1}
    assert list(metrics_of(metrics)) == [("acc", "none", 1.0)]


def test_a_filter_is_part_of_the_name():
    (figure,) = read_figures(results_of(RIGHT, filter_name="strict-match"))
    assert figure.metric == "exact_match (strict-match)" and figure.residuals is not None


def test_lm_evals_own_error_is_kept():
    results = results_of(RIGHT)
    results["results"]["mine"]["exact_match_stderr,none"] = 0.25
    (figure,) = read_figures(results)
    assert figure.stderr == 0.25


def test_a_group_has_no_rows():
    results = results_of(RIGHT)
    del results["samples"]["mine"], results["n-samples"]["mine"]
    (figure,) = read_figures(results)
    assert figure == Figure("mine", "exact_match", 4 / 6, None, None, True)
