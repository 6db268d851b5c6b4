# SPDX-License-Identifier: Apache-2.0
"""Rows with columns of any names are held out, mixed and dealt to ranks.

tests/golden/rows.json has what is read of each kind of file.
"""

import json

import golden
import net
from launching import script
from net import Cell

SHORT = ("--max_steps", "4", "--eval_steps", "2", "--save_steps", "2")


def own_rows(tiny, folder):
    """Rows of sums in the place of a tiny model's own, in columns of other names."""
    lines = []
    for number in range(100):
        lines.append(json.dumps({"frage": f"{number} + 1?", "antwort": str(number + 1)}))
    (folder / "many.jsonl").write_text("\n".join(lines[:60]))
    (folder / "few.jsonl").write_text("\n".join(lines[60:80]))
    words = ["--model_name_or_path", tiny / "model", "--dataset_name"]
    words += [folder / "many.jsonl", folder / "few.jsonl", "--dataset_weights", "1", "1"]
    return [*words, "--columns", "prompt=frage", "completion=antwort", "--eval_split", "5"]


def test_ranks_hold_out_and_mix_the_rows_that_one_process_does(net_tiny, tmp_path, monkeypatch):
    tiny = net_tiny("llama")
    monkeypatch.setattr(net, "data_of", lambda tiny: own_rows(tiny, tmp_path))
    runs = []
    for cell in (Cell(flags=SHORT), Cell("ddp", ranks=2, flags=SHORT)):
        # Few rows in batches of two: the last one has a rank of its own, and a single row
        batches = ("--per_device_eval_batch_size", "2")
        runs.append(net.launch(cell, tiny, tmp_path / cell.config, *batches).expect(0))
    assert "mixed1:1:" in "".join(runs[0].output.split())
    records = [json.loads((done.folder / "run.json").read_text()) for done in runs]
    assert records[0]["data"] == records[1]["data"]  # A hash of the rows that are trained on
    assert golden.differences(*(net.figures(done.folder) for done in runs), 1e-5) == []
    # It continues only as it began, and its own programs read rows as it did
    swapped = ("--columns", "prompt=antwort", "completion=frage", "--dataset_weights", "3", "1")
    refused = net.launch(Cell(flags=SHORT), tiny, runs[0].folder, *swapped).expect(64)
    assert "columns" in refused.output and "dataset_weights" in refused.output
    words = ["--file", tmp_path / "few.jsonl", "--limit", 3, "--max_new_tokens", 4]
    assert "/3)" in script("generate", runs[0].folder, *words, code=0).output
