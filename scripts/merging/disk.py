# SPDX-License-Identifier: Apache-2.0
"""What happens where a file cannot be written: one line, and the exit code 73."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from exits import Exit, first_line, stop


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Exit with 73 and one line if something within the context cannot be written.

    Args:
        path: of the file or folder that is written.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None)
        if reason is None:
            reason = first_line(error)
        stop(Exit.CANNOT_WRITE, f"cannot write {path}: {reason}")
