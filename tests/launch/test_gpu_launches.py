# SPDX-License-Identifier: Apache-2.0
"""Commands that cells of the GPU proof start: within their time, and files of tests as a cell."""

import time

import pytest

from gpu import launches, masks
from gpu.cell import Setup

THREE = """
import pytest


def test_right():
    pass


def test_wrong():
    assert 1 == 2


def test_not_here():
    pytest.skip("no kernel")
"""
RIGHT = "def test_right():\n    pass\n"
NOT_HERE = "import pytest\n\n\ndef test_not_here():\n    pytest.skip('no kernel')\n"


@pytest.fixture
def setup(tmp_path):
    return Setup("cpu", True, tmp_path, tmp_path, time.monotonic() + 99)


def test_a_command_that_is_not_done_in_time_has_no_exit_code():
    done = launches.finish(["sleep", "60"], timeout=0.2)
    assert done.code is None
    assert done.failure == "no time left"


def test_a_cell_can_run_a_file_of_tests(setup, tmp_path):
    path = tmp_path / "test_three.py"
    path.write_text(THREE)
    outcome = masks.run_tests(setup, path)
    results = [row["result"].split(" ")[0] for row in outcome.rows]
    assert results == ["passed", "failure:", "skipped:"]
    assert "no kernel" in outcome.rows[2]["result"]
    assert outcome.ok is False


@pytest.mark.parametrize(("text", "ok"), [(RIGHT, True), (NOT_HERE, False)])
def test_tests_show_something_only_if_one_passes(text, ok, setup, tmp_path):
    path = tmp_path / "test_one.py"
    path.write_text(text)
    assert masks.run_tests(setup, path).ok is ok
