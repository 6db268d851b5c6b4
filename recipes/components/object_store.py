# SPDX-License-Identifier: Apache-2.0
"""A copy of the run's folder in an object store: --output_url s3://BUCKET/RUN, gs:// and others.

The run trains from and saves to OUTPUT_DIR. What is uploaded, fetched and kept, and when, is
decided here. store_protocol.py says of what the copy consists, and store_transport.py moves bytes.

A checkpoint is uploaded while training continues, and training never waits for that: of the
checkpoints that become whole during an upload, only the newest is uploaded next. Old checkpoints
are deleted once a new one is complete, and what uploads that were killed have left goes with them.
A store that fails for a while does not end the run: each failure is a warning, the next upload
catches up, and only a run whose result is not in the store at the end has failed.

Most stores cannot append to an object. So metrics.jsonl is uploaded as a whole with each
checkpoint: some hundred bytes per logged step, which is little beside a checkpoint.
"""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components import folder
from components.store_protocol import OtherRunError, StoredCheckpoint, StoredRun, is_of_result
from components.store_transport import Transport
from components.write_errors import WriteError
from core import checkpoint
from core.exits import Exit, fail

WRITE_TEST = ".write_test"


@dataclass(frozen=True)
class Upload:
    """A checkpoint that is being uploaded, or waits for its turn.

    Attributes:
        path: its folder.
        work: of the thread that uploads.
    """

    path: Path
    work: Future[None]


class ObjectStore:
    """When the copy of one run is written and read. One process of a run writes to it.

    Attributes:
        url: as given with --output_url.
        stored: the copy.
    """

    def __init__(self, url: str, output_dir: Path) -> None:
        """Know where the copy is; nothing is asked of the store yet. Ends with 64 if no store can
        be at such a URL, or the package that speaks to it is missing.
        """
        self._transport = Transport(url)
        self.url = self._transport.url
        self.stored = StoredRun(self._transport, output_dir)
        self._folder = output_dir
        self._uploader = ThreadPoolExecutor(1, "uploader")
        self._uploads: list[Upload] = []  # One that is under way, and one that waits

    # ---- At the start ----
    def connect(self, dry_run: bool) -> None:
        """Check that the store can be used, and bring what an earlier call has left there.

        A folder without a run gets the files that say how far the run is. Ends with 64, 69 or 73
        if the store cannot be used, or has the copy of another run.

        Args:
            dry_run: only look whether the store answers, and write nothing.
        """
        with self._failures_end_the_run():
            if dry_run:
                self._transport.list_folder(self._transport.root)
                return
            self._transport.write_and_remove(WRITE_TEST)
            if not folder.is_of_a_run(self._folder):
                self.stored.fetch_files(include_weights=False)
            self.stored.claim()

    def bring_newest(self, requested: str) -> None:
        """Fetch the newest checkpoint if it is further than those of the folder.

        It is not fetched if a certain one is requested. One that is damaged is passed over with a
        warning. If the run in the store is further, or is done, the folder gets its files too. Ends
        with 65, 69 or 73 if that is not possible.
        """
        self.stored.remove_partly_fetched()
        may_fetch = folder.takes_newest(self._folder, requested)
        here = max(checkpoint.checkpoints_in(self._folder), default=0)
        with self._failures_end_the_run():
            newest = self.stored.newest()
            if newest is not None and newest.step > here and may_fetch:
                self._take_over()
                if self._fetch_newest(here) is None and here == 0:
                    fail(Exit.DATA, self._describe_damage(newest))
            elif self.stored.is_done() and not folder.has_result(self._folder):
                self._fetch_result()

    def has_one_for(self, requested: str) -> bool:
        """Return whether a checkpoint of the store can take the place of damaged ones.

        None does if a certain one is requested. Ends with 69 or 73 if the store cannot be read.
        """
        if not folder.takes_newest(self._folder, requested):
            return False
        with self._failures_end_the_run():
            return self.stored.newest() is not None

    def bring_if_further(self, requested: str, found: Path | None) -> Path | None:
        """Return the checkpoint to continue from: that of the store if it is further, and fetched.

        So is the checkpoint of the best evaluation. Ends with 64 if a certain one is requested and
        checkpoints of later steps would be lost, and as `bring_newest` does.

        Args:
            found: the newest of the folder that can be trusted, or None.
        """
        step = checkpoint.read_progress(found)["step"] if found else 0
        with self._failures_end_the_run():
            if folder.takes_newest(self._folder, requested):
                # If it is further than what was found, the newest of the folder was damaged.
                found = self._fetch_newest(step) or found
                if found is not None:
                    self._fetch_best(checkpoint.read_progress(found))
                return found
            newest = self.stored.newest()
        if newest is not None and newest.step > step:
            fail(
                Exit.USAGE,
                f"--resume_from_checkpoint {requested}: {self.url} has {newest.name} of a run that "
                "went further: continue from that with auto, or choose another --output_url",
            )
        return found

    def _take_over(self) -> None:
        """Replace the files beside the checkpoints by those of the store, whose run is further.

        What this folder has of the run is out of date: its status, its metrics, and the result if
        the store has one. The checkpoint is fetched after them, so that a call that is killed
        meanwhile is followed by one that does the same again.
        """
        if not self.stored.is_done():
            self.stored.fetch_files(include_weights=False, replace=True)
            return
        for file in self.stored.own_files():
            if is_of_result(file.name):
                file.unlink()
        self._fetch_result(replace=True)

    def _fetch_result(self, replace: bool = False) -> None:
        """Fetch all files beside the checkpoints. Damaged weights are left out, with a warning.

        The run then makes its result again from its last checkpoint.

        Args:
            replace: also those that the output folder has.
        """
        self.stored.fetch_files(include_weights=True, replace=replace)
        for name in self.stored.remove_damaged_weights():
            problem = f"{self.url}/{name} cannot be trusted: its SHA-256 differs: it is left out"
            print(f"warning: {problem}", file=sys.stderr, flush=True)

    def _fetch_best(self, progress: Mapping[str, Any]) -> None:
        """Fetch the checkpoint of the best evaluation so far, where only the store has it.

        Ends with 65 if it is damaged.

        Args:
            progress: of the checkpoint from which the run continues.
        """
        best = progress.get("best")
        if best is None or (self._folder / f"checkpoint-{best['step']}").is_dir():
            return
        stored = self.stored.of_step(best["step"])
        if stored is not None and self._fetch(stored) is None:
            fail(Exit.DATA, self._describe_damage(stored))

    def _fetch_newest(self, step: int) -> Path | None:
        """Fetch the newest whole checkpoint after a step. Returns its folder, None without one."""
        while True:
            newest = self.stored.newest()
            if newest is None or newest.step <= step:
                return None
            fetched = self._fetch(newest)
            if fetched is not None:
                return fetched

    def _fetch(self, stored: StoredCheckpoint) -> Path | None:
        """Copy a checkpoint into the output folder, and return its folder there.

        Returns None, with a warning, if it is damaged.
        """
        print(f"Fetching {stored.name} from {self.url}", flush=True)
        fetched = self.stored.fetch_checkpoint(stored)
        if fetched is None:
            print(f"warning: {self._describe_damage(stored)}", file=sys.stderr, flush=True)
        return fetched

    def _describe_damage(self, stored: StoredCheckpoint) -> str:
        """Return what is wrong with a checkpoint in the store that was found damaged."""
        damage = self.stored.damages[stored.name]
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
                why = f"an upload was still under way when {path.name} was whole"
                self._warn(upload.path.name, why)
        work = self._uploader.submit(self._try_to_upload, path, limit, kept_step)
        under_way = [upload for upload in self._uploads if not upload.work.done()]
        self._uploads = [*under_way, Upload(path, work)]

    def steps_to_upload(self) -> set[int]:
        """Return the steps of the checkpoints that the folder must keep until they are uploaded."""
        to_upload = [upload.path for upload in self._uploads if not upload.work.done()]
        return {int(path.name.removeprefix("checkpoint-")) for path in to_upload}

    def _try_to_upload(self, path: Path, limit: int, kept_step: int | None) -> None:
        """Upload a checkpoint, with a warning if that fails: the next one is uploaded too."""
        try:
            self._upload_checkpoint(path, limit, kept_step)
        except Exception as error:  # Each store has a client with errors of its own.
            self._warn(path.name, self._describe(error)[1])

    def _upload_checkpoint(self, path: Path, limit: int, kept_step: int | None) -> None:
        """Upload a checkpoint and the files beside it, then delete old checkpoints."""
        self.stored.upload_small_files()
        uploaded = self.stored.upload_checkpoint(path)
        if uploaded is not None:
            self._delete_old(uploaded, limit, kept_step)

    def _delete_old(self, newest: StoredCheckpoint, limit: int, kept_step: int | None) -> None:
        """Delete all but the newest `limit` checkpoints and that of `kept_step`.

        Another checkpoint of the newest step is deleted too, since this one replaces it, and so is
        what killed uploads and deletions have left.
        """
        existing = self.stored.checkpoints()
        valid = [stored for stored in existing if self.stored.is_valid(stored)]
        steps = sorted({stored.step for stored in valid}, reverse=True)
        kept_steps = {*steps[:limit], kept_step} - {newest.step}
        for stored in existing:
            is_kept = stored in valid and stored.step in kept_steps
            if stored != newest and not is_kept:
                self.stored.delete_checkpoint(stored)

    # ---- At the end ----
    def upload_the_rest(self, is_done: bool) -> tuple[Exit, str] | None:
        """Wait until all uploads have ended, and upload what the folder has beside checkpoints.

        Args:
            is_done: whether that is the result, without which the run has failed; otherwise a
                failure is a warning.

        Returns:
            The exit code for the failure and why, or None.
        """
        names = [upload.path.name for upload in self._uploads if not upload.work.done()]
        if names:
            print(f"Uploading {' and '.join(names)} to {self.url}", flush=True)
            wait([upload.work for upload in self._uploads])
        if is_done:
            return self.upload_result()
        try:
            self.stored.upload_small_files()
        except Exception as error:
            self._warn(folder.STATUS, self._describe(error)[1])
        return None

    def upload_result(self) -> tuple[Exit, str] | None:
        """Upload every file of the output folder.

        Returns:
            The exit code for the failure and why, or None.
        """
        try:
            self.stored.upload_result()
        except Exception as error:
            return self._describe(error)
        return None

    # ---- Failures ----
    @contextlib.contextmanager
    def _failures_end_the_run(self) -> Iterator[None]:
        """End with 64, 69 or 73 if what is done meanwhile fails."""
        try:
            yield
        except Exception as error:
            fail(*self._describe(error))

    def _describe(self, error: Exception) -> tuple[Exit, str]:
        """Return why bringing or uploading a file failed, in words, and the exit code for that."""
        if isinstance(error, OtherRunError):
            return Exit.USAGE, f"--output_url {self.url}: {error}"
        file = getattr(error, "filename", None)
        if isinstance(file, str | Path) and Path(file).is_relative_to(self._folder):
            return Exit.CANNOT_WRITE, f"cannot read or write: {WriteError.of(error)}"
        return self._transport.describe(error)

    def _warn(self, name: str, problem: str) -> None:
        text = f"warning: {name} is only in {self._folder}: {problem}"
        print(text, file=sys.stderr, flush=True)
