# SPDX-License-Identifier: Apache-2.0
"""A picture is drawn of whatever was measured."""

import pytest

from bench.picture import draw
from measured_runs import cell_of, run_of


def shipped():
    runs = [run_of("floor", held_out_loss=2.0), run_of("ours", held_out_loss=2.0)]
    return cell_of(*runs, kind="shipped", name="shipped, medium")


def growth(quantity, smallest):
    runs = [run_of(str(smallest)), run_of(str(2 * smallest))]
    return cell_of(*runs, kind="growth", name=f"growth, {quantity}")


@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_picture_is_drawn_of_whatever_was_measured(number, tmp_path):
    cells = [shipped(), growth("length", 1), growth("batch", 2), growth("ranks", 3)]
    draw({"cells": cells[:number]}, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10_000
