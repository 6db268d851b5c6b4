# SPDX-License-Identifier: Apache-2.0
"""The one harness of all that is measured: a measurement is a test, and `record` keeps its facts.

    pytest evidence                                      # the short form of each module
    pytest evidence/test_parity.py --all -n 2 -k fsdp2   # of one module, all that fits the words

Choosing, listing, limits, retries and jobs are pytest's own (-k, --collect-only, --timeout, --lf,
-n). A test that passed under --all has its facts as a row of results/MODULE.json (of a module of
gpu/: results/gpu/MODULE.json), in place of the row that it had; one that failed leaves the row as
it was.
"""

import json
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest
from filelock import FileLock

REPO = Path(__file__).resolve().parents[1]
EVIDENCE = REPO / "evidence"
sys.path[:0] = [str(REPO / room) for room in ("recipes", "scripts", "evidence", "tests")]
import run_once  # noqa: E402
import warm  # noqa: E402
from job import ENVIRONMENT  # noqa: E402

LIBRARIES = "torch transformers accelerate peft deepspeed bitsandbytes datasets trl".split()


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="every measurement, and keep its row")
    parser.addoption("--results", type=Path, default=REPO / "results", help="folder of the rows")
    parser.addoption(
        "--dry", action="store_true", help="tiny cells of a GPU on a CPU, without rows"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "whole: a measurement that only --all makes")


def pytest_collection_modifyitems(config, items):
    """Without --all, skip what is marked, and of a module with SHORT what has other parameters."""
    if config.getoption("--all"):
        return
    for item in items:
        short = getattr(item.module, "SHORT", ())
        is_other = short and hasattr(item, "callspec") and item.callspec.id not in short
        if is_other or item.get_closest_marker("whole"):
            item.add_marker(pytest.mark.skip(reason="only with --all"))


shared, once = run_once.shared, run_once.once


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory):
    """The program that takes the place of Python in a warm start (tests/warm)."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in ENVIRONMENT.items():
            patched.setenv(name, value)
        return str(warm.start(tmp_path_factory.mktemp("warm"), os.getpid()))


@pytest.fixture
def warm_starts(warm_python, monkeypatch):
    """Have launches start warm, where memory and the time of a start are not measured."""
    monkeypatch.setattr(sys, "executable", warm_python)


@pytest.fixture
def record(request):
    """A function that takes facts of this test, by name, into its row."""
    facts = {}
    yield facts.update
    is_small = request.config.getoption("--dry")
    if facts and request.config.getoption("--all") and not is_small and request.node.has_passed:
        versions = {library: version_of(library) for library in LIBRARIES}
        folder = request.config.getoption("--results") / request.path.parent.relative_to(EVIDENCE)
        name = request.path.stem.removeprefix("test_")
        keep_row(folder / f"{name}.json", request.node.name, facts | {"versions": versions})


def version_of(library):
    """The version of an installed library, or None."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def keep_row(path, name, facts):
    """Write a row into a file of rows by name, which several processes may do at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        rows = json.loads(path.read_text()) if path.exists() else {}
        rows[name] = facts
        lines = [f"{json.dumps(key)}: {json.dumps(rows[key])}" for key in sorted(rows)]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        item.has_passed = report.passed
    return report
