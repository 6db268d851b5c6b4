# SPDX-License-Identifier: Apache-2.0
"""scripts/copy_recipe.py copies a recipe and exactly what it imports, or refuses in one line."""

import functools
import modulefinder
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import copy_recipe
from launching import REPO
from template import copying, imports, origin
from template.names import rename_files

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
            "recipes/two.py": f"import components.rows\n{end}",
            "recipes/components/__init__.py": '"""Components."""\n',
            "recipes/components/loss.py": "from components import exits\n",
            "recipes/components/exits.py": "import sys\n",
            "recipes/components/rows.py": "import json\n",
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


@pytest.fixture(scope="module")
def compiled_once():
    """ModuleFinder compiles a module that recipes share only once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modulefinder, "compile", functools.cache(compile), raising=False)
        yield


def run_command(monkeypatch, *words) -> int:
    """Run the command in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["copy_recipe.py", *map(str, words)])
    try:
        copy_recipe.main()
    except SystemExit as end:
        return end.code
    return 0


class TestImports:
    @pytest.mark.parametrize(
        "statement",
        [
            "import parts.a",
            "import parts.a as short",
            "import json, parts.a",
            "from parts import a",
            "from parts import a as short, unknown",
            "from parts.a import name",
            "from parts.a import *",
            "def function():\n    from parts.a import name",
            "try:\n    import parts.a\nexcept ImportError:\n    pass",
            "class Kind:\n    if True:\n        import parts.a",
        ],
    )
    def test_every_form_of_import_is_followed(self, statement, tmp_path):
        files = {"main.py": statement, "parts/a.py": "", "parts/b.py": "", "parts/__init__.py": ""}
        write_tree(tmp_path, files)
        assert reached(tmp_path) == {"parts/__init__.py", "parts/a.py"}

    @pytest.mark.parametrize("statement", ["from . import b", "from .b import c", "import parts.b"])
    def test_modules_of_a_package_import_each_other(self, statement, tmp_path):
        write_tree(
            tmp_path,
            {"main.py": "from parts.a import x", "parts/a.py": statement, "parts/b.py": ""},
        )
        assert reached(tmp_path) == {"parts/a.py", "parts/b.py"}

    def test_a_relative_import_may_climb(self, tmp_path):
        files = {
            "main.py": "import parts.inner.a",
            "parts/inner/a.py": "from ..b import x",
            "parts/b.py": "",
        }
        write_tree(tmp_path, files)
        assert reached(tmp_path) == {"parts/inner/a.py", "parts/b.py"}

    def test_imports_are_followed_through_files_beside_the_program(self, tmp_path):
        write_tree(tmp_path, {"main.py": "import a", "a.py": "import b", "b.py": "", "c.py": ""})
        assert reached(tmp_path) == {"a.py", "b.py"}

    def test_what_the_init_of_a_package_imports_is_needed_too(self, tmp_path):
        files = {
            "main.py": "import parts.a",
            "parts/__init__.py": "from parts.b import x",
            "parts/a.py": "",
            "parts/b.py": "",
        }
        write_tree(tmp_path, files)
        assert reached(tmp_path) == {"parts/__init__.py", "parts/a.py", "parts/b.py"}

    def test_a_circle_ends(self, tmp_path):
        write_tree(tmp_path, {"main.py": "import a", "a.py": "import b", "b.py": "import a, main"})
        assert reached(tmp_path) == {"a.py", "b.py"}

    def test_text_that_only_looks_like_an_import_is_none(self, tmp_path):
        write_tree(tmp_path, {"main.py": '"""\nimport a\n"""\n# import a\n', "a.py": ""})
        assert reached(tmp_path) == set()


class TestRecipesOfThisRepository:
    def test_the_recipes_are_found(self):
        assert sorted(RECIPES) == [
            "bert",
            "bert_ner",
            "llama",
            "llama_dpo",
            "llama_pipeline",
            "mistral_pretrain",
            "mixtral",
            "t5",
            "vit",
        ]

    @pytest.mark.parametrize("name", RECIPES)
    def test_a_recipe_needs_what_the_standard_library_finds_too(self, name, compiled_once):
        finder = modulefinder.ModuleFinder(path=[str(REPO / "recipes")])
        finder.run_script(str(RECIPES[name]))
        found = {Path(module.__file__) for module in finder.modules.values() if module.__file__}
        assert set(imports.modules_needed(RECIPES[name])) == found - {RECIPES[name]}

    @pytest.mark.parametrize("name", RECIPES)
    def test_the_copy_has_no_other_recipe_and_nothing_of_scripts(self, name, copy_of):
        folder, files = copy_of(name)
        assert {folder / file for file in files} == set(folder.rglob("*.py"))
        programs = {Path(path.name) for path in RECIPES.values()}
        assert programs & set(files) == {Path(f"{name}.py")}
        assert all((REPO / "recipes" / file).is_file() for file in files)
        top = {path.name for path in folder.iterdir()}
        assert top - {file.parts[0] for file in files} == OTHERS

    @pytest.mark.parametrize("name", RECIPES)
    def test_each_copied_module_is_imported_by_another_one(self, name, copy_of):
        folder, files = copy_of(name)
        imported = set()
        for file in files:
            imported |= set(imports.local_imports(folder / file, folder)) - {folder / file}
        assert {folder / file for file in files} - imported == {folder / RECIPES[name].name}

    @pytest.mark.parametrize("name", RECIPES)
    def test_every_file_is_the_same_as_here_but_for_names_of_files(self, name, copy_of):
        folder, files = copy_of(name)
        for copied, here in [*((file, Path("recipes", file)) for file in files), REQUIREMENTS]:
            ours = (REPO / here).read_text()
            theirs = (folder / copied).read_text()
            if not re.search(r"(recipes|scripts|tests)/", ours):
                assert theirs == ours
            assert theirs.replace("ORIGIN/", "") == without_copying(ours, name)
        configs = {
            path.name: path.read_bytes() for path in (folder / "accelerate_configs").iterdir()
        }
        expected = (REPO / "accelerate_configs").iterdir()
        assert configs == {path.name: path.read_bytes() for path in expected}
        assert configs["fsdp.yaml"] == configs["fsdp2_full_shard.yaml"]
        assert (folder / "LICENSE").read_bytes() == (REPO / "LICENSE").read_bytes()

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

    def test_what_the_copy_lacks_is_explained_in_its_origin(self, copy_of):
        folder, _ = copy_of("llama")
        assert "python ORIGIN/scripts/generate.py" in (folder / "llama.py").read_text()
        text = (folder / "ORIGIN.md").read_text()
        assert "A name that begins with `ORIGIN/`" in text
        scripts = re.findall(r"python ORIGIN/(scripts/\w+\.py)", text)
        assert scripts and all((REPO / script).is_file() for script in scripts)

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


class TestNames:
    @pytest.mark.parametrize(
        ("here", "copied"),
        [
            ("accelerate launch recipes/llama.py", "accelerate launch llama.py"),
            ("as recipes/t5.py does", "as ORIGIN/recipes/t5.py does"),
            ("`python scripts/generate.py`", "`python ORIGIN/scripts/generate.py`"),
            ("(tests/unit/test_t5.py)", "(ORIGIN/tests/unit/test_t5.py)"),
            ("run recipes/RECIPE.py", "run RECIPE.py"),
            ("https://a.org/docs/x.md", "https://a.org/docs/x.md"),
            ("src/scripts/a.py, and scripts/ too", "src/scripts/a.py, and scripts/ too"),
            (
                "yours: python scripts/copy_recipe.py t5 my_project, then\nlook for EDIT.",
                "yours: look for EDIT.",
            ),
        ],
    )
    def test_a_name_holds_in_the_copy(self, here, copied):
        assert rename_files(here, "llama") == copied


class TestCopies:
    def test_a_recipe_comes_with_its_own_components_only(self, repository, tmp_path):
        recipe = repository / "recipes" / "one.py"
        files = copying.copy_recipe(repository, recipe, tmp_path / "copy", "command")
        assert sorted(path.as_posix() for path in files) == [
            "components/__init__.py",
            "components/exits.py",
            "components/loss.py",
            "one.py",
        ]

    def test_the_origin_names_commit_and_command(self, repository, tmp_path):
        recipe = repository / "recipes" / "one.py"
        copying.copy_recipe(repository, recipe, tmp_path / "copy", "copy one")
        text = (tmp_path / "copy" / "ORIGIN.md").read_text()
        commit = origin.git(repository, "rev-parse", "HEAD")
        assert f"commit {commit}" in text and "    copy one\n" in text
        assert f"git diff {commit} -- \\\n        recipes/one.py" in text
        assert "not committed" not in text

    def test_the_origin_says_that_a_copied_file_has_changes(self, repository, tmp_path):
        recipe = repository / "recipes" / "one.py"
        (repository / "recipes" / "components" / "rows.py").write_text("import csv\n")
        copying.copy_recipe(repository, recipe, tmp_path / "first", "command")
        assert "not committed" not in (tmp_path / "first" / "ORIGIN.md").read_text()
        (repository / "recipes" / "components" / "loss.py").write_text("import math\n")
        copying.copy_recipe(repository, recipe, tmp_path / "second", "command")
        assert "not committed" in (tmp_path / "second" / "ORIGIN.md").read_text()

    def test_a_folder_without_git_has_no_commit_even_inside_of_a_repository(
        self, repository, tmp_path
    ):
        inner = repository / "vendor" / "recipes_of_others"
        shutil.copytree(repository / "recipes", inner / "recipes")
        assert origin.find_commit(inner, [inner / "recipes" / "one.py"]) is None
        assert origin.find_commit(tmp_path, []) is None
        text = origin.describe("one.py", "command", None, [])
        assert "an unknown version, since git has no commit of it" in text
        assert "git diff" not in text


class TestCommand:
    def test_it_prints_what_it_wrote(self, tmp_path, monkeypatch, capsys):
        assert run_command(monkeypatch, "llama", tmp_path / "copy") == 0
        output = capsys.readouterr().out
        assert output.startswith(f"{tmp_path / 'copy' / 'llama.py'}\n")
        assert "accelerate_configs/fsdp.yaml llama.py --help" in output
        recipe, components = re.search(
            r"\n([\d,]+) lines of llama.py .* with ([\d,]+) lines in components/\n", output
        ).groups()
        lines_of = {
            path.relative_to(tmp_path / "copy"): len(path.read_text().splitlines())
            for path in (tmp_path / "copy").rglob("*.py")
        }
        assert int(recipe.replace(",", "")) == lines_of.pop(Path("llama.py"))
        assert int(components.replace(",", "")) == sum(lines_of.values())

    def test_an_empty_folder_is_filled(self, tmp_path, monkeypatch):
        assert run_command(monkeypatch, "vit", tmp_path) == 0
        assert (tmp_path / "vit.py").is_file()

    @pytest.mark.parametrize(
        ("recipe", "message"),
        [
            ("lama", "there is no recipe lama; did you mean llama?"),
            ("gpt", "there is no recipe gpt; choose from bert, bert_ner, llama, "),
            ("rows", "there is no recipe rows; "),
        ],
    )
    def test_an_unknown_recipe_is_a_wrong_call(
        self, recipe, message, tmp_path, monkeypatch, capsys
    ):
        assert run_command(monkeypatch, recipe, tmp_path / "copy") == 64
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
        assert not (tmp_path / "copy").exists()

    def test_a_folder_with_files_is_left_as_it_is(self, tmp_path, monkeypatch, capsys):
        (tmp_path / "mine.txt").touch()
        assert run_command(monkeypatch, "llama", tmp_path) == 64
        error = capsys.readouterr().err
        assert "is not empty" in error and error.count("\n") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]

    def test_a_file_is_no_folder(self, tmp_path, monkeypatch, capsys):
        (tmp_path / "mine.txt").touch()
        assert run_command(monkeypatch, "llama", tmp_path / "mine.txt") == 64
        assert "is not a folder" in capsys.readouterr().err

    def test_a_place_that_cannot_be_written_is_named(self, tmp_path, monkeypatch, capsys):
        (tmp_path / "file").touch()
        assert run_command(monkeypatch, "llama", tmp_path / "file" / "copy") == 73
        error = capsys.readouterr().err
        assert error.startswith("error: cannot write to") and error.count("\n") == 1

    def test_a_disk_that_fills_up_ends_in_one_line(self, tmp_path, monkeypatch, capsys):
        def fail(*_):
            raise shutil.Error([("a", "b", "[Errno 28] No space left on device")])

        monkeypatch.setattr(shutil, "copytree", fail)
        assert run_command(monkeypatch, "llama", tmp_path / "copy") == 73
        assert capsys.readouterr().err.count("\n") == 1
