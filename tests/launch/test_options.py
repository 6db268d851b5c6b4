# SPDX-License-Identifier: Apache-2.0
"""Rows of all kinds of files are the same.

Flags that change what is trained on have a cell in test_cells.py.
"""

import json

from datasets import Dataset

from launching import read_json, recipe


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
