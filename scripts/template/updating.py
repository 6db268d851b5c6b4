# SPDX-License-Identifier: Apache-2.0
"""What has changed in this repository since a recipe was copied, merged into the copy."""

import subprocess
import tempfile
from pathlib import Path

from template.copying import COMMIT, ORIGIN, WORDS, files_of_copy, git, origin_of, write


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
    recipe, _, extras = words[1].partition(" --extras ")
    wish = (recipe, extras.split())
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
