# SPDX-License-Identifier: Apache-2.0
"""What the copy of a run in an object store consists of, and in which order it is written.

    URL/checkpoint-STEP-HASH/    the files of OUTPUT_DIR/checkpoint-STEP; HASH is of its manifest
    URL/FILE                     every other file of OUTPUT_DIR
    URL/weights.sha256           what the weights of the result are to be, as sha256sum writes it
    URL/.run_id                  which run this is the copy of, as in OUTPUT_DIR/.run_id

An object store cannot rename, but an object is there as a whole or not at all. So nothing that a
checkpoint is made of is ever overwritten: the manifest is uploaded last and makes the checkpoint
valid, another checkpoint of the same step has another hash, and a checkpoint is deleted manifest
first. What an upload that was killed has left has no manifest, and is not taken for a checkpoint.

Which checkpoints are uploaded, fetched and kept, and when, object_store.py decides.
"""

import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import xxhash

from components import folder
from components.store_transport import FETCHED, Transport
from core import checkpoint
from core.stop import write_whole

NAME = re.compile(r"checkpoint-([0-9]{1,18})-([0-9a-f]{16})")
RUN_ID = ".run_id"
CHECKSUMS = "weights.sha256"


class OtherRunError(Exception):
    """The store has the copy of another run."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint in the store, or a part of one.

    Attributes:
        path: where it is, as fsspec names it.
    """

    path: str

    @property
    def name(self) -> str:
        """The name of its folder in the store."""
        return PurePosixPath(self.path).name

    @property
    def step(self) -> int:
        """The number of steps done."""
        match = NAME.fullmatch(self.name)
        assert match is not None, self.path
        return int(match[1])

    @property
    def manifest(self) -> str:
        """Where its manifest is."""
        return f"{self.path}/{folder.MANIFEST}"


class StoredRun:
    """The copy of one run's folder. One process of a run writes to it; any may fetch from it.

    Attributes:
        damages: {name of a checkpoint: why it cannot be trusted} of those that were fetched.
    """

    def __init__(self, transport: Transport, output_dir: Path) -> None:
        self.damages: dict[str, str] = {}
        self._transport = transport
        self._folder = output_dir

    # ---- Which run it is ----
    def claim(self) -> None:
        """Note in the store, and in the folder, which run the copy is of.

        Raises:
            OtherRunError: if it is of another one.
        """
        stored = self._stored_id()
        file = self._folder / RUN_ID
        if file.is_file():
            self.require_same_run()
        else:
            write_whole(file, stored or uuid.uuid4().hex)
        if stored is None:
            self._transport.put_content(file.read_bytes(), self._transport.path(RUN_ID))

    def require_same_run(self) -> None:
        """Raise OtherRunError if the store has the copy of another run than the folder's.

        Two runs that begin at the same time both find an empty store. The later one has it then,
        and the other one notices that with its next upload.
        """
        file = self._folder / RUN_ID
        if file.is_file() and self._stored_id() not in (None, file.read_text()):
            raise OtherRunError(f"has the copy of another run than {self._folder}: choose another")

    def _stored_id(self) -> str | None:
        """Return the id of the run in the store, None if it has none yet."""
        path = self._transport.path(RUN_ID)
        if path not in self._objects():
            return None
        return self._transport.read(path).decode()

    def is_done(self) -> bool:
        """Return whether the status in the store is that of a run that is done."""
        path = self._transport.path(folder.STATUS)
        if not self._transport.exists(path):
            return False
        return json.loads(self._transport.read(path)).get("state") == "done"

    # ---- Checkpoints ----
    def checkpoints(self) -> list[StoredCheckpoint]:
        """Return the checkpoints and the parts of checkpoints."""
        found = [StoredCheckpoint(path) for path in self._objects()]
        return [stored for stored in found if NAME.fullmatch(stored.name)]

    def is_valid(self, stored: StoredCheckpoint) -> bool:
        """Return whether a checkpoint is complete.

        A listing fails if the store does; `exists` of some stores would return False.
        """
        return stored.manifest in self._transport.list_folder(stored.path)

    def newest(self) -> StoredCheckpoint | None:
        """Return the valid checkpoint of the latest step; of two of one step, the later.

        Those that were found damaged are left out.
        """
        valid = []
        for stored in self.checkpoints():
            if self.is_valid(stored) and stored.name not in self.damages:
                valid.append(stored)
        if not valid:
            return None
        latest = max(stored.step for stored in valid)
        return self._later_one([stored for stored in valid if stored.step == latest])

    def of_step(self, step: int) -> StoredCheckpoint | None:
        """Return the valid checkpoint of a step, the later one if there are two, or None."""
        valid = []
        for stored in self.checkpoints():
            if stored.step == step and self.is_valid(stored):
                valid.append(stored)
        return self._later_one(valid) if valid else None

    def _later_one(self, of_one_step: list[StoredCheckpoint]) -> StoredCheckpoint:
        """Return the one that became valid last."""
        if len(of_one_step) == 1:  # The store need not be asked.
            return of_one_step[0]
        by_manifest = {stored.manifest: stored for stored in of_one_step}
        return by_manifest[self._transport.by_age([*by_manifest])[-1]]

    def fetch_checkpoint(self, stored: StoredCheckpoint) -> Path | None:
        """Copy a checkpoint into the output folder, where it has its name once it is verified.

        Returns:
            Its folder there; None if it is damaged, and then `damages` says how.
        """
        final = self._folder / f"checkpoint-{stored.step}"
        fetched = Path(f"{final}{FETCHED}")
        fetched.mkdir(parents=True)
        self._transport.fetch(self._transport.list_folder(stored.path), fetched)
        damage = checkpoint.find_damage(fetched)
        if damage is not None:
            self.damages[stored.name] = damage
            shutil.rmtree(fetched)
            return None
        checkpoint.flush(fetched)
        fetched.rename(final)
        checkpoint.flush(self._folder)
        newest = max(checkpoint.checkpoints_in(self._folder))
        write_whole(self._folder / folder.LATEST, f"checkpoint-{newest}")
        return final

    def remove_partly_fetched(self) -> None:
        """Delete what fetches of checkpoints that were killed have left in the output folder."""
        for left in self._folder.glob(f"checkpoint-*{FETCHED}"):
            shutil.rmtree(left, ignore_errors=True)

    def upload_checkpoint(self, path: Path) -> StoredCheckpoint | None:
        """Upload a checkpoint of the output folder, unless it is there, and return it.

        A run may replace it meanwhile by another one of its step. Then it is left without a
        manifest, and None is returned.
        """
        manifest = (path / folder.MANIFEST).read_bytes()
        hashed = xxhash.xxh3_64_hexdigest(manifest)
        stored = StoredCheckpoint(self._transport.path(f"{path.name}-{hashed}"))
        if self.is_valid(stored) and stored.name not in self.damages:
            return stored
        for name in sorted(json.loads(manifest)):
            self._upload(path / name, f"{stored.path}/{name}")
        if (path / folder.MANIFEST).read_bytes() != manifest:
            return None
        self._transport.put_content(manifest, stored.manifest)
        return stored

    def delete_checkpoint(self, stored: StoredCheckpoint) -> None:
        """Delete a checkpoint, or what is left of it."""
        # Without its manifest it is not taken for a checkpoint, however much is left of it.
        if self.is_valid(stored):
            self._transport.remove(stored.manifest)
        self._transport.remove_folder(stored.path)

    # ---- Files beside the checkpoints ----
    def upload_small_files(self) -> None:
        """Upload the files beside the checkpoints, without weights."""
        self.require_same_run()
        for file in self.own_files():
            if not is_weights(file.name):
                self._upload(file, self._transport.path(file.name))

    def upload_result(self) -> None:
        """Upload every file of the output folder, weights first and the status last.

        Nothing is uploaded if the store has this status already. An earlier result in the store is
        deleted as far as the upload would make a mixture of two models out of it. The checkpoints
        are there meanwhile.
        """
        self.require_same_run()
        if self.has_same(folder.STATUS):
            return
        self._delete_replaced()
        files = sorted(self.own_files(), key=lambda file: order_of_result(file.name))
        checksums = checksums_of(files).encode()
        self._transport.put_content(checksums, self._transport.path(CHECKSUMS))
        for file in files:
            self._upload(file, self._transport.path(file.name))

    def _delete_replaced(self) -> None:
        """Delete what is left of an earlier result, whose parts are not to be loaded with new ones.

        Its status goes first, since it says that there is a result, and then the index, without
        which nobody loads shards, of which some are new. A single file of weights is replaced as a
        whole. If this result has no such file, the old one goes too: what loads a folder would take
        it for the model, whatever is beside it.
        """
        own = {file.name for file in self.own_files()}
        names = {PurePosixPath(path).name for path in self._objects()}
        old_weights = {name for name in names if is_weights(name)} - own
        for name in (folder.STATUS, CHECKSUMS, folder.INDEX, *sorted(old_weights)):
            if name in names:
                self._transport.remove(self._transport.path(name))

    def has_same(self, name: str) -> bool:
        """Return whether the store has a small file as it is in the output folder."""
        path = self._transport.path(name)
        return self._transport.exists(path) and (
            self._transport.read(path) == (self._folder / name).read_bytes()
        )

    def fetch_files(self, include_weights: bool, replace: bool = False) -> None:
        """Fetch the files beside the checkpoints.

        Args:
            replace: also those that the output folder has.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        wanted = []
        for path in self._objects():
            name = PurePosixPath(path).name
            is_wanted = include_weights or not is_weights(name)
            is_missing = replace or not (self._folder / name).exists()
            is_about_copy = name in (CHECKSUMS, RUN_ID)
            if is_wanted and is_missing and not is_about_copy and self._transport.is_file(path):
                wanted.append(path)
        self._transport.fetch(wanted, self._folder)

    def remove_damaged_weights(self) -> list[str]:
        """Remove fetched weights that are not as they were uploaded, and return their names."""
        path = self._transport.path(CHECKSUMS)
        if path not in self._objects():  # Older versions did not upload it.
            return []
        removed = []
        for line in self._transport.read(path).decode().splitlines():
            digest, _, name = line.partition("  ")
            file = self._folder / name
            if file.is_file() and sha256_of(file) != digest:
                file.unlink()
                removed.append(name)
        return removed

    def own_files(self) -> list[Path]:
        """Return the files of the output folder, those that are being written left out."""
        files = []
        for path in sorted(self._folder.iterdir()):
            is_partial = path.suffix in (".tmp", FETCHED)
            is_own = path.is_file() and not is_partial and path.name != folder.LATEST
            if is_own and not path.name.startswith("."):
                files.append(path)
        return files

    def _objects(self) -> list[str]:
        """Return what is directly under the URL."""
        return self._transport.list_folder(self._transport.root)

    def _upload(self, file: Path, path: str) -> None:
        """Upload a file. The content of a small one, which may be appended to, is read first."""
        if is_weights(file.name):
            self._transport.put_file(file, path)
        else:
            self._transport.put_content(file.read_bytes(), path)


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
