# SPDX-License-Identifier: Apache-2.0
"""The cells of evidence/gpu_proof.py that prove the recipes right hold their bounds on this GPU.

Among them: every YAML in bf16, full and QLoRA; packed rows under each attention; bf16, fp16 and
TF32 against fp32; resume of each engine, precision and optimizer; quantized bases; signals; every
recipe. The cell of masks runs test_masks_on_gpu.py beside this file, so it is left out here.
"""

import pytest
import torch

from bench import machine
from gpu import runner
from gpu.catalog import PROVING_CELLS
from gpu.cell import MEASURED, OK, SKIPPED

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no GPU on this machine"
)
HERE = "masks.documents"
CHOSEN = [cell for cell in PROVING_CELLS if cell.name != HERE]


@pytest.fixture(scope="session")
def proof(shared_tmp):
    return runner.Proof("cuda", False, shared_tmp / "gpu_proof", machine.facts("cuda"))


@pytest.mark.parametrize("cell", CHOSEN, ids=lambda cell: cell.name)
def test_the_cell_holds_its_bound(cell, proof):
    record = runner.run_cell(cell, proof)
    if record["verdict"] == SKIPPED:
        pytest.skip(record["error"])
    assert record["verdict"] in (OK, MEASURED), (record["error"], record["rows"])
