# SPDX-License-Identifier: Apache-2.0
"""scripts/copy_recipe.py copies a recipe and exactly what it imports, or refuses in one line."""

import re
import subprocess
from pathlib import Path

import pytest

import copy_recipe
from launching import REPO
from template import copying
from template.copying import merge, update

RECIPES = {path.stem: path for path in (REPO / "recipes").glob("*.py")}
OURS = [
    path
    for folder in ("recipes", "scripts", "tests", "docs", "results", "examples")
    for path in (REPO / folder).rglob("*.*")
]


def write_tree(folder: Path, files: dict[str, str]) -> None:
    """Write files from their paths and texts."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def repository(tmp_path):
    """A small repository under git with two recipes that share a module."""
    root = tmp_path / "repository"
    end = 'if __name__ == "__main__":\n    main()\n'
    write_tree(
        root,
        {
            "recipes/one.py": f"from core.loss import sum_loss\n\n\n{end}",
            "recipes/two.py": f"import core.rows\n{end}",
            "recipes/core/__init__.py": '"""Core."""\n',
            "recipes/core/loss.py": "import math\n\nA = 1\nB = 2\nC = 3\nD = 4\n",
            "recipes/core/rows.py": "import json\n",
            "accelerate_configs/ddp.yaml": "num_processes: 2\n",
            "requirements.txt": "torch\n",
            "LICENSE": "Apache\n",
            "scripts/template/copy_test.py": "import llama\n",
        },
    )
    subprocess.run(["git", "init", "-q", root], check=True)
    commit(root)
    return root


def commit(root):
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for words in (["add", "."], [*author, "commit", "-qm", "Change"]):
        subprocess.run(["git", "-C", root, *words], check=True)


class TestRecipesOfThisRepository:
    @pytest.mark.parametrize("name", RECIPES)
    def test_the_copy_names_no_file_of_this_repository_that_it_lacks(self, name):
        files = copying.files_of_copy(REPO, name, copying.extras_of(RECIPES[name]))
        named = re.compile(r"(?<![\w/.-])((?:[\w.-]+/)*[\w-]+\.(?:py|yaml|md|txt|json))\b")
        ours = {path.relative_to(REPO).as_posix() for path in OURS}
        programs = {path.name for path in RECIPES.values()} - {f"{name}.py"}
        assert not programs & set(files)
        lacking = []
        for path, text in files.items():
            for found in named.findall(text):
                if found in programs or (found in ours and found not in files):
                    lacking.append(f"{path}: {found}")
        assert lacking == []

    def test_extras_and_engines_are_left_out(self):
        whole = copying.files_of_copy(REPO, "llama", copying.extras_of(RECIPES["llama"]))
        small = copying.files_of_copy(REPO, "llama", engines=("ddp", "fsdp2"))
        left_out = set(whole) - set(small)
        assert {"core/zero.py", "accelerate_configs/tp.yaml"} <= left_out
        assert {"core/state.py", "accelerate_configs/fsdp.yaml"} <= set(small)
        assert any(path.startswith("extras/") for path in left_out)
        assert not any(path.startswith("extras/") for path in small)
        namespace = {}
        line = next(line for line in small["llama.py"].splitlines() if "EXTRAS =" in line)
        exec(line.strip(), namespace)
        assert namespace["EXTRAS"] == ()

    @pytest.mark.parametrize("page", ["README.md", "docs/your_recipe.md"])
    def test_the_documents_tell_how_large_the_copy_of_llama_is(self, page):
        files = copying.files_of_copy(REPO, "llama")
        lines = [text.count("\n") for path, text in files.items() if path.endswith(".py")]
        sizes = [lines[0], len(lines) - 2, sum(lines[1:-1])]
        text = " ".join((REPO / page).read_text().split())
        told = re.search(r"about (\d+) lines\b.*? about (\d+) modules\b.*? ([\d,]+) lines", text)
        # Round figures, so that not every edit of a component changes the documents
        assert [int(figure.replace(",", "")) for figure in told.groups()] == pytest.approx(
            sizes, rel=0.1
        )


@pytest.fixture
def copied(repository, tmp_path):
    """A copy of that repository's first recipe."""
    folder = tmp_path / "copy"
    wish = ("one", (), ("fsdp2",))
    files = copying.files_of_copy(repository, *wish)
    copying.write(folder, files | {"ORIGIN.md": copying.origin_of(repository, *wish)})
    return folder


def test_the_origin_names_the_commit_and_whether_it_is_all(repository, copied):
    head = copying.git(repository, "rev-parse", "HEAD").strip()
    text = (copied / "ORIGIN.md").read_text()
    assert f"commit {head}" in text and "not committed" not in text
    (repository / "recipes" / "core" / "loss.py").write_text("")
    assert "not committed" in copying.origin_of(repository, "one")


def test_an_update_brings_what_changed_there_and_keeps_what_changed_here(repository, copied):
    ours, theirs = repository / "recipes" / "core" / "loss.py", copied / "core" / "loss.py"
    ours.write_text(ours.read_text().replace("D = 4", "D = 5") + "import core.rows\n")
    theirs.write_text(theirs.read_text().replace("A = 1", "A = 0"))
    commit(repository)
    assert update(repository, copied) == []
    assert theirs.read_text() == "import math\n\nA = 0\nB = 2\nC = 3\nD = 5\nimport core.rows\n"
    assert (copied / "core" / "rows.py").exists()  # which it needs now
    assert not (copied / "accelerate_configs" / "ddp.yaml").exists()  # of another engine
    assert update(repository, copied) == []  # from the new commit


def test_an_update_shows_what_changed_in_both(repository, copied):
    ours, theirs = repository / "recipes" / "core" / "loss.py", copied / "core" / "loss.py"
    ours.write_text(ours.read_text().replace("D = 4", "D = 5"))
    theirs.write_text(theirs.read_text().replace("D = 4", "D = 6"))
    commit(repository)
    assert update(repository, copied) == ["core/loss.py"]
    text = theirs.read_text()
    assert "D = 5" in text and "D = 6" in text and "<<<<<<< yours" in text


@pytest.mark.parametrize(
    ("mine", "old", "new", "merged"),
    [
        ("a", "a", None, (None, True)),  # no longer needed
        ("b", "a", None, ("b", False)),
        (None, "a", "a", (None, True)),  # deleted here
        (None, "a", "b", (None, False)),
        ("b", None, "a", ("b", False)),
    ],
)
def test_files_that_come_and_go(mine, old, new, merged):
    assert merge(mine, old, new) == merged


@pytest.mark.parametrize(
    ("recipe", "folder", "code", "word"),
    [
        ("lama", "copy", 64, "llama"),
        ("rows", "copy", 64, "rows"),
        ("llama", "full", 64, "full"),
        ("llama", "full/mine.txt", 64, "mine.txt"),
        ("llama", "full/mine.txt/copy", 73, "mine.txt"),
    ],
)
def test_a_copy_that_cannot_be_made_is_one_line(recipe, folder, code, word, tmp_path, in_process):
    write_tree(tmp_path, {"full/mine.txt": ""})
    done = in_process(copy_recipe, recipe, tmp_path / folder)
    (line,) = done.err.splitlines()
    assert done.code == code and word in line
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "mine.txt"]
