# SPDX-License-Identifier: Apache-2.0
"""The state in a checkpoint as one rank after another reads it, for all of them.

Each file is read by one rank of the run, which sends its tensors to the others, whole and one at a
time. So the file system is asked for each byte once, however many ranks there are, besides rank 0,
which has read all files before to verify their hashes. No rank needs memory for more than one
tensor.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object

from components import checkpoint
from components.owners import share_out


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
        files = checkpoint.sizes_of_state(path)
        readers = share_out(files, accelerator.num_processes)
        own: dict[str, torch.Tensor] = {}
        for file, reader in readers.items():
            if reader == accelerator.process_index:
                own |= checkpoint.read_part(path / file)
        return cls(accelerator, own)

    def reader_of(self, name: str) -> int:
        """Return the rank that reads a tensor; 0 if the checkpoint has none of that name."""
        return self._readers[name][0] if name in self._readers else 0

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
