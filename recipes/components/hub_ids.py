# SPDX-License-Identifier: Apache-2.0
"""Whether a name of a model or a data set means a folder on this machine or an id of the hub.

An id has at most one slash, as in owner/name. Asking the hub for a folder that was misspelled costs
minutes of retries where there is no network, so what can be told without it is told here.
"""

import os
from pathlib import Path

from transformers.utils.hub import constants

RUNS = "runs/"  # where the recipes write unless --output_dir says otherwise


def is_path(name: str) -> bool:
    """Return whether a name can only be a path, since a hub id does not look like that."""
    if name.startswith((".", "/", "~", RUNS)):
        return True
    return name.count("/") > 1


def find_missing(name: str, kind: str = "model") -> str | None:
    """Return why a name is not asked of the hub although it is no path here; None if it may be.

    Beside a path, this is a name whose first part is a folder here: runs/tiny is a misspelled
    runs/tiny_text rather than the model `tiny` of an owner `runs`. What was loaded from the hub
    before may still be meant.

    Args:
        kind: "model" or "dataset".
    """
    if Path(name).exists():
        return None
    wanted = "folder" if kind == "model" else "file or folder"
    if name.startswith("~"):  # The shell leaves it in --flag=~/folder
        meant = Path(os.path.expanduser(name))
        if meant.exists():
            return f"{name}: no such {wanted}, since the shell left the ~ in it; write {meant}"
    if is_path(name):
        return f"{name}: no such {wanted}"
    owner, slash, _ = name.partition("/")
    is_in_folder = slash and Path(owner).is_dir()
    if not is_in_folder or is_in_cache(name, kind):
        return None
    return (
        f"{name}: no such {wanted} in {owner}/; if it is on the hub, first run "
        f"hf download {name} --repo-type {kind} --local-dir {name}"
    )


def is_in_cache(name: str, kind: str) -> bool:
    """Return whether files of a hub id were loaded before.

    Args:
        kind: as in `find_missing`.
    """
    folder = f"{kind}s--" + name.replace("/", "--")
    snapshots = Path(constants.HF_HUB_CACHE, folder, "snapshots")
    return snapshots.is_dir()
