# SPDX-License-Identifier: Apache-2.0
"""Which rows a file has, as recorded in tests/golden/ before the code that reads it was rewritten.

What looks odd is read as it is meant.
"""

import pytest
from transformers import AutoTokenizer

import golden_subjects
from row_files import BAD_FILES, BAD_LINES, GOOD, GOOD_FILES

FILES = {f"good: {name}": files for name, (files, _) in GOOD_FILES.items()}
FILES |= {f"bad: {name}": files for name, files in BAD_FILES.items()}
for name, line in BAD_LINES.items():
    content = line if isinstance(line, bytes) else line.encode()
    FILES[f"bad line: {name}"] = {"rows.jsonl": GOOD.encode() + b"\n" + content}


@pytest.mark.parametrize("name", FILES)
def test_which_rows_a_file_has(name, golden, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    alone = []
    for file, content in FILES[name].items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        alone += [file.split("/")[0]] if file.startswith("rows") else []
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    row = {}
    for how in ("strict", "skipping"):
        place = folder / "".join(alone[:1])
        row[how] = golden_subjects.prepared_rows(place, tokenizer, how == "skipping")
    golden.check("rows", name, row)
    if name.startswith("good: "):
        _, meant = GOOD_FILES[name.removeprefix("good: ")]
        for (number, text, _), (line, prompt, answer) in zip(row["strict"], meant, strict=True):
            assert number == line and prompt in text and answer in text
