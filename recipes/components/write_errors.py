# SPDX-License-Identifier: Apache-2.0
"""Why a file could not be written, and what helps."""

import errno
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

CURES = {
    errno.ENOSPC: "make room, or choose a folder on another disk",
    errno.EDQUOT: "your quota is used up, however much of the disk is free: delete files of yours, "
    "or ask for a larger quota",
    errno.EFBIG: "no file may be so large there: see `ulimit -f` and the limits of the file system",
    errno.EIO: "the disk, or the connection to it, has failed: see `dmesg`, and choose a folder "
    "on another disk",
    errno.EROFS: "the file system is read-only, as mounted or since an error of the disk (see "
    "`dmesg`): choose another folder",
    errno.EACCES: "change the owner or the mode (`chown`, `chmod`), or choose another folder",
    errno.EPERM: "the file system, or an attribute of a file (`lsattr`), forbids it: choose "
    "another folder",
    errno.ESTALE: "the file server has lost the folder: mount it again",
}
# safetensors has no error numbers, but ends its texts with them.
NUMBER_IN_TEXT = re.compile(r"\(os error ([0-9]+)\)")


@dataclass(frozen=True)
class WriteError:
    """What writing a file raised, in a form that one rank can send to another.

    Attributes:
        text: of the exception.
        number: of the error, as in the module errno; None if the exception has none.
    """

    text: str
    number: int | None

    @classmethod
    def of(cls, error: BaseException) -> "WriteError":
        """Return what an exception says."""
        number = getattr(error, "errno", None)
        in_text = NUMBER_IN_TEXT.search(str(error))
        if number is None and in_text is not None:
            number = int(in_text[1])
        return cls(str(error), number)

    def __str__(self) -> str:
        """Return the text, and what helps where that is known."""
        if self.number not in CURES:
            return self.text
        return f"{self.text}: {CURES[self.number]}"

    def describe(self, folder: Path, nbytes: int) -> str:
        """Return the same, with the bytes that are needed and free if there was no space.

        Args:
            nbytes: the number that was to be written into the folder.
        """
        if self.number != errno.ENOSPC:
            return str(self)
        free = shutil.disk_usage(folder).free
        text = f"{self.text}: it needs {nbytes:,} bytes, {free:,} are free in {folder}"
        if free >= nbytes:
            text += (
                ": others may have freed them since, a checkpoint takes a little more than its "
                "tensors, or there are too many files (`df -i`)"
            )
        return text
