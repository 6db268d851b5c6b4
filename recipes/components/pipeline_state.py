# SPDX-License-Identifier: Apache-2.0
"""Tensors by name of all stages of a pipeline, gathered on rank 0, whole and one at a time."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object

from components.owners import whole_of


def parts_of_stages(
    accelerator: Accelerator, own: Iterable[tuple[str, Any]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each name of any rank and its whole tensor, on the host of rank 0; nothing elsewhere.

    Every rank must iterate over all of them. Besides what it has, rank 0 needs memory for one
    tensor on its device. What several ranks have comes from the first of them.

    Args:
        own: what this rank has: names, and numbers, tensors or shards of them. Ranks that have
            shards of a tensor have the same names in the same order.
    """
    tensors = {name: torch.as_tensor(value) for name, value in own}
    described = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    rank = accelerator.process_index
    sent: set[str] = set()
    for owner, shapes in enumerate(gather_object([described])):
        for name, (shape, dtype) in shapes.items():
            is_shared = name in sent
            sent.add(name)
            if is_shared:
                continue
            mine = whole_of(tensors[name]) if name in tensors else None
            if rank == 0 and owner == 0:
                assert mine is not None
                yield name, mine.cpu()
            elif rank == owner:
                assert mine is not None
                dist.send(mine.to(accelerator.device).contiguous(), dst=0)
            elif rank == 0:
                received = torch.empty(shape, dtype=dtype, device=accelerator.device)
                dist.recv(received, src=owner)
                yield name, received.cpu()
