# SPDX-License-Identifier: Apache-2.0
"""One weight whose gradients are caught as autograd computes them, before an engine sees them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from components.deepspeed_state import clean_name


class WatchedWeight:
    """One weight of a model, and the sum of this rank's gradients of it.

    Attributes:
        factor: what the loss is multiplied by in this backward pass; None in those of something
            else than the loss.
        total: the sum of the gradients so far, each without its factor; None if there was none.
    """

    def __init__(
        self, model: torch.nn.Module, name: str, keep: Callable[[Any], Any] = lambda whole: whole
    ) -> None:
        """Hook the module that uses the weight.

        Args:
            name: of the weight.
            keep: returns what is summed of a gradient.
        """
        self.factor: Any = None
        self.total: Any = None
        self._model = model
        self._place = name
        self._keep = keep
        place, _, self._attribute = name.rpartition(".")
        self._owner = model.get_submodule(place)
        outermost = outermost_compiled(model, place)
        self._hook = outermost.register_forward_pre_hook(self._watch)
        self._watched: list[torch.Tensor] = []
        self._handles: list[Any] = []

    @property
    def name(self) -> str:
        """The name of the weight without what engines add to it."""
        return clean_name(self._place)

    @property
    def weight(self) -> Any:
        """The weight as the optimizer has it.

        After a forward pass without a backward one, FSDP2 has the gathered one in its place.
        """
        return self._model.get_parameter(self._place)

    def _watch(self, *_: Any) -> None:
        """Hook the tensor that a forward pass uses, which FSDP makes again from its shards."""
        weight = getattr(self._owner, self._attribute)
        is_watched = any(weight is other for other in self._watched)  # Checkpointing runs it twice.
        if is_watched or not torch.is_grad_enabled():
            return
        self._watched.append(weight)
        self._handles.append(register_first_hook(weight, self._add))

    def _add(self, gradient: torch.Tensor) -> None:
        """Add the gradient of this rank's part of the loss, without any factor."""
        if self.factor is None:
            return
        own = self._keep(gradient.detach()).float() / self.factor
        self.total = own if self.total is None else self.total + own

    def take(self) -> Any:
        """Return the sum of the gradients, and begin a new one."""
        total = self.total
        self.total = None
        return total

    def forget_graph(self) -> None:
        """Remove the hooks on tensors, of which the next forward pass may have others."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched.clear()
        self.factor = None

    def stop(self) -> None:
        """Remove all hooks: the next steps are as if there had been none."""
        self.forget_graph()
        self._hook.remove()


def register_first_hook(weight: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Register a hook that is called before those that change the gradient, and return its handle.

    The hook of components/experts.py averages it, for example.
    """
    handle = weight.register_hook(hook)
    hooks: Any = weight._backward_hooks
    for key in list(hooks):
        if key != handle.id:
            # torch calls them in the order of insertion, and does not know of `move_to_end`
            hooks[key] = hooks.pop(key)
    return handle


def outermost_compiled(model: torch.nn.Module, place: str) -> torch.nn.Module:
    """Return the outermost compiled module around a weight, or the weight's own if there is none.

    A hook of a module inside it would be compiled: `torch.compile` calls it even after it is
    removed, and a module that was compiled in place is then compiled again.

    Args:
        place: the name of the weight's own module, "" for the model.
    """
    words = place.split("._orig_mod")[0].split(".")
    for depth in range(len(words)):
        module = model.get_submodule(".".join(words[:depth]))
        if module._compiled_call_impl is not None:
            return module
    return model.get_submodule(".".join(words))


def parts_of_rank(gradient: Any, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what this rank has of a gradient, and the same part of the expected one.

    Args:
        gradient: a tensor, or shards of one.
        expected: the whole gradient, in fp32.
    """
    if isinstance(gradient, DTensor):
        mesh = gradient.device_mesh
        whole = distribute_tensor(expected, mesh, gradient.placements, src_data_rank=None)
        return gradient.to_local(), whole.to_local()
    return gradient, expected


def products_of(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return three sums that add up over parts: found x expected, expected^2, difference^2."""
    found = found.detach().float().to(expected.device)
    return torch.stack(
        [(found * expected).sum(), expected.square().sum(), (found - expected).square().sum()]
    )
