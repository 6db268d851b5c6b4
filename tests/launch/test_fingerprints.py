# SPDX-License-Identifier: Apache-2.0
"""Prepared rows are found again by another process, and prepared again after an edit."""

import os
import shutil
import sys

import pytest

from launching import run, script, write_rows


def edit(path, old, new):
    """Replace text in a file, whose time of change moves on by two seconds: Python takes bytecode
    for current while the size and the second are those that it was compiled from."""
    text = path.read_text()
    assert old in text
    changed = path.stat().st_mtime + 2
    path.write_text(text.replace(old, new))
    os.utime(path, (changed, changed))


@pytest.mark.cold("which modules it has imported decides about its rows")
def test_an_edit_prepares_the_rows_again_and_a_move_does_not(tiny, tmp_path):
    """Of a copied recipe. What is no edit, and what is one, case by case: tests/unit/core."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "Say it.", "completion": "a b c"}])
    cache = tmp_path / "cache"
    words = ["--model_name_or_path", tiny / "model", "--dataset_name", rows, "--dry_run"]
    words += ["--output_dir", tmp_path / "run"]

    def prepared(folder):
        """The answer that a dry run shows, and the number of files with prepared rows."""
        environment = os.environ | {"HF_DATASETS_CACHE": str(cache)}
        done = run(sys.executable, folder / "llama.py", *words, env=environment, code=0)
        answer = done.output.partition("[[")[2].partition("<")[0]
        return answer, len(list(cache.rglob("cache-*.arrow")))

    project = tmp_path / "project"
    script("copy_recipe", "llama", project, code=0)
    assert prepared(project) == ("a b c", 1)

    moved = tmp_path / "elsewhere" / "moved"
    shutil.copytree(project, moved)
    edit(moved / "llama.py", "import torch", "\n\nimport torch")  # other lines, the same code
    assert prepared(moved) == ("a b c", 1)

    reading = "row = json.loads(line)"  # how a row is read decides about it, too
    edit(moved / "core" / "data.py", reading, reading.replace("(line", '(line.replace("b c", "x")'))
    assert prepared(moved) == ("a x", 2)
