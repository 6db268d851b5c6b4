# SPDX-License-Identifier: Apache-2.0
"""Launches of these tests start warm: from processes that have imported the libraries before.

A test that is marked as cold, with the reason, starts them as a user does, and COLD=1 does so for
all (tests/warm): what only fails warm is an error of its own.
"""

import os
import shutil
import sys
import tempfile

import pytest

from launching import INTERPRETER
from warm import start as start_warm

# The variable with the program that starts Python warm: from the process that was started by hand
# to its workers
WARM = "WARM_PYTHON"


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "cold(reason): launch with the interpreter itself, without tests/warm"
    )
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    folder = tempfile.mkdtemp(prefix="tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder))
    # DeepSpeed would wait for ever for the lock of a build that somebody killed
    os.environ["TORCH_EXTENSIONS_DIR"] = f"{folder}/torch_extensions"
    if os.environ.get("COLD"):
        return
    try:
        os.environ[WARM] = str(start_warm(folder, os.getpid()))
    except OSError as error:
        config.issue_config_time_warning(
            pytest.PytestWarning(f"all launches start cold: {error}"), 2
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    is_warm = WARM in os.environ and not item.get_closest_marker("cold")
    sys.executable = os.environ[WARM] if is_warm else INTERPRETER
    try:
        return (yield)
    finally:
        sys.executable = INTERPRETER
