"""Each recipe does what it did before it was rewritten, bit for bit (tests/net.py)."""

import json
import sys

import pytest

import net
from launching import REPO, data_of, run


@pytest.mark.parametrize("case", net.CASES)
def test_a_recipe_does_what_it_did(case, tiny_of, tmp_path):
    before = json.loads((net.RECORDINGS / f"{case}.json").read_text())
    if before.pop("machine") != net.hash_of_this_machine():
        pytest.skip("this processor rounds otherwise than the one of the recordings")
    recipe = net.recipe_of(case)
    words = net.words_of(case, data_of(tiny_of(recipe)), tmp_path / "run")
    done = run(sys.executable, REPO / "recipes" / f"{recipe}.py", *words)
    assert done.returncode == 0, done.output[-3000:]
    assert net.read_run(tmp_path / "run") == before
