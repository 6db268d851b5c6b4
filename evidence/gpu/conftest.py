# SPDX-License-Identifier: Apache-2.0
"""Cells of a GPU: a test each, whose rows of a table become one row of results/gpu/.

    make evidence-gpu                                  # all of them: about an hour on one GPU
    pytest evidence/gpu -k "strategies or resume"      # those that prove the recipes right
    pytest evidence/gpu --dry -k "trains and one_process"    # a tiny form, on a CPU

Models are made on the device from configs, with random weights, and rows are generated: nothing is
downloaded. Without a GPU, or a package that a cell needs, it is skipped with the reason. Cells of
speed only measure: whether a bound holds is in their row.
"""

import subprocess
import time

import pytest

from gpu.runs import REPO, Cell, nvidia_smi


@pytest.fixture
def cell(request, record, tmp_path_factory, tmp_path):
    """The cell of a test, whose claim and rows are kept if the test passes."""
    on_gpu = not request.config.getoption("--dry")
    facts = {}
    if on_gpu:
        found = nvidia_smi("name,driver_version,memory.total")
        if not found:
            pytest.skip("nvidia-smi finds no GPU on this machine; --dry tries a CPU")
        name, driver, memory = found
        facts = {"device": name, "driver": driver, "memory_mib": float(memory)}
    models = tmp_path_factory.getbasetemp() / "models"
    found = Cell(on_gpu, facts, models, tmp_path)
    begun = time.monotonic()
    yield found
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=REPO)
    facts |= {"date": time.strftime("%Y-%m-%d"), "commit": commit.decode().strip()}
    facts["seconds"] = round(time.monotonic() - begun, 1)
    record(**found.claim, rows=found.rows, **facts)
