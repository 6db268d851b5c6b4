# SPDX-License-Identifier: Apache-2.0
"""Prepared rows are found again by another process, and prepared again after an edit."""

import os
import shutil
import sys

import pytest

from launching import REPO, run

RECIPES = REPO / "recipes"
RECIPE = '''
"""A recipe."""
import sys
from dataclasses import dataclass
from letters import change

@dataclass
class Arguments:
    dataset_name: list[str]
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    eval_strategy: str = "no"
    skip_bad_rows: bool = False
    dataset_num_proc: int | None = None
    COLUMN_ROLES = COLUMN_ARGUMENTS = ()
    columns_by_role = {}
    dataset_test_split: str = "test"

def prepare(row):
    """Return the words of a row."""
    return {"words": [change(word) for word in row["text"].split(" ")]}

def train():
    return 1

if __name__ == "__main__":
    import datasets
    from core.data import read_rows

    datasets.config.HF_DATASETS_CACHE = sys.argv[2]  # a variable would keep it from a warm start
    rows, _ = read_rows(Arguments([sys.argv[1]]), prepare)
    print("words", [words.tolist() for words in rows.dataset["words"][:]])
'''
LETTERS = '''
"""Letters."""
def change(word):
    return word.upper()
'''


def edit(path, old, new):
    """Replace text in a file, whose time of change moves on by two seconds: Python takes bytecode
    for current while the size and the second are those that it was compiled from."""
    text = path.read_text()
    assert old in text
    changed = path.stat().st_mtime + 2
    path.write_text(text.replace(old, new))
    os.utime(path, (changed, changed))


@pytest.mark.cold("which modules it has imported decides about its rows")
def test_an_edit_prepares_the_rows_again_and_a_move_does_not(tmp_path):
    """What is no edit, and what is one, case by case: tests/unit/core."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a b c"}\n')
    cache = tmp_path / "cache"

    def words_of(folder):
        """Return what the recipe prints, and the number of files with prepared rows."""
        done = run(sys.executable, "recipe.py", rows, cache, cwd=folder)
        assert done.returncode == 0, done.output
        printed = [line for line in done.output.splitlines() if line.startswith("words")]
        return printed, len(list(cache.rglob("cache-*.arrow")))

    project = tmp_path / "project"
    shutil.copytree(RECIPES / "core", project / "core")
    (project / "recipe.py").write_text(RECIPE)
    (project / "letters.py").write_text(LETTERS)
    assert words_of(project) == (["words [['A', 'B', 'C']]"], 1)

    moved = tmp_path / "elsewhere" / "moved"
    shutil.copytree(project, moved)
    edit(moved / "recipe.py", "return 1", "return 2  # in the training loop")
    edit(moved / "recipe.py", "import sys", "\n\nimport sys")  # other lines, the same code
    assert words_of(moved) == (["words [['A', 'B', 'C']]"], 1)

    reading = "row = json.loads(line)"  # how a row is read decides about it, too
    replaced = reading.replace("(line", '(line.replace("b c", "x")')
    edit(moved / "core" / "data.py", reading, replaced)
    edit(moved / "letters.py", "upper", "lower")
    assert words_of(moved) == (["words [['a', 'x']]"], 2)
