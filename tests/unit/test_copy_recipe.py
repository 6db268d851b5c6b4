# SPDX-License-Identifier: Apache-2.0
"""scripts/copy_recipe.py copies a recipe and exactly what it imports, or refuses in one line."""

import functools
import modulefinder
import re
import subprocess
import sys
from pathlib import Path

import pytest

import copy_recipe
from launching import REPO
from template import copying, imports, origin

RECIPES = copying.find_recipes(REPO)
REQUIREMENTS = ("requirements.txt", "requirements.txt")
OURS = [
    path
    for folder in ("recipes", "scripts", "tests", "docs", "results", "examples")
    for path in (REPO / folder).rglob("*.*")
]
OTHERS = {"accelerate_configs", "requirements.txt", "LICENSE", "ORIGIN.md"}


def write_tree(folder: Path, files: dict[str, str]) -> None:
    """Write files from their paths and texts."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def without_copying(text: str, recipe: str) -> str:
    """Return a text of this repository as in a copy, but for the mark of what the copy lacks."""
    command = f"python scripts/copy_recipe.py {recipe} my_project, then"
    text = re.sub(rf"{command}\s+look for\s+EDIT", "look for EDIT", text)
    return re.sub(rf"(?<![\w/])recipes/({recipe}|RECIPE)\b", r"\1", text)


def reached(folder: Path, program: str = "main.py") -> set[str]:
    """Return the files that a program needs, as paths in its folder."""
    needed = imports.modules_needed(folder / program)
    return {path.relative_to(folder).as_posix() for path in needed}


@pytest.fixture
def repository(tmp_path):
    """A small repository under git with two recipes that share a component."""
    root = tmp_path / "repository"
    end = 'if __name__ == "__main__":\n    main()\n'
    write_tree(
        root,
        {
            "recipes/one.py": f"from components.loss import sum_loss\n{end}",
            "recipes/two.py": f"import components.things\n{end}",
            "recipes/components/__init__.py": '"""Components."""\n',
            "recipes/components/loss.py": "from components import exits\n",
            "recipes/components/exits.py": "import sys\n",
            "recipes/components/things.py": "import json\n",
            "accelerate_configs/ddp.yaml": "num_processes: 2\n",
            "requirements.txt": "torch\n",
            "LICENSE": "Apache\n",
            "scripts/rehearse.py": "import one\n",
        },
    )
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "Begin"]):
        subprocess.run(["git", "-C", root, *words], check=True)
    return root


@pytest.fixture(scope="module")
def copy_of(tmp_path_factory):
    """A function from a recipe's name to its copy, made once: the folder, and files in it."""

    @functools.cache
    def copy(name):
        folder = tmp_path_factory.mktemp("copies") / name
        return folder, copying.copy_recipe(REPO, RECIPES[name], folder, "command")

    return copy


@pytest.mark.parametrize(
    "statement",
    [
        "import json, parts.a",
        "from parts import a as short, unknown",
        "from parts.a import *",
        "def function():\n    from parts.a import name",
        "try:\n    import parts.a\nexcept ImportError:\n    pass",
    ],
)
def test_every_form_of_import_is_followed(statement, tmp_path):
    files = {"main.py": statement, "parts/a.py": "from . import b", "parts/b.py": ""}
    write_tree(tmp_path, files | {"parts/__init__.py": "", "parts/c.py": ""})
    assert reached(tmp_path) == {"parts/__init__.py", "parts/a.py", "parts/b.py"}


class TestRecipesOfThisRepository:
    def test_a_recipe_needs_what_the_standard_library_finds_too(self):
        finder = modulefinder.ModuleFinder(path=[str(REPO / "recipes")])
        finder.run_script(str(RECIPES["llama"]))
        found = {Path(module.__file__) for module in finder.modules.values() if module.__file__}
        needed = imports.modules_needed(RECIPES["llama"], extras=())  # it finds no extras
        assert set(needed) == found - {RECIPES["llama"]}

    @pytest.mark.parametrize("name", RECIPES)
    def test_the_copy_is_the_recipe_and_what_it_needs_as_they_are_here(self, name, copy_of):
        folder, files = copy_of(name)
        assert {folder / file for file in files} == set(folder.rglob("*.py"))
        programs = {Path(path.name) for path in RECIPES.values()}
        assert programs & set(files) == {Path(f"{name}.py")}
        top = {path.name for path in folder.iterdir()}
        assert top - {file.parts[0] for file in files} == OTHERS
        for copied, here in [*((file, Path("recipes", file)) for file in files), REQUIREMENTS]:
            theirs = (folder / copied).read_text()
            ours = without_copying((REPO / here).read_text(), name)
            assert theirs.replace("ORIGIN/", "") == ours, copied
        for path in [*(REPO / "accelerate_configs").iterdir(), REPO / "LICENSE"]:
            copied = folder / path.relative_to(REPO)
            assert copied.read_bytes() == path.read_bytes()

    @pytest.mark.parametrize("name", RECIPES)
    def test_the_copy_names_no_file_of_this_repository_that_it_lacks(self, name, copy_of):
        folder, _ = copy_of(name)
        named = re.compile(r"(?<![\w/.-])((?:[\w.-]+/)*[\w-]+\.(?:py|yaml|md|txt|json))\b")
        ours = {path.relative_to(REPO).as_posix() for path in OURS}
        programs = {path.name for path in RECIPES.values()} - {f"{name}.py"}
        lacking = []
        for path in folder.rglob("*"):
            if path.suffix in (".py", ".yaml", ".txt"):
                for found in named.findall(path.read_text()):
                    if found in programs or (found in ours and not (folder / found).exists()):
                        lacking.append(f"{path.relative_to(folder)}: {found}")
        assert lacking == []

    @pytest.mark.parametrize("page", ["README.md", "docs/your_recipe.md"])
    def test_the_documents_tell_how_large_the_copy_of_llama_is(self, page, copy_of):
        folder, files = copy_of("llama")
        lines = [len((folder / file).read_text().splitlines()) for file in files]
        sizes = [lines[0], len(files) - 1, sum(lines[1:])]
        text = " ".join((REPO / page).read_text().split())
        told = re.search(r"about (\d+) lines\b.*? about (\d+) modules\b.*? ([\d,]+) lines", text)
        # Round figures, so that not every edit of a component changes the documents
        assert [int(figure.replace(",", "")) for figure in told.groups()] == pytest.approx(
            sizes, rel=0.1
        )


def test_the_origin_names_the_commit_and_changes_of_what_was_copied(repository, tmp_path):
    def origin_of(name):
        copying.copy_recipe(repository, repository / "recipes/one.py", tmp_path / name, "copy one")
        return (tmp_path / name / "ORIGIN.md").read_text()

    text = origin_of("first")
    commit = origin.git(repository, "rev-parse", "HEAD")
    assert f"commit {commit}" in text and "    copy one\n" in text
    (repository / "recipes" / "components" / "rows.py").write_text("import csv\n")  # of the other
    assert "not committed" not in origin_of("second")
    (repository / "recipes" / "components" / "loss.py").write_text("import math\n")
    assert "not committed" in origin_of("third")


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
def test_a_copy_that_cannot_be_made_is_one_line(
    recipe, folder, code, word, tmp_path, monkeypatch, capsys
):
    write_tree(tmp_path, {"full/mine.txt": ""})
    monkeypatch.setattr(sys, "argv", ["copy_recipe.py", recipe, str(tmp_path / folder)])
    with pytest.raises(SystemExit, match=str(code)):
        sys.exit(copy_recipe.main())
    (line,) = capsys.readouterr().err.splitlines()
    assert word in line
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "mine.txt"]
