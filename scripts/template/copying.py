# SPDX-License-Identifier: Apache-2.0
"""The files of a copied recipe, and what has changed here since then, merged into a copy."""

import argparse
import ast
import fnmatch
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import metadata
from modulefinder import ModuleFinder
from pathlib import Path

# {engine: the files that only it needs}
ENGINES = {
    "ddp": ("*/ddp.yaml",),
    "fsdp1": ("*/fsdp1_*.yaml",),
    "fsdp2": ("*/fsdp.yaml", "*/fsdp2_*.yaml", "*/hsdp_*.yaml"),
    "deepspeed": ("core/zero.py", "*/deepspeed_*.yaml"),
}
# {extra: the YAML files that only it can run}
EXTRAS = {
    "mesh": ("*/tp.yaml", "*_tp.yaml", "*_cp.yaml", "*/deepspeed_ulysses.yaml"),
    "experts": ("*/ep.yaml", "*_ep.yaml"),
    "pipeline": ("*/pp.yaml",),
}
ORIGIN = "ORIGIN.md"
ORIGIN_TEXT = """# Origin

`{program}` and what it imports were copied from *Accelerate Recipes*, {commit}, with

    python scripts/copy_recipe.py {words} FOLDER

The copy is yours: it runs from this folder and needs nothing else from that repository.
`grep -rn EDIT --include='*.py' .` shows what to adapt first, `core/README.md` what to read, and
`python test_copy.py` whether an edit has broken something.

    pip install -r requirements.txt
    accelerate launch --config_file accelerate_configs/fsdp.yaml {program} --help

A name that begins with `ORIGIN/` in a message or a comment is a file of that repository which was
not copied. There, this merges what has changed since then into the copy:

    git pull && python scripts/copy_recipe.py --update FOLDER
"""
# What a later update reads in ORIGIN.md
COMMIT = re.compile(r"commit ([0-9a-f]{40})")
WORDS = re.compile(r"copy_recipe\.py (.*) FOLDER")
# The end of a recipe's docstring, which may be wrapped anywhere
COPYING = re.compile(
    r"yours:(\s+)python scripts/copy_recipe\.py \w+ my_project, then\s+look for\s+EDIT\."
)
SHIPPED_EXTRAS = re.compile(r"(\bEXTRAS = )\([^)]*\)")
# Not after a character of a path or an address, as in https://example.org/docs/
FILE = re.compile(r"(?<![\w/.-])(recipes|scripts|tests|docs|results|examples)/(?=(\w+))")


def files_of_copy(
    root: Path, name: str, extras: Sequence[str] = (), engines: Sequence[str] = tuple(ENGINES)
) -> dict[str, str]:
    """Return {path in the copy: text}, the recipe first; ORIGIN.md is not among them.

    The recipe keeps its name, which the documents use too. Names of files in comments and messages
    become those of the copy.

    Args:
        root: of this repository, as it is or as it was.
        name: of the recipe, such as "llama".
        extras: folders of extras/ that come along.
        engines: what only other ones need stays behind.
    """
    folder = root / "recipes"
    recipe = folder / f"{name}.py"
    sources = {}
    for path in [recipe, *modules_needed(recipe, extras), *folder.glob("core/*.md")]:
        sources[path.relative_to(folder).as_posix()] = path
    for path in sorted((root / "accelerate_configs").glob("*.yaml")):
        sources[f"accelerate_configs/{path.name}"] = path
    unwanted = [EXTRAS[extra] for extra in EXTRAS.keys() - set(extras)]
    unwanted += [ENGINES[engine] for engine in ENGINES.keys() - set(engines)]
    for pattern in itertools.chain(*unwanted):
        for path in fnmatch.filter(sources, pattern):
            del sources[path]
    sources["requirements.txt"] = root / "requirements.txt"
    sources["test_copy.py"] = root / "scripts" / "template" / "copy_test.py"
    files = {}
    for place, path in sources.items():
        files[place] = rename_files(path.read_text(encoding="utf-8"), name)
    listed = str(tuple(extras)).replace("'", '"')
    files[recipe.name] = SHIPPED_EXTRAS.sub(rf"\g<1>{listed}", files[recipe.name])
    files["test_copy.py"] = files["test_copy.py"].replace("llama.py", recipe.name)
    files["LICENSE"] = (root / "LICENSE").read_text(encoding="utf-8")
    return files


def parser_of_wishes() -> argparse.ArgumentParser:
    """Return the parser of what a copy is to have, for the command line and for ORIGIN.md."""
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("recipe", nargs="?", help="name of a recipe in recipes/, such as llama")
    add("--extras", nargs="*", default=[], metavar="NAME", help="folders of extras/ to take along")
    engines = {"nargs": "+", "default": list(ENGINES), "choices": list(ENGINES)}
    add("--engines", **engines, help="leave out what only other engines need [all]")
    return parser


def rename_files(text: str, recipe: str) -> str:
    """Return a text in which every name of a file holds in the copy of a recipe.

    `recipes/llama.py` becomes `llama.py` in the copy of llama, and names of what is not copied get
    the prefix ORIGIN/, which ORIGIN.md explains: `ORIGIN/scripts/generate.py`.
    """

    def rename(found: re.Match[str]) -> str:
        is_copied = found[1] == "recipes" and found[2] in (recipe, "RECIPE")
        return "" if is_copied else f"ORIGIN/{found[0]}"

    return FILE.sub(rename, COPYING.sub(r"yours:\1look for EDIT.", text))


def origin_of(
    root: Path, name: str, extras: Sequence[str] = (), engines: Sequence[str] = tuple(ENGINES)
) -> str:
    """Return the text of ORIGIN.md."""
    words = [name]
    if extras:
        words += ["--extras", *extras]
    if set(engines) != ENGINES.keys():
        words += ["--engines", *engines]
    return ORIGIN_TEXT.format(
        program=f"{name}.py", commit=describe_commit(root), words=" ".join(words)
    )


def describe_commit(root: Path) -> str:
    """Return which version is copied."""
    if root.name == "accelerate_recipes":  # Installed (scripts/installed/), perhaps in a clone
        origin = metadata.distribution("accelerate-recipes").read_text("direct_url.json") or "{}"
        name = json.loads(origin).get("vcs_info", {}).get("commit_id")
        if name is None:
            return f"version {metadata.version('accelerate-recipes')}"
        return f"commit {name}"
    try:
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


# ---- What a recipe imports ----
def modules_needed(program: Path, extras: Sequence[str] | None = None) -> list[Path]:
    """Return the files beside a program, or in packages beside it, that it reaches by imports.

    Sorted, without the program itself. Imports inside functions count. What is imported by a name
    that is only known when the program runs is not found, but for the extras that a recipe lists.

    Args:
        extras: names of the extras that come along; by default those that it lists.
    """
    finder = ModuleFinder(path=[str(program.parent)])
    finder.run_script(str(program))
    if extras is None:
        extras = extras_of(program)
    for name in extras:
        finder.import_hook(f"extras.{name}.hooks")
    files = {getattr(module, "__file__", None) for module in finder.modules.values()}
    return sorted({Path(file) for file in files if file} - {program})


def extras_of(program: Path) -> tuple[str, ...]:
    """Return the names in EXTRAS of the arguments of a recipe; () for another program."""
    for node in ast.walk(ast.parse(program.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXTRAS":
            return ast.literal_eval(node.value)
    return ()


# ---- Updates ----
def update(root: Path, folder: Path) -> list[str]:
    """Merge, file by file, what has changed since the copy was made. Returns the conflicts.

    A file in which the same lines were changed here and there gets both, marked as git does it.
    Raises ValueError if the folder is no copy.
    """
    path = folder / ORIGIN
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    commit, words = COMMIT.search(text), WORDS.search(text)
    if commit is None or words is None:
        raise ValueError(f"{folder} has no {ORIGIN} that names a commit")
    wanted = parser_of_wishes().parse_args(words[1].split())
    wish = (wanted.recipe, wanted.extras, wanted.engines)
    with tempfile.TemporaryDirectory() as before:
        archive = Path(before, "tree.tar")
        git(root, "archive", f"--output={archive}", commit[1])
        subprocess.run(["tar", "-xf", archive, "-C", before], check=True)
        old = files_of_copy(Path(before), *wish)
    new = files_of_copy(root, *wish)
    conflicts = []
    for name in sorted({*old, *new}):
        path = folder / name
        mine = path.read_text(encoding="utf-8") if path.exists() else None
        merged, is_clean = merge(mine, old.get(name), new.get(name))
        if not is_clean:
            conflicts.append(name)
        if merged is None:
            path.unlink(missing_ok=True)
        elif merged != mine:
            write(folder, {name: merged})
    write(folder, {ORIGIN: origin_of(root, *wish)})
    return conflicts


def merge(mine: str | None, old: str | None, new: str | None) -> tuple[str | None, bool]:
    """Return a file of the copy after an update, None without one, and whether nothing conflicts.

    Args:
        mine: the file as it is in the copy; None if it is not there.
        old: as it was when the copy was made.
        new: as it would be copied now.
    """
    if new in (mine, old):
        return mine, True
    if mine == old:
        return new, True
    if mine is None or new is None or old is None:
        return mine, False
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for label, text in (("yours", mine), ("before", old), ("now", new)):
            paths.append(Path(folder, label))
            paths[-1].write_text(text, encoding="utf-8")
        labels = [word for path in paths for word in ("-L", path.name)]
        done = subprocess.run(
            ["git", "merge-file", "--stdout", *labels, *paths], capture_output=True, text=True
        )
    return done.stdout, done.returncode == 0
