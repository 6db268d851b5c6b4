# SPDX-License-Identifier: Apache-2.0
"""What each quickstart teaches its model, on rows that it never sees, and how long that takes.

    pytest evidence/test_quickstarts.py --all    # about ten minutes on two idle cores

"Before" and "after" are the exact match that scripts/generate.py counts, or the first and the last
evaluation of the run. Seconds are those of the whole command without the installation of packages.
"""

import os
import sys
import time
from pathlib import Path

import pytest

import net
from jobs import RECIPES

SHOWN = {name: recipe.shown for name, recipe in RECIPES.items() if recipe.shown}
SHOWN["smollm2"] = ("exact_match", 0.3)  # llama.py with a real model


@pytest.mark.whole
@pytest.mark.parametrize("recipe", SHOWN)
def test_quickstart(recipe, record, tmp_path):
    begun = time.monotonic()
    row = run_quickstart(recipe, tmp_path / "out")
    seconds = round(time.monotonic() - begun, 1)
    record(**row, seconds=seconds, cores=os.cpu_count())
    assert is_taught(row)


def run_quickstart(recipe, folder, precision="no"):
    """A row of what a recipe's quickstart taught. Fails if it does not end well."""
    venv = Path(sys.prefix)
    (venv / ".installed").touch()  # This environment has what the quickstart would install.
    command = ["make", "quickstart", f"RECIPE={recipe}", f"OUT={folder}"]
    command += [f"PRECISION={precision}", f"VENV={venv}"]
    net.run(*command, code=0, timeout=None)
    before, after = read_taught(recipe, folder)
    shown = SHOWN[recipe][0].removeprefix("eval_").replace("_", " ")
    return {"recipe": recipe, "shown": shown, "before": before, "after": after}


def read_taught(recipe, folder):
    """The number of SHOWN before and after training, from the files of a quickstart."""
    name = SHOWN[recipe][0]
    if (folder / "before.json").exists():
        files = [folder / "before.json", folder / "after.json"]
        return tuple(net.read_json(path)[name] for path in files)
    values = [line[name] for line in net.metrics(folder / "run") if name in line]
    return values[0], values[-1]


def is_taught(row):
    """Whether a row has reached its bound."""
    name, bound = SHOWN[row["recipe"]]
    return row["after"] <= bound if name == "eval_perplexity" else row["after"] >= bound
