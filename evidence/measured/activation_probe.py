# SPDX-License-Identifier: Apache-2.0
"""In a rank of a rehearsal: the bytes that autograd keeps between forward and backward pass."""

import json
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from rehearsal.step_hooks import when_prepared


class SavedTensors:
    """Counts what the ops of a forward pass keep for the backward pass, each storage once.

    Weights are left out: a rank holds or gathers them whether it computes or not.
    """

    def __init__(self, model: Module) -> None:
        self.model = model
        self.sizes: dict[int, int] = {}  # {address of a storage: its bytes}
        self.hooks = saved_tensors_hooks(self.keep, lambda tensor: tensor)

    def __enter__(self) -> "SavedTensors":
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.hooks.__exit__(*error)

    @property
    def bytes(self) -> int:
        """The bytes of all storages so far."""
        return sum(self.sizes.values())

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that an op keeps; return what stands for it until the backward pass."""
        storage = storage_of(tensor)
        if storage.data_ptr() not in self.addresses_of_weights():
            self.sizes[storage.data_ptr()] = storage.nbytes()
        # The result of an op that refers to itself by its node would never be freed.
        return tensor if tensor.is_leaf else tensor.detach()

    def addresses_of_weights(self) -> set[int]:
        """Return where the weights are now: sharded engines gather them layer by layer."""
        return {storage_of(weight).data_ptr() for weight in self.model.parameters()}


def storage_of(tensor: torch.Tensor | Parameter) -> torch.UntypedStorage:
    """Return the storage that this rank has of a tensor."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.untyped_storage()


class Probe:
    """Measures each forward pass of training, and writes {tokens of this rank: bytes}."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.saved: SavedTensors | None = None
        self.found: dict[int, int] = {}

    def begin(self, model: Module, *_: Any) -> None:
        """Called before each forward pass."""
        if torch.is_grad_enabled():
            self.saved = SavedTensors(model)
            self.saved.__enter__()

    def end(self, model: Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Called after each forward pass."""
        if self.saved is None:
            return
        self.saved.__exit__(None, None, None)
        self.found[kwargs["input_ids"].numel()] = self.saved.bytes
        self.saved = None
        self.path.write_text(json.dumps(self.found))


def track(path: Path) -> None:
    """Make this rank write what its forward passes keep to `path`. Call it before the recipe."""
    probe = Probe(path)

    def watch(model: Module, *_: Any) -> None:
        model.register_forward_pre_hook(probe.begin)
        model.register_forward_hook(probe.end, with_kwargs=True)

    when_prepared(watch)
