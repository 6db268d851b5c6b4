# SPDX-License-Identifier: Apache-2.0
"""What flags do to files: rows of all kinds of files are the same, and checkpoints may be small.

Flags that change what is trained on have a cell in test_cells.py.
"""

import json

from datasets import Dataset

from launching import read_json, recipe
from net import data_of


def test_all_file_types_give_the_same_rows(net_tiny, tmp_path):
    tiny = net_tiny("llama")
    texts = []
    for line in (tiny / "data" / "train.jsonl").read_text().splitlines():
        question, answer = json.loads(line)["messages"][:2]
        texts.append({"prompt": question["content"], "completion": answer["content"]})
    rows = Dataset.from_list(texts)
    (tmp_path / "folder").mkdir()
    files = [tmp_path / "folder"]
    (tmp_path / "folder" / "train.jsonl").write_text("\n".join(map(json.dumps, texts)))
    for kind, write in (
        ("csv", rows.to_csv),
        ("parquet", rows.to_parquet),
        ("json", rows.to_json),
    ):
        files.append(tmp_path / f"rows.{kind}")
        write(files[-1])
    hashes = []
    for file in files:
        folder = tmp_path / f"run of {file.name}"
        words = ["--model_name_or_path", tiny / "model", "--dataset_name", file]
        done = recipe(*words, "--max_steps", 1, "--save_steps", 0, "--output_dir", folder)
        assert done.returncode == 0, done.output[-3000:]
        hashes.append(read_json(folder / "run.json")["data"])
    assert hashes == hashes[:1] * 4


def test_no_run_continues_from_checkpoints_without_optimizer_state(net_tiny, tmp_path):
    folder = tmp_path / "run"
    words = [*data_of(net_tiny("llama")), "--output_dir", folder, "--save_only_model"]
    words += ["--max_steps", 4, "--save_steps", 2]
    done = recipe(*words)
    assert done.returncode == 0, done.output[-3000:]
    result = (folder / "model.safetensors").stat().st_size
    for step in (2, 4):
        files = (folder / f"checkpoint-{step}").glob("*.safetensors")
        assert sum(file.stat().st_size for file in files) < 1.1 * result
    assert "Nothing is left to do" in recipe(*words).output
    (folder / "model.safetensors").unlink()  # As if killed before the result was written
    done = recipe(*words)
    assert done.returncode == 64 and "--save_only_model" in done.output
