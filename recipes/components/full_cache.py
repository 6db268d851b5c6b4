# SPDX-License-Identifier: Apache-2.0
"""Say that a cache of models or rows has no room.

Libraries wrap the error of the disk in exceptions of their own, which would look like rows or a
model that cannot be used.
"""

import errno
import os
import shutil
from collections.abc import Mapping

from huggingface_hub import constants

from core.exits import Exit, fail

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def end_if_cache_is_full(name: str, error: BaseException, of_rows: bool) -> None:
    """End with 73 if an exception, or one of its causes, says that a disk takes no more.

    Args:
        name: what was read: a file, a folder or a hub id.
        of_rows: whether rows were read, which have a cache beside that of downloads.
    """
    number = find_no_room(error)
    if number is None:
        return
    caches = {"HF_HUB_CACHE": constants.HF_HUB_CACHE}
    if of_rows:
        import datasets

        caches["HF_DATASETS_CACHE"] = str(datasets.config.HF_DATASETS_CACHE)
    variable = find_fullest(caches)
    fail(
        Exit.CANNOT_WRITE,
        f"{name}: the cache {caches[variable]} cannot take it: {os.strerror(number)}: make room "
        f"there, or name another folder by the environment variable {variable}",
    )


def find_no_room(error: BaseException | None) -> int | None:
    """Return the number of the error of a disk that takes no more, or None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return error.errno
        error = error.__cause__ or error.__context__
    return None


def find_fullest(folders: Mapping[str, str]) -> str:
    """Return the name of the folder whose disk has the least room.

    Args:
        folders: {name: path}; those that do not exist have all the room, as nothing was written.
    """
    free = {}
    for name, folder in folders.items():
        free[name] = shutil.disk_usage(folder).free if os.path.isdir(folder) else float("inf")
    return min(free, key=free.__getitem__)
