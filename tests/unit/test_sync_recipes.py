"""scripts/sync_recipes.py finds every planted drift between two recipes, and mends it from the one that is right."""

import shutil
import sys

import pytest

import sync_recipes
from launching import REPO, run

LLAMA = (REPO / "recipes" / "llama.py").read_text()
DRIFTS = {  # what a careless edit changes: a text of the recipe, and what it becomes
    "a comment": ("# rooms: what is left in a line", "# rooms: of a line"),
    "a constant in a function": ("/ num_tokens, 700", "/ num_tokens, 600"),
    "the order of branches": (
        "    if args.load_in_8bit:",
        "    if not args.load_in_8bit:\n        pass\n    if args.load_in_8bit:",
    ),
    "a docstring": ("in nats and fp32.", "in nats."),
    "a constant of the module": ('"question": "answer"}', '"question": "reply"}'),
    "a decorator": ("@torch.no_grad()\n", ""),
    "a name of an argument": (
        "def best_fit(lengths, capacity):",
        "def best_fit(lengths, capacity, *, more=0):",
    ),
}


@pytest.fixture
def folder(tmp_path):
    """Two recipes that are equal, and a companion, which is none."""
    for name in ("llama.py", "mistral.py"):
        (tmp_path / name).write_text(LLAMA)
    shutil.copy(REPO / "recipes" / "rows.py", tmp_path)
    return tmp_path


def sync(folder, *arguments):
    return run(sys.executable, REPO / "scripts" / "sync_recipes.py", *arguments, "--folder", folder)


def test_the_shipped_recipes_are_equal_where_their_names_are():
    texts = {path.name: path.read_text() for path in sync_recipes.recipes_in(REPO / "recipes")}
    assert {"llama.py"} <= set(texts) and not {"rows.py", "preflight.py"} & set(texts)
    assert sync_recipes.differences(texts) == []
    expected = {"make_accelerator", "global_batches", "collate", "DEFAULT_CHAT_TEMPLATE"}
    assert expected <= set(sync_recipes.shared_text(LLAMA))


@pytest.mark.parametrize("old, new", DRIFTS.values(), ids=DRIFTS)
def test_a_drift_is_found_and_mended(old, new, folder):
    assert LLAMA.count(old) == 1
    (folder / "mistral.py").write_text(LLAMA.replace(old, new))
    found = sync(folder, "--check")
    assert found.returncode == 1 and "mistral.py is not that of llama.py" in found.output
    mended = sync(folder, "--fix", "--from", folder / "llama.py")
    assert mended.returncode == 0 and "mistral.py has now what llama.py has" in mended.output
    assert (folder / "mistral.py").read_text() == LLAMA and sync(folder, "--check").returncode == 0


def test_a_fix_goes_the_way_that_is_said(folder):
    old, new = DRIFTS["a comment"]
    (folder / "mistral.py").write_text(LLAMA.replace(old, new))
    assert sync(folder, "--fix", "--from", folder / "mistral.py").returncode == 0
    assert (folder / "llama.py").read_text() == LLAMA.replace(old, new)


@pytest.mark.parametrize(
    "old, new",
    [
        ("# ---- Prepare ----", "# ---- Preparation ----"),
        ("    # ---- Resume ----\n", ""),
    ],
)
def test_other_banners_are_found(old, new, folder):
    (folder / "mistral.py").write_text(LLAMA.replace(old, new))
    found = sync(folder, "--check")
    assert found.returncode == 1 and "main of mistral.py has the banners" in found.output


def test_what_is_a_recipes_own_may_differ(folder):
    (folder / "mistral.py").write_text(
        LLAMA.replace('default="runs/llama"', 'default="runs/mistral"')
    )
    assert sync(folder, "--check").returncode == 0


@pytest.mark.parametrize(
    "arguments", [[], ["--fix"], ["--fix", "--from", "recipes/rows.py"], ["--check", "--fix"]]
)
def test_a_wrong_call_is_one_line(arguments, folder):
    found = sync(folder, *arguments)
    assert found.returncode == 64 and len(found.output.splitlines()) == 1
