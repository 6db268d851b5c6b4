# SPDX-License-Identifier: Apache-2.0
"""What the tests of workarounds, run by pytest in a process of its own, say of each workaround."""

import shutil

import pytest

from launching import REPO
from proof.workarounds import Row, check, find_tests

TESTS = """
import pytest
from harm import shows_harm_without

@shows_harm_without("cures")
def test_cures(cured):
    assert True

@pytest.mark.parametrize("stage", [2, 3])
@shows_harm_without("is_needless")
def test_library_is_fixed(stage, cured):
    assert cured

@shows_harm_without("is_broken")
def test_harm_stays(cured):
    assert not cured

@shows_harm_without("needs_a_gpu")
def test_on_a_gpu(cured):
    pytest.skip("no GPU")
"""


def row(name, tests):
    return Row(name, "Purpose.", "https://...", "torch 2.13", "torch 2.13.0", tests)


@pytest.fixture
def project(tmp_path):
    """A folder with tests of workarounds."""
    (tmp_path / "tests").mkdir()
    shutil.copy(REPO / "tests" / "harm.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_them.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = tests\n")
    return tmp_path


def test_verdicts_are_those_of_the_tests(project):
    rows = [row(name, tests) for name, tests in find_tests(project).items()]
    check(rows, project)
    assert {each.name: each.verdict for each in rows} == {
        "cures": "needed",
        "is_needless": "fixed",
        "is_broken": "not cured",
        "needs_a_gpu": "not tested",
    }


def test_tests_that_do_not_run_give_no_verdict(project):
    with pytest.raises(RuntimeError, match="pytest did not run the tests"):
        check([row("cures", ["tests/test_them.py::test_that_is_gone"])], project)
