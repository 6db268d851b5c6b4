# SPDX-License-Identifier: Apache-2.0
"""Whether a name of a model means a folder on this machine or an id of the hub, as in owner/name.

Asking the hub for a folder that was misspelt costs minutes of retries where there is no network.
"""

from pathlib import Path

from huggingface_hub import constants

RUNS = "runs/"  # where the recipes write unless --output_dir says otherwise


def is_path(name: str) -> bool:
    """Return whether a name can only be a path, since a hub id does not look like that."""
    return name.startswith((".", "/", "~", RUNS)) or name.count("/") > 1


def find_missing(name: str) -> str | None:
    """Return why a model is not asked of the hub although it is no path here; None if it may be.

    Beside a path, this is a name whose first part is a folder here, unless the hub gave it before.
    """
    if Path(name).exists():
        return None
    owner, slash, _ = name.partition("/")
    is_in_folder = slash and Path(owner).is_dir() and not is_in_cache(name, "model")
    return f"{name}: no such folder" if is_path(name) or is_in_folder else None


def is_in_cache(name: str, kind: str) -> bool:
    """Return whether files of a hub id were loaded before.

    Args:
        kind: "model" or "dataset".
    """
    folder = f"{kind}s--" + name.replace("/", "--")
    return Path(constants.HF_HUB_CACHE, folder, "snapshots").is_dir()
