# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests: tiny models and runs that are made once a test run."""

import gc
import json
import os
import signal
import sys
from functools import partial
from getpass import getuser
from importlib.metadata import version
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace

import pytest

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / room) for room in ("recipes", "scripts", "evidence", "tests")]
# The interpreter's own programs (accelerate, ninja) without an activated environment, and no hub
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
# One thread a process: several processes with two spinning threads each take turns on two cores, 50
# times slower
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
# The kernels that every CPU has, since golden figures are compared across machines: int8 and bf16
# differ by up to 1e-3 between AVX2 and AVX-512
os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
os.environ |= {"MKL_CBWR": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
# torch finds compiled graphs by all but the width of these kernels: with the graphs that a run
# outside tests left, a run gave NaN or crashed (torch 2.13)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{gettempdir()}/torchinductor_{getuser()}_avx2"
# What a shell starts in the background ignores Ctrl-C, and so would all that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all is imported: looking for garbage would take a fifth of that time
import jobs  # noqa: E402
import net  # noqa: E402
import run_once  # noqa: E402
from golden import Golden  # noqa: E402

shared, once = run_once.shared, run_once.once


@pytest.fixture(scope="session")
def tiny_of(once):
    """A function from a recipe's name to the folder of its tiny model and few rows.

    The folder has model/, data/train.jsonl and data/test.jsonl (tests/jobs.py).
    """
    return lambda recipe: once(f"tiny_{recipe}", partial(net.make, recipe, words=jobs.wide(recipe)))


@pytest.fixture(scope="session")
def net_tiny(once):
    """A function from a recipe's name to the tiny model and rows of the golden runs (net.py).

    Further words, those of Cell.shape, make a model of another shape.
    """

    def folder_of(recipe, *shape):
        name = "_".join(["net", recipe, *shape]).replace("--", "")
        return once(name, partial(net.make_tiny, recipe, shape))

    return folder_of


@pytest.fixture(scope="session")
def golden(request):
    """Recorded figures to hold others against (golden.py)."""
    return Golden(request.config.getoption("record"))


@pytest.fixture(scope="session")
def tiny(tiny_of):
    """The folder of the tiny language model that recipes/llama.py trains."""
    return tiny_of("llama")


@pytest.fixture
def in_process(monkeypatch, capsys):
    """A function that runs a command of scripts/ in this process, and returns how it ended."""

    def call(command, *words):
        monkeypatch.setattr(sys, "argv", [f"{command.__name__}.py", *map(str, words)])
        try:
            code = command.main() or 0
        except SystemExit as end:
            code = end.code or 0
        said = capsys.readouterr()
        return SimpleNamespace(code=code, out=said.out, err=said.err)

    return call


def pytest_addoption(parser):
    parser.addoption("--record", action="store_true", help="write golden rows (tests/golden.py)")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "workaround(name): shows the harm without a workaround (tests/harm.py)"
    )


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_report_header():
    names = "torch accelerate transformers peft bitsandbytes deepspeed datasets".split()
    installed = {name: version(name) for name in names}
    return "libraries: " + json.dumps(installed)
