# SPDX-License-Identifier: Apache-2.0
"""lm-eval gets Hugging Face's package evaluate, and no code of the hub."""

import subprocess
import sys

from launching import REPO

# The command's folder is first on the path, as Python puts it there
PROGRAM = """
from argparse import Namespace
from evaluation import harness
harness.prepare(Namespace(tasks="own.yaml", confirm_run_unsafe_code=False))
import evaluate
try:
    evaluate.load("squad_v2")
except (ConnectionError, FileNotFoundError):
    print(evaluate.__file__)
"""


def test_the_package_takes_the_place_of_the_command_and_fetches_no_metric():
    path = f"sys.path[:0] = [{str(REPO / 'scripts')!r}]"
    command = [sys.executable, "-c", f"import sys; {path}\n{PROGRAM}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "site-packages" in done.stdout
