# SPDX-License-Identifier: Apache-2.0
"""A copy of the run's folder in an object store that fsspec knows: --output_url s3://BUCKET/RUN.

    URL/checkpoint-STEP/    the files of OUTPUT_DIR/checkpoint-STEP
    URL/FILE                every other file of OUTPUT_DIR

A checkpoint is uploaded while training continues, its manifest last, which makes it valid, and
deleted manifest first. Training never waits for an upload: a checkpoint that waits for its turn is
replaced by the next one. A store that fails for a while is a warning; the next upload catches up.
"""

import json
import re
import shutil
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec

from core import checkpoint
from core.checkpoint import MANIFEST
from core.exits import End, Exit, fail
from core.extras import InRun

# Versions before this one added a hash of the manifest
NAME = re.compile(r"checkpoint-([0-9]{1,18})(-[0-9a-f]{16})?")
FILES_AT_ONCE = 4  # Clients divide a large file among connections of their own
FETCHED = ".fetched"  # Ends the name of a checkpoint that is being fetched
STATUS = "status.json"


class ObjectStore(InRun):
    """The copy of one run; only rank 0 asks the store for anything."""

    def __init__(self, args: Any) -> None:
        """Know where the copy is. Ends with 64 if no store can be there."""
        self._url = args.output_url.rstrip("/")
        self._folder = Path(args.output_dir)
        self._limit = args.save_total_limit
        self._begins_anew = args.resume_from_checkpoint == "none"
        options = {"auto_mkdir": True} if self._url.startswith(("file:", "local:")) else {}
        try:
            self._files, self._root = fsspec.core.url_to_fs(self._url, **options)
        except (ImportError, ValueError) as error:
            fail(Exit.USAGE, f"--output_url {self._url}: {error}")
        if "://" not in self._url:
            fail(Exit.USAGE, f"--output_url {self._url}: write it as s3://BUCKET/RUN")
        self._uploader = ThreadPoolExecutor(1, "uploader")
        self._uploads: dict[int, Future[None]] = {}  # by step: one under way, and one that waits

    # ---- At the start ----
    def before_resume(self) -> None:
        """Fetch the newest whole checkpoint of the store if the folder has none that is as new.

        What the folder has beside its checkpoints is then out of date, and is replaced.

        Ends with 64 if a new run would replace the copy of another, and with 69 if the store cannot
        be read and written to.
        """
        try:
            self._files.pipe_file(f"{self._root}/.write_test", b"written")
            self._files.rm_file(f"{self._root}/.write_test")
            stored = self._stored()
        except Exception as error:  # Each store has a client with errors of its own
            raise End(Exit.NO_HUB, self._describe(error)) from error
        if stored and self._begins_anew:
            raise End(Exit.USAGE, f"--output_url {self._url} has the copy of a run: choose another")
        here = max(checkpoint.checkpoints_in(self._folder), default=0)
        for step in sorted(stored, reverse=True):
            if step <= here:
                return
            try:
                is_whole = self._fetch(step, stored[step])
            except Exception as error:
                raise End(Exit.NO_HUB, self._describe(error)) from error
            if is_whole:
                return

    def _stored(self) -> dict[int, str]:
        """Return {step: path} of the valid checkpoints of the store."""
        found = {}
        for path in self._list(self._root):
            match = NAME.fullmatch(path.rpartition("/")[2])
            if match is not None and f"{path}/{MANIFEST}" in self._list(path):
                found[int(match[1])] = path
        return found

    def _list(self, path: str) -> list[str]:
        """Return what is in a folder of the store, nothing if there is no such folder.

        A listing fails if the store does; `exists` of some stores says no.
        """
        self._files.invalidate_cache()
        try:
            return [name.rstrip("/") for name in self._files.ls(path, detail=False)]
        except FileNotFoundError:
            return []

    def _fetch(self, step: int, path: str) -> bool:
        """Bring a checkpoint, and the files beside it, into the output folder.

        Returns:
            Whether it is whole; a damaged one is left out with a warning.
        """
        print(f"Fetching checkpoint-{step} from {self._url}", flush=True)
        fetched = self._folder / f"checkpoint-{step}{FETCHED}"
        shutil.rmtree(fetched, ignore_errors=True)  # Left over from a call that was killed
        fetched.mkdir()
        self._get(self._list(path), fetched)
        damage = checkpoint.find_damage(fetched)
        if damage is not None:
            shutil.rmtree(fetched)
            self._warn(f"checkpoint-{step} of the store cannot be trusted: {damage}")
            return False
        # The result of a run that had gone less far would be taken for that of this one
        (self._folder / STATUS).unlink(missing_ok=True)
        beside = [name for name in self._list(self._root) if self._files.isfile(name)]
        small = [name for name in beside if not name.endswith((".safetensors", f"/{STATUS}"))]
        self._get(small, self._folder)
        checkpoint.flush(fetched)
        fetched.rename(self._folder / f"checkpoint-{step}")
        checkpoint.flush(self._folder)
        return True

    def _get(self, paths: list[str], folder: Path) -> None:
        """Fetch files of the store into a folder."""
        targets = [f"{folder}/{path.rpartition('/')[2]}" for path in paths]
        self._files.get(paths, targets, batch_size=FILES_AT_ONCE)

    # ---- During training ----
    def saved(self, path: Path) -> set[int]:
        """Upload a checkpoint in the background, in place of one that waits for its turn.

        Returns:
            The steps of the checkpoints that the folder must keep until they are uploaded.
        """
        for step, upload in self._uploads.items():
            if upload.cancel():  # It has not begun
                self._warn(f"checkpoint-{step} is only in {self._folder}: the store is too slow")
        under_way = {step: work for step, work in self._uploads.items() if not work.done()}
        step = int(path.name.removeprefix("checkpoint-"))
        self._uploads = under_way | {step: self._uploader.submit(self._try_to_upload, path)}
        return set(self._uploads)

    def _try_to_upload(self, path: Path) -> None:
        try:
            self._upload(path)
        except Exception as error:
            self._warn(f"{path.name} is only in {self._folder}: {self._describe(error)}")

    def _upload(self, path: Path) -> None:
        """Upload a checkpoint and the files beside it, then delete old checkpoints."""
        self._upload_files(with_weights=False)  # First: the metrics of its steps are in them
        target = f"{self._root}/{path.name}"
        manifest = (path / MANIFEST).read_bytes()
        if f"{target}/{MANIFEST}" in self._list(target):
            if self._files.cat_file(f"{target}/{MANIFEST}") == manifest:
                return
            self._files.rm_file(f"{target}/{MANIFEST}")  # It is of another checkpoint of this step
        for name in sorted(json.loads(manifest)):
            self._files.put_file(f"{path / name}", f"{target}/{name}")
        self._files.pipe_file(f"{target}/{MANIFEST}", manifest)
        stored = self._stored()
        for step in sorted(stored, reverse=True)[self._limit :]:
            self._files.rm_file(f"{stored[step]}/{MANIFEST}")
            self._files.rm(stored[step], recursive=True)

    def _upload_files(self, with_weights: bool) -> None:
        """Upload what the folder has beside its checkpoints: weights first, the status last."""
        files = [path for path in self._folder.iterdir() if is_kept(path)]
        for file in sorted(files, key=lambda file: (file.name == STATUS, file.suffix == ".json")):
            if file.suffix != ".safetensors":
                # Its content is read first: a line may be added to it meanwhile
                self._files.pipe_file(f"{self._root}/{file.name}", file.read_bytes())
            elif with_weights:
                self._files.put_file(str(file), f"{self._root}/{file.name}")

    # ---- At the end ----
    def ended(self, is_done: bool) -> str | None:
        """Finish the uploads, and upload the files beside the checkpoints.

        Returns:
            Why the result of a run that is done could not be uploaded, or None.
        """
        if not all(work.done() for work in self._uploads.values()):
            print(f"Uploading to {self._url}", flush=True)
        self._uploader.shutdown(wait=True)
        try:
            status = f"{self._root}/{STATUS}"
            is_there = is_done and status in self._list(self._root)
            if is_there and self._files.cat_file(status) == (self._folder / STATUS).read_bytes():
                return None  # An earlier call has done it
            self._upload_files(with_weights=is_done)
        except Exception as error:
            if is_done:
                return self._describe(error)
            self._warn(self._describe(error))
        return None

    def _describe(self, error: Exception) -> str:
        return f"--output_url {self._url}: {type(error).__name__}: {error}"

    def _warn(self, text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)


def is_kept(path: Path) -> bool:
    """Return whether something in the output folder belongs to the copy beside checkpoints."""
    return path.is_file() and not path.name.startswith(".") and path.suffix != ".tmp"
