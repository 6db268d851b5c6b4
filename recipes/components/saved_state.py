# SPDX-License-Identifier: Apache-2.0
"""The state in a checkpoint as one rank after another reads it, for all of them.

Each file is read by one rank of the run, however many ranks there are. It verifies the file's hash,
and then sends its tensors to the others, whole and one at a time. That reads the file a second
time: from the page cache of the host, as far as that still holds what the host's ranks have
verified, and otherwise from the disk. No rank needs memory for more than one tensor.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from components import checkpoint
from components.ending import end_all_ranks
from components.exits import Exit
from components.folder import MANIFEST
from components.long_calls import call_on_every_rank
from components.shared_folder import appears
from components.status import HOST


class SavedState:
    """The tensors of a checkpoint by name.

    Attributes:
        names: of all tensors, in the same order on every rank.
        own: {name: tensor on the host} of what this rank reads, mapped from its files.
    """

    def __init__(self, accelerator: Accelerator, own: Mapping[str, torch.Tensor]) -> None:
        """Tell the other ranks what this one has to send. Every rank takes part.

        Args:
            own: the tensors that this rank reads; no other rank reads them.
        """
        self.own = own
        self._accelerator = accelerator
        described = {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}
        self._readers: dict[str, tuple[int, Any]] = {}
        for rank, found in enumerate(gather_object([described])):
            for name, kind in found.items():
                self._readers[name] = rank, kind
        self.names = sorted(self._readers)

    @classmethod
    def read(cls, accelerator: Accelerator, path: Path) -> "SavedState":
        """Return the state in the folder of a checkpoint. Every rank takes part."""
        readers = checkpoint.readers_of_state(path, accelerator.num_processes)
        own: dict[str, torch.Tensor] = {}
        for file, reader in readers.items():
            if reader == accelerator.process_index:
                own |= checkpoint.read_part(path / file)
        return cls(accelerator, own)

    def reader_of(self, name: str) -> int:
        """Return the rank that reads a tensor; 0 if the checkpoint has none of that name."""
        return self._readers[name][0] if name in self._readers else 0

    def has_dimensions(self, name: str) -> bool:
        """Return whether a tensor of the checkpoint is more than a number."""
        return len(self._readers[name][1][0]) > 0

    def fetch(self, name: str) -> torch.Tensor:
        """Return a whole tensor, on the device if there are several ranks, else on the host.

        Every rank takes part, and all of them fetch the same tensors in the same order.

        Raises:
            KeyError: if the checkpoint has no such tensor.
        """
        reader, (shape, dtype) = self._readers[name]
        accelerator = self._accelerator
        if accelerator.num_processes == 1:
            return self.own[name]
        if reader == accelerator.process_index:
            whole = self.own[name].to(accelerator.device)
        else:
            whole = torch.empty(shape, dtype=dtype, device=accelerator.device)
        dist.broadcast(whole, src=reader)
        return whole


def verify_candidates(
    accelerator: Accelerator, candidates: Sequence[Path]
) -> dict[Path, str | None]:
    """Return {checkpoint: why it cannot be trusted, or None}, up to the first that can be.

    Every rank takes part. All ranks end with 64 if a host does not see a checkpoint of rank 0's.

    Args:
        candidates: the same on every rank, in the order in which they are tried.
    """
    found: dict[Path, str | None] = {}
    for path in candidates:
        require_on_every_host(accelerator, path)
        found[path] = verify_together(accelerator, path)
        if found[path] is None:
            break
    return found


def verify_together(accelerator: Accelerator, path: Path) -> str | None:
    """Return why a checkpoint cannot be trusted, or None. Each rank looks at what it reads."""
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    look = partial(checkpoint.find_damage, path, rank, num_ranks)
    damages = call_on_every_rank(accelerator, look)
    return next((damage for damage in damages if damage is not None), None)


def require_on_every_host(accelerator: Accelerator, path: Path) -> None:
    """End all ranks with 64 if rank 0 sees a checkpoint's manifest and another host does not."""
    manifest = path / MANIFEST
    if not broadcast_object_list([manifest.is_file()])[0]:
        return
    seen = gather_object([(HOST, appears(manifest))])
    missing = [host for host, is_there in seen if not is_there]
    if missing:
        end_all_ranks(
            accelerator,
            Exit.USAGE,
            f"{path} is not on {missing[0]}: --output_dir must be on a file system that all hosts "
            "share",
        )
