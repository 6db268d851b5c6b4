# SPDX-License-Identifier: Apache-2.0
"""Pretraining reads each token of a stream once, ends with the last, and names a bad document.

Its numbers, and runs that are stopped within a document, are in test_cells.py and test_chains.py.
"""

import json
import shutil
import sys

import golden
import net
from launching import REPO, run
from net import Cell

RECIPE = "mistral_pretrain"
STREAM = ("--streaming", "--shuffle_buffer_size", "16", "--max_length", "48")


def test_ranks_end_with_the_last_token_of_the_last_pass(net_tiny, tmp_path):
    tiny = net_tiny(RECIPE)
    flags = (*STREAM, "--max_steps", "-1", "--max_length", "80")
    found = []
    for cell in (
        Cell(recipe=RECIPE, flags=flags),
        Cell("ddp", recipe=RECIPE, flags=flags, ranks=2),
    ):
        done = net.launch(cell, tiny, tmp_path / cell.config).expect(0)
        assert "Read 2 whole passes and 0 documents" in done.output, done.output[-3000:]
        found.append(net.figures(done.folder))
    seen = [line["num_input_tokens_seen"] for line in found[0] if "loss" in line]
    assert seen[-1] - seen[-2] < 12 * 80  # The last step is a shorter one
    assert golden.differences(*found, 1e-5) == []


def test_a_bad_document_ends_a_run_with_a_checkpoint_from_which_it_goes_on(net_tiny, tmp_path):
    tiny = shutil.copytree(net_tiny(RECIPE), tmp_path / "tiny")
    rows = tiny / "data" / "train.jsonl"
    lines = rows.read_text().splitlines(keepends=True)
    lines[30] = '{"text": "Lamo is\n'
    rows.write_text("".join(lines))
    cell = Cell(recipe=RECIPE, flags=STREAM)
    done = net.launch(cell, tiny, tmp_path / "run").expect(65)
    error = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert len(error) == 1 and "line 31" in error[0] and "Traceback" not in done.output
    assert net.checkpoints(done.folder)
    assert json.loads((done.folder / "status.json").read_text())["exit_code"] == 65
    skip = ("--skip_bad_rows", "--allow_change", "skip_bad_rows")
    done = net.launch(cell, tiny, tmp_path / "run", *skip).expect(0)
    assert "Continuing from" in done.output
    script = REPO / "scripts" / "generate.py"
    words = ["--raw", "--prompt", "Lamo is a", "--max_new_tokens", 4]
    done = run(sys.executable, script, tmp_path / "run", *words)
    assert done.returncode == 0 and "Lamo is a ->" in done.output, done.output[-2000:]
