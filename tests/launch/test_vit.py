# SPDX-License-Identifier: Apache-2.0
"""recipes/vit.py names an image that breaks in the middle of training, and has a checkpoint then.

Its numbers are in test_cells.py, an image that is seen to be broken at the start in
test_refusals.py; evidence/test_quickstarts.py holds that it learns.
"""

import json
import shutil

import net
from net import Cell

WORKER = ("--dataloader_num_workers", "1", "--save_steps", "2")


def test_an_image_that_breaks_in_a_loader_is_named_and_a_checkpoint_is_there(net_tiny, tmp_path):
    tiny = shutil.copytree(net_tiny("vit"), tmp_path / "tiny")
    bad = sorted((tiny / "data" / "train").glob("*/*"))[8]  # The last of the first epoch
    content = bad.read_bytes()
    # Head and end are sound
    bad.write_bytes(content[:100] + bytes(len(content) - 112) + content[-12:])
    done = net.launch(Cell(recipe="vit", flags=WORKER), tiny, tmp_path / "run").expect(1)
    assert str(bad) in done.output
    assert "checkpoint-2" in net.checkpoints(done.folder)
    status = json.loads((done.folder / "status.json").read_text())
    assert status["state"] == "failed" and str(bad) in status["why"]
