# SPDX-License-Identifier: Apache-2.0
"""A copy of the run's folder in an object store: --output_url s3://BUCKET/RUN, gs:// and others.

    URL/checkpoint-STEP-HASH/    the files of OUTPUT_DIR/checkpoint-STEP; HASH is of its manifest
    URL/FILE                     every other file of OUTPUT_DIR

An object store cannot rename, but an object is there as a whole or not at all. So nothing that a
checkpoint is made of is ever overwritten: the manifest is uploaded last and makes the checkpoint
valid, another checkpoint of the same step has another hash, and old checkpoints are deleted,
manifest first, once a new one is complete. What an upload that was killed has left has no
manifest, and goes with them.

The run trains from and saves to OUTPUT_DIR. A checkpoint is uploaded while training continues. A
store that fails for a while does not end the run: each failure is a warning, the next upload
catches up, and only a run whose result is not in the store at the end has failed.

fsspec (https://filesystem-spec.readthedocs.io) speaks to the store, with the credentials that the
store's own tools use.
"""

import json
import re
import shutil
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import fsspec
import xxhash

from components import checkpoint, folder
from components.exits import Exit
from components.status import fail, write_file

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
NAME = re.compile(r"checkpoint-([0-9]{1,18})-([0-9a-f]{16})")
# The names of errors of the stores' clients, which this module does not import
OUT_OF_REACH = (
    "ClientConnectorError",
    "ConnectTimeoutError",
    "EndpointConnectionError",
    "ReadTimeoutError",
)
NO_CREDENTIALS = ("DefaultCredentialsError", "NoCredentialsError", "PartialCredentialsError")
FETCHED = ".fetched"  # Ends the name of what is being fetched, a checkpoint's folder or a file
WRITE_TEST = ".write_test"


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete checkpoint in the store.

    Attributes:
        step: the number of steps done.
        path: where it is, as fsspec names it.
    """

    step: int
    path: str

    @property
    def name(self) -> str:
        """The name of its folder in the store."""
        return PurePosixPath(self.path).name


class ObjectStore:
    """The copy of one run's folder. One process of a run writes to it; any may fetch from it.

    Attributes:
        url: as given with --output_url.
    """

    def __init__(self, url: str, output_dir: Path) -> None:
        """Know where the copy is; nothing is asked of the store yet. Ends with 64 if no store can
        be at such a URL, or the package that speaks to it is missing.
        """
        problem = find_url_problem(url)
        if problem is not None:
            fail(Exit.USAGE, problem)
        self.url = url.rstrip("/")
        self._files, self._root = fsspec.core.url_to_fs(url)
        self._folder = output_dir
        self._uploader = ThreadPoolExecutor(1)
        self._upload: Future[None] | None = None

    # ---- At the start ----
    def begin(self, dry_run: bool) -> None:
        """Check that the store can be used, and bring what an earlier call has left there.

        A folder without a run gets the files that say how far the run is. Ends with 64, 69 or 73
        if the store cannot be used.

        Args:
            dry_run: only look whether the store answers, and write nothing.
        """
        try:
            if dry_run:
                self._list(self._root)
                return
            self._files.pipe_file(self._path(WRITE_TEST), b"written")
            self._files.rm_file(self._path(WRITE_TEST))
            if not folder.is_of_a_run(self._folder):
                self._bring(include_weights=False)
        except Exception as error:  # Each store has a client with errors of its own.
            fail(*self.describe(error))

    def choose_checkpoint(self, requested: str) -> Path | None:
        """Return the checkpoint to continue from, as `checkpoint.choose_checkpoint` does.

        One in the store that is further than every intact one of the folder is fetched, unless a
        certain one is requested. So is the result of a run that is done. Ends with 64 if
        checkpoints of later steps would be lost, and with 65, 69 or 73 if what is needed cannot be
        fetched.
        """
        for left in self._folder.glob(f"checkpoint-*{FETCHED}"):  # from fetches that were killed
            shutil.rmtree(left, ignore_errors=True)
        try:
            if self._is_done() and not folder.has_result(self._folder):
                self._bring(include_weights=True)
            stored = self.newest()
        except Exception as error:
            fail(*self.describe(error))
        may_fetch = checkpoint.takes_newest(self._folder, requested)
        here = max(checkpoint.checkpoints_in(self._folder), default=0)
        if stored is not None and stored.step > here and may_fetch:
            self.fetch(stored)
        found = checkpoint.choose_checkpoint(self._folder, requested, dry_run=False)
        step = checkpoint.read_progress(found)["step"] if found else 0
        if stored is None or stored.step <= step:
            return found
        if not may_fetch:
            fail(
                Exit.USAGE,
                f"--resume_from_checkpoint {requested}: {self.url} has {stored.name} of a run that "
                "went further: continue from that with auto, or choose another --output_url",
            )
        return self.fetch(stored)  # The newest of the folder was damaged.

    def newest(self) -> StoredCheckpoint | None:
        """Return the complete checkpoint of the latest step; of two of one step, the later."""
        complete = [path for path in self._checkpoints() if self._has_manifest(path)]
        latest = max(map(step_of, complete), default=0)
        of_that_step = [path for path in complete if step_of(path) == latest]
        if not of_that_step:
            return None
        if len(of_that_step) > 1:
            of_that_step.sort(key=lambda path: self._files.modified(manifest_of(path)))
        return StoredCheckpoint(latest, of_that_step[-1])

    def fetch(self, stored: StoredCheckpoint) -> Path:
        """Copy a checkpoint into the output folder, and return its folder there.

        Ends with 65, 69 or 73 if that is not possible.
        """
        print(f"Fetching {stored.name} from {self.url}", flush=True)
        final = self._folder / f"checkpoint-{stored.step}"
        fetched = Path(f"{final}{FETCHED}")
        try:
            fetched.mkdir(parents=True)
            for path in self._list(stored.path):
                self._files.get_file(path, str(fetched / PurePosixPath(path).name))
        except Exception as error:
            fail(*self.describe(error))
        damage = checkpoint.find_damage(fetched)
        if damage is not None:
            fail(
                Exit.DATA,
                f"{self.url}/{stored.name} cannot be trusted: {damage}: delete it to continue from "
                "an earlier one",
            )
        for path in (*fetched.iterdir(), fetched):
            checkpoint.flush(path)
        fetched.rename(final)
        write_file(self._folder / folder.LATEST, final.name)
        return final

    # ---- During training ----
    def start_upload(self, path: Path, limit: int, kept_step: int | None = None) -> None:
        """Upload a checkpoint in the background. `finish_upload` comes before the next.

        Args:
            limit: the newest checkpoints to keep in the store.
            kept_step: the step of a checkpoint that is kept in any case.
        """
        self._upload = self._uploader.submit(self._upload_checkpoint, path, limit, kept_step)

    def wait(self) -> str | None:
        """Wait until the upload has ended. Return why it failed, or None."""
        upload, self._upload = self._upload, None
        if upload is None:
            return None
        error = upload.exception()
        return None if error is None else self.describe(error)[1]

    def finish_upload(self) -> None:
        """Wait until the upload has ended, and print a warning if it failed.

        The checkpoint is whole here, and the next one is uploaded too.
        """
        problem = self.wait()
        if problem is not None:
            print(f"warning: a checkpoint is only in {self._folder}: {problem}", file=sys.stderr)

    # ---- At the end ----
    def upload_result(self) -> tuple[Exit, str] | None:
        """Upload every file of the output folder, weights first and the status last.

        Nothing is uploaded if the store has this status already.

        Returns:
            The exit code for the failure and why, or None.
        """
        try:
            if self._has_same(folder.STATUS):
                return None
            self._delete_replaced()
            for file in sorted(self._own_files(), key=lambda file: order_of_result(file.name)):
                self._put(file, self._path(file.name))
        except Exception as error:
            return self.describe(error)
        return None

    def _delete_replaced(self) -> None:
        """Delete the weights of an earlier result that this one has under other names.

        What loads a folder would take its model.safetensors for the model, whatever is beside it.
        """
        own = {file.name for file in self._own_files()}
        for path in self._list(self._root):
            name = PurePosixPath(path).name
            if (is_weights(name) or name == folder.INDEX) and name not in own:
                self._files.rm_file(path)

    def _upload_checkpoint(self, path: Path, limit: int, kept_step: int | None) -> None:
        """Upload a checkpoint and the files beside it, then delete old checkpoints."""
        for file in self._own_files():
            if not is_weights(file.name):
                self._put(file, self._path(file.name))
        manifest = path / folder.MANIFEST
        place = self._path(f"{path.name}-{xxhash.xxh3_64_hexdigest(manifest.read_bytes())}")
        if not self._has_manifest(place):
            for file in sorted(path.iterdir()):
                if file != manifest:
                    self._put(file, f"{place}/{file.name}")
            self._put(manifest, manifest_of(place))
        self._delete_old(place, limit, kept_step)

    def _delete_old(self, newest: str, limit: int, kept_step: int | None) -> None:
        """Delete all but the newest `limit` checkpoints and that of `kept_step`.

        Another checkpoint of the newest step is deleted too, since this one replaces it, and so is
        what killed uploads and deletions have left.
        """
        existing = self._checkpoints()
        complete = [path for path in existing if self._has_manifest(path)]
        steps = sorted({step_of(path) for path in complete}, reverse=True)
        kept = {*steps[:limit], kept_step}
        for path in existing:
            if path == newest:
                continue
            is_replaced = step_of(path) == step_of(newest)
            if path in complete and step_of(path) in kept and not is_replaced:
                continue
            # Without its manifest a checkpoint is not taken for one, however much is left of it.
            if self._has_manifest(path):
                self._files.rm_file(manifest_of(path))
            self._files.rm(path, recursive=True)

    # ---- Names and files ----
    def _put(self, file: Path, path: str) -> None:
        """Upload one file.

        Raises:
            OSError: if the store has another number of bytes than were sent.
        """
        if is_weights(file.name):
            size = file.stat().st_size
            self._files.put_file(str(file), path)
        else:  # It may be appended to meanwhile.
            content = file.read_bytes()
            size = len(content)
            self._files.pipe_file(path, content)
        self._files.invalidate_cache()
        stored = self._files.info(path)["size"]
        if stored != size:
            raise OSError(f"{file.name} has {size:,} bytes, of which {stored:,} are in the store")

    def _has_same(self, name: str) -> bool:
        """Return whether the store has a small file as it is in the output folder."""
        path = self._path(name)
        return self._files.exists(path) and (
            self._files.cat_file(path) == (self._folder / name).read_bytes()
        )

    def _is_done(self) -> bool:
        """Return whether the status in the store is that of a run that is done."""
        path = self._path(folder.STATUS)
        if not self._files.exists(path):
            return False
        return json.loads(self._files.cat_file(path)).get("state") == "done"

    def _bring(self, include_weights: bool) -> None:
        """Fetch the files beside the checkpoints that the output folder lacks."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._list(self._root):
            name = PurePosixPath(path).name
            is_wanted = include_weights or not is_weights(name)
            if is_wanted and self._files.isfile(path) and not (self._folder / name).exists():
                self._fetch_file(path, self._folder / name)

    def _fetch_file(self, path: str, file: Path) -> None:
        """Fetch a file, which has its name once all of it is there.

        Raises:
            OSError: if fewer bytes came than the store has.
        """
        fetched = file.with_name(f"{file.name}{FETCHED}")
        self._files.get_file(path, str(fetched))
        size = self._files.info(path)["size"]
        if fetched.stat().st_size != size:
            raise OSError(f"of {file.name}, not all of {size:,} bytes came from the store")
        checkpoint.flush(fetched)
        fetched.replace(file)

    def _has_manifest(self, path: str) -> bool:
        """Return whether a checkpoint in the store is complete.

        A listing fails if the store does; `exists` of some stores would return False.
        """
        return manifest_of(path) in self._list(path)

    def _checkpoints(self) -> list[str]:
        """Return where there is a checkpoint or a part of one."""
        return [path for path in self._list(self._root) if NAME.fullmatch(PurePosixPath(path).name)]

    def _list(self, path: str) -> list[str]:
        """Return what is in a folder of the store, nothing if there is no such folder."""
        self._files.invalidate_cache()
        try:
            return [found.rstrip("/") for found in self._files.ls(path, detail=False)]
        except FileNotFoundError:
            return []

    def _own_files(self) -> list[Path]:
        """Return the files of the output folder, those that are being written left out."""
        files = []
        for path in sorted(self._folder.iterdir()):
            is_partial = path.suffix in (".tmp", FETCHED)
            is_own = path.is_file() and not is_partial and path.name != folder.LATEST
            if is_own and not path.name.startswith("."):
                files.append(path)
        return files

    def _path(self, name: str) -> str:
        """Return where an object of the run is."""
        return f"{self._root}/{name}"

    def describe(self, error: BaseException) -> tuple[Exit, str]:
        """Return why an operation on the store failed, in words, and the exit code for that."""
        kind = type(error).__name__
        problem = f"--output_url {self.url}: "
        if kind in OUT_OF_REACH or isinstance(error, ConnectionError | TimeoutError):
            return Exit.NO_HUB, f"{problem}cannot be reached: {error}"
        if kind in NO_CREDENTIALS:
            return Exit.USAGE, f"{problem}{error}: log in with the tools of the store"
        if isinstance(error, PermissionError):
            return Exit.CANNOT_WRITE, f"{problem}permission denied: {error}"
        if isinstance(error, FileNotFoundError):
            return Exit.CANNOT_WRITE, f"{problem}there is no such bucket: {error}"
        return Exit.CANNOT_WRITE, f"{problem}{kind}: {error}"


def step_of(path: str) -> int:
    """Return the step in the name of a stored checkpoint."""
    match = NAME.fullmatch(PurePosixPath(path).name)
    assert match is not None, path
    return int(match[1])


def manifest_of(path: str) -> str:
    """Return where the manifest of a stored checkpoint is."""
    return f"{path}/{folder.MANIFEST}"


def is_weights(name: str) -> bool:
    """Return whether a file of this name is large and never appended to."""
    return name.endswith(".safetensors")


def order_of_result(name: str) -> int:
    """Return where a file has its place in the upload of a result: weights, others, status."""
    if is_weights(name):
        return 0
    return 2 if name == folder.STATUS else 1


def find_url_problem(url: str) -> str | None:
    """Return why --output_url cannot be an object store's, or None. Nothing is asked of a store."""
    protocol, separator, rest = url.partition("://")
    if not separator or not rest.strip("/"):
        return f"--output_url {url}: write it as s3://BUCKET/RUN or gs://BUCKET/RUN"
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError:
        return f"--output_url {url}: pip install {PACKAGES.get(protocol, 'its fsspec package')}"
    except ValueError:
        known = ", ".join(f"{name}://" for name in PACKAGES)
        return f"--output_url {url}: fsspec knows no {protocol}://; it knows {known}"
    return None
