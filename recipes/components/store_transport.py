# SPDX-License-Identifier: Apache-2.0
"""Bytes to and from an object store: the only module that calls it.

fsspec (https://filesystem-spec.readthedocs.io) speaks to the store, with the credentials that the
store's own tools use. Which objects there are, and when they are written, is not decided here:
store_protocol.py and object_store.py do that.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path, PurePosixPath

import fsspec

from core import checkpoint
from core.exits import Exit, fail

# The package that fsspec needs for a store, by the beginning of its URLs
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
# The names of classes of errors of the stores' clients, which this module does not import; an error
# may be of a class that is derived from one of these.
OUT_OF_REACH = {
    "ClientConnectionError",  # aiohttp, which gcsfs and adlfs use
    "ConnectionError",  # Python, botocore and requests each have one
    "ReadTimeoutError",  # botocore
    "TimeoutError",
}
NO_CREDENTIALS = {"DefaultCredentialsError", "NoCredentialsError", "PartialCredentialsError"}
# Clients divide a large file among connections of their own, and keep those parts in memory: s3fs
# has ten of 50 MiB for a file.
FILES_AT_ONCE = 4
FETCHED = ".fetched"  # Ends the name of what is being fetched, a checkpoint's folder or a file


class Transport:
    """The objects under one URL. Each store raises errors of its own, which `describe` explains.

    Attributes:
        url: as given with --output_url.
        root: where the objects are, as fsspec names it.
    """

    def __init__(self, url: str) -> None:
        """Know where the objects are; nothing is asked of the store yet. Ends with 64 if no store
        can be at such a URL, or the package that speaks to it is missing.
        """
        problem = find_url_problem(url)
        if problem is not None:
            fail(Exit.USAGE, problem)
        for package in PACKAGES.values():
            logging.getLogger(package).addFilter(drop_traceback)
        self.url = url.rstrip("/")
        options = {"auto_mkdir": True} if url.startswith(("file://", "local://")) else {}
        self._files, self.root = fsspec.core.url_to_fs(url, **options)

    def path(self, name: str) -> str:
        """Return where an object directly under the URL is."""
        return f"{self.root}/{name}"

    # ---- Looking ----
    def list_folder(self, path: str) -> list[str]:
        """Return what is in a folder of the store, nothing if there is no such folder."""
        self._files.invalidate_cache()
        try:
            return [found.rstrip("/") for found in self._files.ls(path, detail=False)]
        except FileNotFoundError:
            return []

    def exists(self, path: str) -> bool:
        """Return whether there is an object. Some stores say no when they fail."""
        return self._files.exists(path)

    def is_file(self, path: str) -> bool:
        """Return whether a path that was listed is an object, and not a folder."""
        return self._files.isfile(path)

    def by_age(self, paths: Sequence[str]) -> list[str]:
        """Return objects, the one that was written first before the others."""
        return sorted(paths, key=self._files.modified)

    # ---- Reading ----
    def read(self, path: str) -> bytes:
        """Return the content of a small object."""
        return self._files.cat_file(path)

    def fetch(self, paths: Sequence[str], into: Path) -> None:
        """Fetch objects into a folder, some at a time.

        Raises:
            OSError: if fewer bytes came than the store has.
        """
        with ThreadPoolExecutor(FILES_AT_ONCE, "fetcher") as pool:
            list(pool.map(self._fetch_one, paths, repeat(into)))

    def _fetch_one(self, path: str, into: Path) -> None:
        """Fetch an object. The file has its name once all of it is there and flushed."""
        file = into / PurePosixPath(path).name
        fetched = file.with_name(f"{file.name}{FETCHED}")
        self._files.get_file(path, str(fetched))
        size = self._files.info(path)["size"]
        if fetched.stat().st_size != size:
            raise OSError(f"of {file.name}, not all of {size:,} bytes came from the store")
        checkpoint.flush(fetched)
        fetched.replace(file)

    # ---- Changing ----
    def put_file(self, file: Path, path: str) -> None:
        """Upload a large file, which must not change meanwhile.

        Raises:
            OSError: if the store has another number of bytes than were sent.
        """
        self._files.put_file(str(file), path)
        self._check_size(path, file.stat().st_size)

    def put_content(self, content: bytes, path: str) -> None:
        """Upload the content of a small file. Raises as `put_file` does."""
        self._files.pipe_file(path, content)
        self._check_size(path, len(content))

    def _check_size(self, path: str, size: int) -> None:
        self._files.invalidate_cache()
        stored = self._files.info(path)["size"]
        if stored != size:
            name = PurePosixPath(path).name
            raise OSError(f"{name} has {size:,} bytes, of which {stored:,} are in the store")

    def write_and_remove(self, name: str) -> None:
        """Raise what the store's client raises if the store cannot be written to."""
        self._files.pipe_file(self.path(name), b"written")
        self._files.rm_file(self.path(name))

    def remove(self, path: str) -> None:
        """Delete an object."""
        self._files.rm_file(path)

    def remove_folder(self, path: str) -> None:
        """Delete all objects in a folder."""
        self._files.rm(path, recursive=True)

    # ---- Failures ----
    def describe(self, error: BaseException) -> tuple[Exit, str]:
        """Return why an operation on the store failed, in words, and the exit code for that."""
        kinds = {kind.__name__ for kind in type(error).__mro__}
        problem = f"--output_url {self.url}: "
        if kinds & OUT_OF_REACH:
            return Exit.NO_HUB, f"{problem}cannot be reached: {error}"
        if kinds & NO_CREDENTIALS:
            return Exit.USAGE, f"{problem}{error}: log in with the tools of the store"
        if is_about_endpoint(error):
            fix = "write AWS_ENDPOINT_URL, or endpoint_url in ~/.aws/config, as https://HOST:PORT"
            return Exit.USAGE, f"{problem}{error}: {fix}"
        if isinstance(error, PermissionError):
            return Exit.CANNOT_WRITE, f"{problem}permission denied: {error}"
        if isinstance(error, FileNotFoundError):
            # The store's own words say whether that is a bucket or an object.
            return Exit.CANNOT_WRITE, f"{problem}not found: {error}"
        return Exit.CANNOT_WRITE, f"{problem}{type(error).__name__}: {error}"


def is_about_endpoint(error: BaseException) -> bool:
    """Return whether botocore cannot read the address of the store that the user has set.

    It raises a ValueError for one without http:// or https://, and a class of its own for another
    scheme.
    """
    if isinstance(error, ValueError):
        return str(error).startswith("Invalid endpoint")
    return type(error).__name__ == "EndpointResolutionError"


def drop_traceback(record: logging.LogRecord) -> bool:
    """Keep what a store's client logs to one line: it raises the error too, which is explained."""
    record.exc_info = None
    return True


def find_url_problem(url: str) -> str | None:
    """Return why --output_url cannot be an object store's, or None. Nothing is asked of a store."""
    protocol, separator, rest = url.partition("://")
    if not separator or not rest.strip("/"):
        return f"--output_url {url}: write it as s3://BUCKET/RUN or gs://BUCKET/RUN"
    if protocol == "memory":
        return (
            f"--output_url {url}: a copy there is lost when the run ends: choose s3://BUCKET/RUN "
            "or the like"
        )
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError:
        return f"--output_url {url}: pip install {PACKAGES.get(protocol, 'its fsspec package')}"
    except ValueError:
        known = ", ".join(f"{name}://" for name in PACKAGES)
        return f"--output_url {url}: fsspec knows no {protocol}://; it knows {known}"
    return None
