# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness as this repository uses it: found, quiet, and without code of the hub."""

import importlib
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from exits import Exit, stop
from paths import SCRIPTS

# Hugging Face's package, from which lm-eval and its tasks take metrics
METRICS = "evaluate"
# What would print several lines where one says what is wrong, such as each retry of the hub
LOGGERS = ("lm_eval", "huggingface_hub", "datasets")


def hide_progress() -> None:
    """Let lm-eval show no progress bars in a file, where they are thousands of lines.

    Call it before tqdm is imported, which reads the variable then.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")


def prepare(may_run_code: bool) -> None:
    """Import lm-eval, so that `import lm_eval` can be written from here on.

    Ends with 64 if it is not installed.

    Args:
        may_run_code: whether metrics that are code on the hub may be loaded.
    """
    try:
        package = import_metrics()
        importlib.import_module("lm_eval")
    except ModuleNotFoundError as error:
        fix = "pip install -r requirements-eval.txt"
        stop(Exit.USAGE, f"lm-eval is not installed (no module {error.name}): {fix}")
    if not may_run_code:
        vars(package)["load"] = refuse_code
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def import_metrics() -> ModuleType:
    """Return Hugging Face's package evaluate, which has the name of the command evaluate.py.

    Python puts the folder of a command first on its path, and lm-eval would get the command. So
    that folder is not on the path while the package is imported; every later import of the name
    finds it among the imported modules.
    """
    known = sys.modules.get(METRICS)
    if known is not None and Path(str(known.__file__)).parent == SCRIPTS:
        del sys.modules[METRICS]
    path = list(sys.path)
    sys.path[:] = [entry for entry in path if Path(entry).resolve() != SCRIPTS]
    try:
        return importlib.import_module(METRICS)
    finally:
        sys.path[:] = path


def refuse_code(name: str, *_: Any, **__: Any) -> NoReturn:
    """End with 64 in the place of loading a metric, since it is a program on the hub."""
    fix = "pass --confirm_run_unsafe_code if you trust it"
    stop(Exit.USAGE, f"the metric {name} is code on the hub, which would be run here; {fix}")
