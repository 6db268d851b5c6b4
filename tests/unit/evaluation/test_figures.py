# SPDX-License-Identifier: Apache-2.0
"""Values of metrics, their errors, and the error of a difference between two models."""

import math
import statistics

import pytest

from evaluation.figures import read_figures, residuals_of

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
