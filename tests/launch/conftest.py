# SPDX-License-Identifier: Apache-2.0
"""Launches of these tests start warm: from processes that have imported the libraries before.

A test that is marked as cold, with the reason, starts them as a user does, and COLD=1 does so for
all (tests/warm): what only fails warm is an error of its own.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from launching import INTERPRETER, REPO
from ranks import free_port
from warm import start as start_warm

# The variable with the program that starts Python warm: from the process that was started by hand
# to its workers
WARM = "WARM_PYTHON"
STARTS = 120  # seconds in which a server starts; it takes 5 to 10 on two idle cores


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


# ---- A server ----
def wait_for(address, process, log):
    """Wait until a server answers at an address."""
    end = time.monotonic() + STARTS
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(URLError, OSError):
            urlopen(f"{address}/health", timeout=5).close()
            return
        time.sleep(0.2)
    raise TimeoutError(log.read_text()[-3000:])


@pytest.fixture(scope="session")
def url(tmp_path_factory):
    """The address of a `transformers serve` that loads whatever folder a question names."""
    log = tmp_path_factory.mktemp("served") / "log"
    address = f"http://127.0.0.1:{free_port()}"
    program = Path(INTERPRETER).with_name("transformers")
    command = [program, "serve", "--host", "127.0.0.1", "--port", address.rpartition(":")[2]]
    command += ["--device", "cpu", "--no-continuous-batching"]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, cwd=REPO)
        try:
            wait_for(address, process, log)
            yield f"{address}/v1"
        finally:
            process.terminate()
            process.wait(timeout=60)
