# SPDX-License-Identifier: Apache-2.0
"""examples/quickstart.ipynb runs from its first cell to its last on a machine without a GPU.

pytest evidence/test_notebook.py --all    # a minute on two idle cores
"""

import json
import os
import re
import sys

import pytest

from launching import REPO, read_metrics, run

NOTEBOOK = REPO / "examples" / "quickstart.ipynb"
# A notebook continues after a command that failed; here such a command ends the script
SHELL = r"\1subprocess.run(['bash', '-xc', f'''\2'''], check=True)"


def as_script(cells):
    """The code as plain Python: each line `!command {NAME}` becomes a call of the shell.

    Jupyter fills in names in braces like an f-string. No other magic is used.
    """
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert not re.search(r"^\s*%", text, re.MULTILINE)
    return "import subprocess\n" + re.sub(r"^( *)!(.+)$", SHELL, text, flags=re.MULTILINE)


@pytest.mark.whole
def test_the_cpu_path_checks_plans_trains_plots_and_generates(tmp_path):
    out = tmp_path / "out"
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    text = as_script(cells)
    assert text.count('"runs/notebook"') == 1
    path = tmp_path / "cells.py"
    path.write_text(text.replace('"runs/notebook"', repr(str(out))))
    without_gpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = run(sys.executable, "-u", path, cwd=REPO / "examples", env=without_gpu, code=0)
    assert "Dry run" in done.output and "peak per GPU" in done.output
    assert (out / "loss.png").is_file() and (out / "run" / "model.safetensors").is_file()
    steps, evaluations = read_metrics(out / "run")
    assert evaluations[-1]["eval_loss"] < steps[0]["loss"] / 2
    assert len(done.output.rpartition("+ python scripts/generate.py")[2].splitlines()) > 1
