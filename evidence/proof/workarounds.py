# SPDX-License-Identifier: Apache-2.0
"""The workarounds of recipes/components/upstream.py, and the tests that show why each is there."""

import ast
import importlib.metadata
import inspect
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from components import upstream
from paths import ROOT
from proof.markdown import table

MARK = "shows_harm_without"  # the pytest mark of tests/harm.py

NEEDED = "needed"
PARTLY_FIXED = "partly fixed"  # one of its harms is gone
FIXED = "fixed"
NOT_CURED = "not cured"
NOT_TESTED = "not tested"  # this machine cannot show the harm


@dataclass
class Row:
    """What is known about a workaround.

    Attributes:
        purpose: the first sentence of its docstring.
        seen: the version in which the harm was seen.
        tests: those that show the harm, as arguments of pytest.
        verdict: that of the tests, if they were run.
    """

    name: str
    purpose: str
    link: str
    seen: str
    installed: str
    tests: list[str]
    verdict: str | None = None


@dataclass
class Outcomes:
    """Whether each case of one test passed, without the workaround and with it."""

    without: list[bool] = field(default_factory=list)
    with_it: list[bool] = field(default_factory=list)


# ---- The list ----
def list_workarounds(root: Path = ROOT) -> list[Row]:
    """Return what is known about each workaround, in the order of upstream.py.

    Args:
        root: the checkout whose tests are searched.
    """
    tests = find_tests(root)
    return [
        describe(name, function, tests.get(name, []))
        for name, function in upstream.workarounds().items()
    ]


def describe(name: str, function: Callable, tests: list[str]) -> Row:
    """Return what is known about one workaround."""
    known: upstream.Workaround = function.workaround  # type: ignore[attr-defined]
    library = known.seen.split()[0]
    return Row(
        name=name,
        purpose=first_sentence(inspect.getdoc(function) or ""),
        link=known.link,
        seen=known.seen,
        installed=f"{library} {importlib.metadata.version(library)}",
        tests=tests,
    )


def first_sentence(text: str) -> str:
    """Return the text up to the first period that ends a sentence, in one line."""
    sentence, *_ = " ".join(text.split()).split(". ")
    return sentence.removesuffix(".") + "."


def find_tests(root: Path) -> dict[str, list[str]]:
    """Return {workaround: tests that show its harm}, without importing the tests."""
    found: dict[str, list[str]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        text = path.read_text()
        if MARK not in text:
            continue
        for name, test in marked_tests(ast.parse(text)):
            found.setdefault(name, []).append(f"{path.relative_to(root)}::{test}")
    return found


def marked_tests(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (workaround, test) for each mark of a module."""
    for node in module.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for mark in node.decorator_list:
            match mark:
                case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str(workaround))]):
                    if name == MARK:
                        yield workaround, node.name


# ---- The check ----
def check(rows: Iterable[Row], root: Path = ROOT) -> None:
    """Run the tests of these workarounds, and set each verdict.

    Raises:
        RuntimeError: if pytest did not run them.
    """
    rows = list(rows)
    outcomes = run_tests([test for row in rows for test in row.tests], root)
    for row in rows:
        row.verdict = verdict_of([outcomes.get(test, Outcomes()) for test in row.tests])


def run_tests(tests: list[str], root: Path) -> dict[str, Outcomes]:
    """Run tests and return how their cases ended; a skipped case is left out."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *tests]
        done = subprocess.run(
            command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode not in (0, 1):  # all passed, or some failed
            raise RuntimeError(f"pytest did not run the tests:\n{done.stdout[-3000:]}")
        return read_report(report)


def read_report(report: Path) -> dict[str, Outcomes]:
    """Return {test: how its cases ended} of pytest's report."""
    found: dict[str, Outcomes] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        path = case.attrib["classname"].replace(".", "/")
        test, _, parameters = case.attrib["name"].partition("[")
        outcomes = found.setdefault(f"{path}.py::{test}", Outcomes())
        has_passed = case.find("failure") is None and case.find("error") is None
        if "without" in parameters.rstrip("]").split("-"):
            outcomes.without.append(has_passed)
        else:
            outcomes.with_it.append(has_passed)
    return found


def verdict_of(tests: list[Outcomes]) -> str:
    """Return the verdict of its tests on a workaround."""
    without = [passed for test in tests for passed in test.without]
    with_it = [passed for test in tests for passed in test.with_it]
    if not all(with_it):
        return NOT_CURED
    if not without:
        return NOT_TESTED
    if all(without):
        return NEEDED
    return PARTLY_FIXED if any(without) else FIXED


# ---- What is printed ----
def list_table(rows: Iterable[Row]) -> str:
    """Return the list as a table."""
    header = ["workaround", "what it is for", "link", "seen in", "installed", "test"]
    lines = [
        [row.name, row.purpose, row.link, row.seen, row.installed, short_list(row.tests)]
        for row in rows
    ]
    return table(header, lines)


def short_list(tests: list[str]) -> str:
    """Return the first test, and how many more there are."""
    if not tests:
        return "none"
    if len(tests) == 1:
        return tests[0]
    return f"{tests[0]} and {len(tests) - 1} more"


def verdict_table(rows: Iterable[Row]) -> str:
    """Return the verdicts as a table."""
    lines = [[row.name, row.seen, row.installed, row.verdict or ""] for row in rows]
    return table(["workaround", "seen in", "installed", "verdict"], lines)
