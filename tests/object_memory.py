# SPDX-License-Identifier: Apache-2.0
"""An object store in the memory of this process, as objects://BUCKET/RUN.

fsspec's own memory:// is refused, since a run that copies itself there loses the copy when it ends.
"""

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

URL = "objects://bucket/run"


class Objects(MemoryFileSystem):
    """fsspec's store in memory under another name."""

    protocol = "objects"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("objects://"))


fsspec.register_implementation("objects", Objects, clobber=True)
