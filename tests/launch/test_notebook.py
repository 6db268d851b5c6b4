# SPDX-License-Identifier: Apache-2.0
"""examples/quickstart.ipynb runs from its first cell to its last on a machine without a GPU."""

import json
import os
import re

import pytest

from launching import INTERPRETER, REPO, read_metrics, run

NOTEBOOK = REPO / "examples" / "quickstart.ipynb"
# A notebook continues after a command that failed; here such a command ends the script
SHELL = """
import subprocess


def shell(command):
    print("$", command, flush=True)
    subprocess.run(["bash", "-c", command], check=True)

"""


def code_cells():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def as_script(cells):
    """The cells as plain Python: each line `!command {NAME}` becomes a call of the shell.

    Jupyter fills in names in braces like an f-string. No other magic is used.
    """
    text = "\n".join(cells)
    assert not re.search(r"^\s*%", text, re.MULTILINE)
    return SHELL + re.sub(r"^( *)!(.+)$", r"\1shell(f'''\2''')", text, flags=re.MULTILINE)


def test_the_notebook_holds_no_outputs():
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


def test_a_failed_command_would_be_noticed(tmp_path):
    path = tmp_path / "cells.py"
    path.write_text(as_script(["for name in ['false']:\n    !{name}"]))
    assert run(INTERPRETER, path).returncode != 0


@pytest.mark.cold("a notebook starts its commands by hand")
def test_the_cpu_path_checks_plans_trains_plots_and_generates(tmp_path):
    out = tmp_path / "out"
    text = as_script(code_cells())
    assert text.count('"runs/notebook"') == 1
    path = tmp_path / "cells.py"
    path.write_text(text.replace('"runs/notebook"', repr(str(out))))
    without_gpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = run(INTERPRETER, path, cwd=REPO / "examples", env=without_gpu)
    assert done.returncode == 0, done.output[-3000:]
    assert "[[" in done.output and "Dry run" in done.output and "peak per GPU" in done.output
    assert (out / "loss.png").is_file() and (out / "run" / "model.safetensors").is_file()
    steps, evaluations = read_metrics(out / "run")
    assert evaluations[-1]["eval_loss"] < steps[0]["loss"] / 2
    assert len(done.output.rpartition("$ python scripts/generate.py")[2].splitlines()) > 1
