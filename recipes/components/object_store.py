# SPDX-License-Identifier: Apache-2.0
"""A copy of the run's folder in an object store: --output_url s3://BUCKET/RUN, gs:// and others.

    URL/checkpoint-STEP-HASH/    the files of OUTPUT_DIR/checkpoint-STEP; HASH is of its manifest
    URL/FILE                     every other file of OUTPUT_DIR
    URL/weights.sha256           what the weights of the result are to be, as sha256sum writes it
    URL/.run_id                  which run this is the copy of, as in OUTPUT_DIR/.run_id

An object store cannot rename, but an object is there as a whole or not at all. So nothing that a
checkpoint is made of is ever overwritten: the manifest is uploaded last and makes the checkpoint
valid, another checkpoint of the same step has another hash, and old checkpoints are deleted,
manifest first, once a new one is complete. What an upload that was killed has left has no
manifest, and goes with them.

The run trains from and saves to OUTPUT_DIR. A checkpoint is uploaded while training continues, and
training never waits for that: of the checkpoints that become whole during an upload, only the
newest is uploaded next. A store that fails for a while does not end the run: each failure is a
warning, the next upload catches up, and only a run whose result is not in the store at the end has
failed.

Most stores cannot append to an object. So metrics.jsonl is uploaded as a whole with each
checkpoint: some hundred bytes per logged step, which is little beside a checkpoint.

fsspec (https://filesystem-spec.readthedocs.io) speaks to the store, with the credentials that the
store's own tools use.
"""

import hashlib
import json
import re
import shutil
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path, PurePosixPath
from typing import Any

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
# Clients divide a large file among connections of their own, and keep those parts in memory: s3fs
# has ten of 50 MiB for a file.
FILES_AT_ONCE = 4
FETCHED = ".fetched"  # Ends the name of what is being fetched, a checkpoint's folder or a file
WRITE_TEST = ".write_test"
RUN_ID = ".run_id"
CHECKSUMS = "weights.sha256"


class OtherRunError(Exception):
    """The store has the copy of another run."""


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


@dataclass(frozen=True)
class Upload:
    """A checkpoint that is being uploaded, or waits for its turn.

    Attributes:
        name: of its folder.
        step: the number of steps done.
        work: of the thread that uploads.
    """

    name: str
    step: int
    work: Future[None]


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
        options = {"auto_mkdir": True} if url.startswith(("file://", "local://")) else {}
        self._files, self._root = fsspec.core.url_to_fs(url, **options)
        self._folder = output_dir
        self._uploader = ThreadPoolExecutor(1, "uploader")
        self._uploads: list[Upload] = []  # One that is under way, and one that waits
        self._damages: dict[str, str] = {}  # By the name of a checkpoint that has one

    # ---- At the start ----
    def begin(self, dry_run: bool) -> None:
        """Check that the store can be used, and bring what an earlier call has left there.

        A folder without a run gets the files that say how far the run is. Ends with 64, 69 or 73
        if the store cannot be used, or has the copy of another run.

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
            self._claim()
        except Exception as error:  # Each store has a client with errors of its own.
            fail(*self.describe(error))

    def _claim(self) -> None:
        """Note in the store, and in the folder, which run the copy is of.

        Raises:
            OtherRunError: if it is of another one.
        """
        stored = self._stored_run()
        file = self._folder / RUN_ID
        if file.is_file():
            self._check_run()
        else:
            write_file(file, stored or uuid.uuid4().hex)
        if stored is None:
            self._put_content(file.read_bytes(), self._path(RUN_ID))

    def _stored_run(self) -> str | None:
        """Return the id of the run in the store, None if it has none yet."""
        path = self._path(RUN_ID)
        if path not in self._list(self._root):
            return None
        return self._files.cat_file(path).decode()

    def _check_run(self) -> None:
        """Raise OtherRunError if the store has the copy of another run than the folder's.

        Two runs that begin at the same time both find an empty store. The later one has it then,
        and the other one notices that with its next upload.
        """
        file = self._folder / RUN_ID
        stored = self._stored_run()
        if file.is_file() and stored not in (None, file.read_text()):
            raise OtherRunError(f"has the copy of another run than {self._folder}: choose another")

    def bring_newest(self, requested: str) -> None:
        """Fetch the newest checkpoint if it is further than those of the folder.

        It is not fetched if a certain one is requested. One that is damaged is passed over with a
        warning. If the run in the store is further, or is done, the folder gets its files too. Ends
        with 65, 69 or 73 if that is not possible.
        """
        for left in self._folder.glob(f"checkpoint-*{FETCHED}"):  # from fetches that were killed
            shutil.rmtree(left, ignore_errors=True)
        may_fetch = checkpoint.takes_newest(self._folder, requested)
        here = max(checkpoint.checkpoints_in(self._folder), default=0)
        try:
            stored = self.newest()
            is_further = stored is not None and stored.step > here and may_fetch
            if is_further:
                self._take_over()
            elif self._is_done() and not folder.has_result(self._folder):
                self._bring(include_weights=True)
        except Exception as error:
            fail(*self.describe(error))
        if stored is None or not is_further:
            return
        if self._fetch_newest(here) is None and here == 0:
            fail(Exit.DATA, self._describe_damage(stored))

    def has_one_for(self, requested: str) -> bool:
        """Return whether a checkpoint of the store can take the place of damaged ones.

        None does if a certain one is requested. Ends with 69 or 73 if the store cannot be read.
        """
        if not checkpoint.takes_newest(self._folder, requested):
            return False
        return self._newest_or_end() is not None

    def bring_if_further(self, requested: str, found: Path | None) -> Path | None:
        """Return the checkpoint to continue from: that of the store if it is further, and fetched.

        So is the checkpoint of the best evaluation. Ends with 64 if a certain one is requested and
        checkpoints of later steps would be lost, and as `bring_newest` does.

        Args:
            found: the newest of the folder that can be trusted, or None.
        """
        may_fetch = checkpoint.takes_newest(self._folder, requested)
        progress = checkpoint.read_progress(found) if found else {"step": 0}
        if may_fetch:
            self._fetch_best(progress)
        stored = self._newest_or_end()
        if stored is None or stored.step <= progress["step"]:
            return found
        if not may_fetch:
            fail(
                Exit.USAGE,
                f"--resume_from_checkpoint {requested}: {self.url} has {stored.name} of a run that "
                "went further: continue from that with auto, or choose another --output_url",
            )
        fetched = self._fetch_newest(progress["step"])  # The newest of the folder was damaged.
        if fetched is None:
            return found
        self._fetch_best(checkpoint.read_progress(fetched))
        return fetched

    def _newest_or_end(self) -> StoredCheckpoint | None:
        """Return what `newest` does. Ends with 69 or 73 if the store cannot be read."""
        try:
            return self.newest()
        except Exception as error:
            fail(*self.describe(error))

    def newest(self) -> StoredCheckpoint | None:
        """Return the complete checkpoint of the latest step; of two of one step, the later.

        Those that were found damaged are left out.
        """
        complete = []
        for path in self._complete_checkpoints():
            if PurePosixPath(path).name not in self._damages:
                complete.append(path)
        if not complete:
            return None
        return self._latest_of_step(max(map(step_of, complete)), complete)

    def _latest_of_step(self, step: int, complete: Iterable[str]) -> StoredCheckpoint | None:
        """Return a step's checkpoint, the later one if there are two, and None if there is none."""
        of_that_step = [path for path in complete if step_of(path) == step]
        if not of_that_step:
            return None
        if len(of_that_step) > 1:
            of_that_step.sort(key=lambda path: self._files.modified(manifest_of(path)))
        return StoredCheckpoint(step, of_that_step[-1])

    def _take_over(self) -> None:
        """Replace the files beside the checkpoints by those of the store, whose run is further.

        What this folder has of the run is out of date: its status, its metrics, and the result if
        the store has one. The checkpoint is fetched after them, so that a call that is killed
        meanwhile is followed by one that does the same again.
        """
        is_done = self._is_done()
        if is_done:
            for file in self._own_files():
                if is_of_result(file.name):
                    file.unlink()
        self._bring(include_weights=is_done, replace=True)

    def _fetch_best(self, progress: Mapping[str, Any]) -> None:
        """Fetch the checkpoint of the best evaluation so far, where only the store has it.

        Ends as `fetch` does.

        Args:
            progress: of the checkpoint from which the run continues.
        """
        best = progress.get("best")
        if best is None or (self._folder / f"checkpoint-{best['step']}").is_dir():
            return
        try:
            stored = self._latest_of_step(best["step"], self._complete_checkpoints())
        except Exception as error:
            fail(*self.describe(error))
        if stored is not None and self.fetch(stored) is None:
            fail(Exit.DATA, self._describe_damage(stored))

    def _fetch_newest(self, step: int) -> Path | None:
        """Fetch the newest whole checkpoint after a step, and return its folder; None without one.

        Ends as `fetch` does.
        """
        while True:
            stored = self._newest_or_end()
            if stored is None or stored.step <= step:
                return None
            fetched = self.fetch(stored)
            if fetched is not None:
                return fetched

    def fetch(self, stored: StoredCheckpoint) -> Path | None:
        """Copy a checkpoint into the output folder, and return its folder there.

        Returns None, with a warning, if it is damaged. Ends with 69 or 73 if it cannot be copied.
        """
        print(f"Fetching {stored.name} from {self.url}", flush=True)
        final = self._folder / f"checkpoint-{stored.step}"
        fetched = Path(f"{final}{FETCHED}")
        try:
            fetched.mkdir(parents=True)
            self._get(self._list(stored.path), fetched)
        except Exception as error:
            fail(*self.describe(error))
        damage = checkpoint.find_damage(fetched)
        if damage is not None:
            self._damages[stored.name] = damage
            print(f"warning: {self._describe_damage(stored)}", file=sys.stderr, flush=True)
            shutil.rmtree(fetched)
            return None
        checkpoint.flush(fetched)
        fetched.rename(final)
        checkpoint.flush(self._folder)
        newest = max(checkpoint.checkpoints_in(self._folder))
        write_file(self._folder / folder.LATEST, f"checkpoint-{newest}")
        return final

    def _describe_damage(self, stored: StoredCheckpoint) -> str:
        """Return what is wrong with a checkpoint in the store that was found damaged."""
        damage = self._damages[stored.name]
        return (
            f"{self.url}/{stored.name} cannot be trusted: {damage}: delete it to continue without "
            "it"
        )

    # ---- During training ----
    def start_upload(self, path: Path, limit: int, kept_step: int | None = None) -> None:
        """Upload a checkpoint in the background, after the upload that is under way.

        It takes the place of a checkpoint that waits for its turn, which is skipped with a warning.
        So is one whose upload fails.

        Args:
            limit: the newest checkpoints to keep in the store.
            kept_step: the step of a checkpoint that is kept in any case.
        """
        for upload in self._uploads:
            if upload.work.cancel():  # It has not begun.
                self._warn(upload.name, f"an upload was still under way when {path.name} was whole")
        work = self._uploader.submit(self._try_to_upload, path, limit, kept_step)
        under_way = [upload for upload in self._uploads if not upload.work.done()]
        self._uploads = [*under_way, Upload(path.name, step_of_folder(path), work)]

    def steps_to_upload(self) -> set[int]:
        """Return the steps of the checkpoints that the folder must keep until they are uploaded."""
        return {upload.step for upload in self._uploads if not upload.work.done()}

    # ---- At the end ----
    def finish(self, is_done: bool) -> tuple[Exit, str] | None:
        """Wait until all uploads have ended, and upload what the folder has beside checkpoints.

        Args:
            is_done: whether that is the result, without which the run has failed; otherwise a
                failure is a warning.

        Returns:
            The exit code for the failure and why, or None.
        """
        names = [upload.name for upload in self._uploads if not upload.work.done()]
        if names:
            print(f"Uploading {' and '.join(names)} to {self.url}", flush=True)
            wait([upload.work for upload in self._uploads])
        if is_done:
            return self.upload_result()
        try:
            self._upload_small_files()
        except Exception as error:
            self._warn(folder.STATUS, self.describe(error)[1])
        return None

    def upload_result(self) -> tuple[Exit, str] | None:
        """Upload every file of the output folder, weights first and the status last.

        Nothing is uploaded if the store has this status already. An earlier result in the store is
        deleted as far as the upload would make a mixture of two models out of it. The checkpoints
        are there meanwhile.

        Returns:
            The exit code for the failure and why, or None.
        """
        try:
            self._check_run()
            if self._has_same(folder.STATUS):
                return None
            self._delete_replaced()
            files = sorted(self._own_files(), key=lambda file: order_of_result(file.name))
            self._put_content(checksums_of(files).encode(), self._path(CHECKSUMS))
            for file in files:
                self._put(file, self._path(file.name))
        except Exception as error:
            return self.describe(error)
        return None

    def _delete_replaced(self) -> None:
        """Delete what is left of an earlier result, whose parts are not to be loaded with new ones.

        Its status goes first, since it says that there is a result, and then the index, without
        which nobody loads shards, of which some are new. A single file of weights is replaced as a
        whole. If this result has no such file, the old one goes too: what loads a folder would take
        it for the model, whatever is beside it.
        """
        own = {file.name for file in self._own_files()}
        names = {PurePosixPath(path).name for path in self._list(self._root)}
        old_weights = {name for name in names if is_weights(name)} - own
        for name in (folder.STATUS, CHECKSUMS, folder.INDEX, *sorted(old_weights)):
            if name in names:
                self._files.rm_file(self._path(name))

    def _try_to_upload(self, path: Path, limit: int, kept_step: int | None) -> None:
        """Upload a checkpoint, with a warning if that fails: the next one is uploaded too."""
        try:
            self._upload_checkpoint(path, limit, kept_step)
        except Exception as error:
            self._warn(path.name, self.describe(error)[1])

    def _warn(self, name: str, problem: str) -> None:
        text = f"warning: {name} is only in {self._folder}: {problem}"
        print(text, file=sys.stderr, flush=True)

    def _upload_checkpoint(self, path: Path, limit: int, kept_step: int | None) -> None:
        """Upload a checkpoint and the files beside it, then delete old checkpoints.

        A run may replace it meanwhile by another one of its step. Then it is left without a
        manifest, and the other one is uploaded next.
        """
        self._upload_small_files()
        manifest = (path / folder.MANIFEST).read_bytes()
        place = self._path(f"{path.name}-{xxhash.xxh3_64_hexdigest(manifest)}")
        is_there = self._has_manifest(place)
        if not is_there or PurePosixPath(place).name in self._damages:
            for name in sorted(json.loads(manifest)):
                self._put(path / name, f"{place}/{name}")
            if (path / folder.MANIFEST).read_bytes() != manifest:
                return
            self._put_content(manifest, manifest_of(place))
        self._delete_old(place, limit, kept_step)

    def _upload_small_files(self) -> None:
        """Upload the files beside the checkpoints, without weights."""
        self._check_run()
        for file in self._own_files():
            if not is_weights(file.name):
                self._put(file, self._path(file.name))

    def _delete_old(self, newest: str, limit: int, kept_step: int | None) -> None:
        """Delete all but the newest `limit` checkpoints and that of `kept_step`.

        Another checkpoint of the newest step is deleted too, since this one replaces it, and so is
        what killed uploads and deletions have left.
        """
        existing = self._checkpoints()
        complete = self._complete_checkpoints()
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
        if not is_weights(file.name):  # It may be appended to meanwhile.
            self._put_content(file.read_bytes(), path)
            return
        self._files.put_file(str(file), path)
        self._check_size(path, file.stat().st_size)

    def _put_content(self, content: bytes, path: str) -> None:
        """Upload the content of a small file. Raises as `_put` does."""
        self._files.pipe_file(path, content)
        self._check_size(path, len(content))

    def _check_size(self, path: str, size: int) -> None:
        self._files.invalidate_cache()
        stored = self._files.info(path)["size"]
        if stored != size:
            name = PurePosixPath(path).name
            raise OSError(f"{name} has {size:,} bytes, of which {stored:,} are in the store")

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

    def _bring(self, include_weights: bool, replace: bool = False) -> None:
        """Fetch the files beside the checkpoints.

        Args:
            replace: also those that the output folder has.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        wanted = []
        for path in self._list(self._root):
            name = PurePosixPath(path).name
            is_wanted = include_weights or not is_weights(name)
            is_missing = replace or not (self._folder / name).exists()
            is_about_copy = name in (CHECKSUMS, RUN_ID)
            if is_wanted and is_missing and not is_about_copy and self._files.isfile(path):
                wanted.append(path)
        self._get(wanted, self._folder)
        if include_weights:
            self._remove_damaged_weights()

    def _remove_damaged_weights(self) -> None:
        """Remove weights that are not what the store says of them, with a warning.

        The run then makes its result again from its last checkpoint.
        """
        path = self._path(CHECKSUMS)
        if path not in self._list(self._root):  # Older versions did not upload it.
            return
        for line in self._files.cat_file(path).decode().splitlines():
            digest, _, name = line.partition("  ")
            file = self._folder / name
            if file.is_file() and sha256_of(file) != digest:
                file.unlink()
                problem = (
                    f"{self.url}/{name} cannot be trusted: its SHA-256 differs: it is left out"
                )
                print(f"warning: {problem}", file=sys.stderr, flush=True)

    def _get(self, paths: Sequence[str], into: Path) -> None:
        """Fetch files into a folder, some at a time. Raises as `_get_file` does."""
        with ThreadPoolExecutor(FILES_AT_ONCE, "fetcher") as pool:
            list(pool.map(self._get_file, paths, repeat(into)))

    def _get_file(self, path: str, into: Path) -> None:
        """Fetch a file, which has its name once all of it is there.

        Raises:
            OSError: if fewer bytes came than the store has.
        """
        file = into / PurePosixPath(path).name
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

    def _complete_checkpoints(self) -> list[str]:
        """Return where there is a complete checkpoint."""
        return [path for path in self._checkpoints() if self._has_manifest(path)]

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
        if isinstance(error, OtherRunError):
            return Exit.USAGE, f"--output_url {self.url}: {error}"
        kind = type(error).__name__
        problem = f"--output_url {self.url}: "
        if kind in OUT_OF_REACH or isinstance(error, ConnectionError | TimeoutError):
            return Exit.NO_HUB, f"{problem}cannot be reached: {error}"
        if kind in NO_CREDENTIALS:
            return Exit.USAGE, f"{problem}{error}: log in with the tools of the store"
        if isinstance(error, PermissionError):
            return Exit.CANNOT_WRITE, f"{problem}permission denied: {error}"
        if isinstance(error, FileNotFoundError):
            # The store's own words say whether that is a bucket or an object.
            return Exit.CANNOT_WRITE, f"{problem}not found: {error}"
        return Exit.CANNOT_WRITE, f"{problem}{kind}: {error}"


def checksums_of(files: Iterable[Path]) -> str:
    """Return the SHA-256 of each file with weights, a line each, as sha256sum writes them."""
    lines = []
    for file in files:
        if is_weights(file.name):
            lines.append(f"{sha256_of(file)}  {file.name}\n")
    return "".join(lines)


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def step_of(path: str) -> int:
    """Return the step in the name of a stored checkpoint."""
    match = NAME.fullmatch(PurePosixPath(path).name)
    assert match is not None, path
    return int(match[1])


def step_of_folder(path: Path) -> int:
    """Return the step in the name of a checkpoint in the output folder."""
    return int(path.name.removeprefix("checkpoint-"))


def manifest_of(path: str) -> str:
    """Return where the manifest of a stored checkpoint is."""
    return f"{path}/{folder.MANIFEST}"


def is_weights(name: str) -> bool:
    """Return whether a file of this name is large and never appended to."""
    return name.endswith(".safetensors")


def is_of_result(name: str) -> bool:
    """Return whether a file of this name is a part of the result that has to fit the others."""
    return is_weights(name) or name == folder.INDEX


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
