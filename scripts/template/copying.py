# SPDX-License-Identifier: Apache-2.0
"""The files of a copied recipe."""

import re
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from template.imports import modules_needed
from template.names import rename_files

# {engine: the files of the core, and the YAML files, that only it needs}
ENGINES = {
    "ddp": ((), ("ddp",)),
    "fsdp1": ((), ("fsdp1_*",)),
    "fsdp2": ((), ("fsdp", "fsdp2_*", "hsdp_*")),
    "deepspeed": (("core/zero.py",), ("deepspeed_*",)),
}
# {extra: the YAML files that only it can run}
EXTRAS = {
    "mesh": ("tp", "*_tp", "*_cp", "deepspeed_ulysses"),
    "experts": ("ep", "*_ep"),
    "pipeline": ("pp",),
}
LIBRARIES = "torch accelerate transformers datasets peft bitsandbytes deepspeed".split()
ORIGIN = "ORIGIN.md"
ORIGIN_TEXT = """# Origin

`{program}` and what it imports were copied from *Accelerate Recipes*, {commit}, with

    python scripts/copy_recipe.py {words} FOLDER

and {versions}. The copy is yours: it runs from this folder and needs nothing else from that
repository. `grep -rn EDIT --include='*.py' .` shows what to adapt first, `core/README.md` what to
read, and `python test_copy.py` whether an edit has broken something.

    pip install -r requirements.txt
    accelerate launch --config_file accelerate_configs/fsdp.yaml {program} --help

A name that begins with `ORIGIN/` in a message or a comment is a file of that repository which was
not copied. There, this merges what has changed since then into the copy:

    git pull && python scripts/copy_recipe.py --update FOLDER
"""
# What a later update reads in ORIGIN.md
COMMIT = re.compile(r"commit ([0-9a-f]{40})")
WORDS = re.compile(r"copy_recipe\.py (.*) FOLDER")


@dataclass(frozen=True)
class Wish:
    """What a copy is to have.

    Attributes:
        recipe: its name, such as "llama".
        extras: folders of extras/ that it takes along.
        engines: of ENGINES; what only others need stays behind.
    """

    recipe: str
    extras: tuple[str, ...] = ()
    engines: tuple[str, ...] = tuple(ENGINES)

    def words(self) -> list[str]:
        """Return the words of the command line that say it."""
        words = [self.recipe]
        if self.extras:
            words += ["--extras", *self.extras]
        if self.engines != tuple(ENGINES):
            words += ["--engines", *self.engines]
        return words


def find_recipes(root: Path) -> dict[str, Path]:
    """Return the recipes of a repository by name: the files in recipes/ that are programs."""
    recipes = {}
    for path in sorted((root / "recipes").glob("*.py")):
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8"):
            recipes[path.stem] = path
    return recipes


def files_of_copy(root: Path, wish: Wish) -> dict[str, str]:
    """Return {path in the copy: text}, the recipe first; ORIGIN.md is not among them.

    The recipe keeps its name, which the documents use too. Names of files in comments and messages
    become those of the copy.

    Args:
        root: of this repository, as it is or as it was.
    """
    folder = root / "recipes"
    recipe = folder / f"{wish.recipe}.py"
    left_out = [ENGINES[engine] for engine in ENGINES if engine not in wish.engines]
    left_behind = {module for modules, _ in left_out for module in modules}
    sources = {}
    for path in [recipe, *modules_needed(recipe, wish.extras), *folder.glob("core/*.md")]:
        name = path.relative_to(folder).as_posix()
        if name not in left_behind:
            sources[name] = path
    unwanted = [pattern for _, patterns in left_out for pattern in patterns]
    for extra in EXTRAS.keys() - set(wish.extras):
        unwanted += EXTRAS[extra]
    for path in sorted((root / "accelerate_configs").glob("*.yaml")):
        if not any(path.match(f"{pattern}.yaml") for pattern in unwanted):
            sources[f"accelerate_configs/{path.name}"] = path
    sources["requirements.txt"] = root / "requirements.txt"
    sources["test_copy.py"] = root / "scripts" / "template" / "copy_test.py"
    files = {}
    for name, path in sources.items():
        files[name] = rename_files(path.read_text(encoding="utf-8"), wish.recipe)
    files[recipe.name] = with_extras(files[recipe.name], wish.extras)
    files["test_copy.py"] = files["test_copy.py"].replace("llama.py", recipe.name)
    files["LICENSE"] = (root / "LICENSE").read_text(encoding="utf-8")
    return files


def with_extras(text: str, extras: tuple[str, ...]) -> str:
    """Return the text of a recipe with other EXTRAS."""
    listed = str(extras).replace("'", '"')
    return re.sub(r"(\bEXTRAS = )\([^)]*\)", rf"\g<1>{listed}", text)


def origin_of(root: Path, wish: Wish) -> str:
    """Return the text of ORIGIN.md."""
    versions = [f"{name} {metadata.version(name)}" for name in LIBRARIES]
    return ORIGIN_TEXT.format(
        program=f"{wish.recipe}.py",
        commit=describe_commit(root),
        words=" ".join(wish.words()),
        versions=", ".join(versions),
    )


def describe_commit(root: Path) -> str:
    """Return which version is copied."""
    try:
        # A folder without .git may be inside another repository, whose commit means nothing here
        if git(root, "rev-parse", "--show-prefix").strip():
            return "an unknown version, since git has no commit of it"
        name, date = git(root, "log", "-1", "--format=%H %cs").split()
        changes = git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "an unknown version, since git has no commit of it"
    return f"commit {name} of {date}{', with changes that were not committed' if changes else ''}"


def git(root: Path, *words: str) -> str:
    """Return what a git command prints about a folder."""
    done = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
    )
    return done.stdout


def write(folder: Path, files: dict[str, str]) -> None:
    """Write files into a folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
