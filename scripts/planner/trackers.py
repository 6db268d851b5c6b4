# SPDX-License-Identifier: Apache-2.0
"""torch's memory trackers, adapted to the planner.

`MemTracker` and `FSDPMemTracker` see every tensor, real or fake, that modules, autograd, FSDP2 and
the optimizer allocate and free.
"""

from collections import OrderedDict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from .ledger import Sizes

TOTAL = "Total"
CATEGORIES = {  # {category of the trackers: category of the ledger}
    "Parameter": "parameters",
    "Buffer": "parameters",
    "Gradient": "gradients",
    "Optstate": "optimizer",
    "Activation": "activations",
    "Temp": "activations",
    "Inputs": "activations",
    "Other": "activations",
    "Sharded Param": "parameters",
    "Sharded Grad": "gradients",
    "OptState": "optimizer",
    "Unsharded Param": "unsharded",
    "Unsharded Grad": "unsharded",
    "All Gather": "communication",
    "Reduce Scatter": "communication",
}


class PeakTracker(MemTracker):
    """A tracker of only the peak.

    torch's also visits every module at each op, which is slow for LoRA's thousands of modules.
    """

    def _update_peak_stats(self, peak_state: Any) -> None:
        for device, held in self._curr_mem_snap.items():
            if held[TOTAL] > self._peak_mem.get(device, 0):
                self._peak_mem[device] = held[TOTAL]
                self._peak_mem_snap[device] = dict(held)


class WholeTracker(PeakTracker):
    """torch's tracker for models that are not sharded.

    Args:
        model, optimizer: as `prepare` returned them.
        buckets: tensors that hold gradients, also between the steps.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        buckets: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self.track_external(model, optimizer)
        for bucket in buckets:
            self._update_and_maybe_create_winfos(bucket, _MemRefType.GRAD)
        # torch would register gradient hooks on frozen weights, which raises.
        no_hook = RemovableHandle(OrderedDict())
        for weight in model.parameters():
            if not weight.requires_grad:
                self._param_to_grad_hook_handles[weight] = (no_hook, no_hook)


class ShardTracker(PeakTracker, FSDPMemTracker):
    """torch's tracker for models under FSDP2.

    It puts its own hooks on each module of a unit. A unit of several modules, such as the one that
    accelerate makes of final norm and head, would be gathered and reduced once per module. Such a
    unit keeps FSDP's own hooks here, and only its tensors are assigned to categories.
    """

    def _instrument_fsdp_module(self) -> None:
        root = self._root_mod
        members: dict[Any, list[torch.nn.Module]] = {}
        for module in root.modules():
            if isinstance(module, FSDPModule):
                members.setdefault(module._get_fsdp_state(), []).append(module)
        single = [modules[0] for modules in members.values() if len(modules) == 1]
        stand_in: Any = SimpleNamespace(modules=lambda: single, buffers=root.buffers)
        self._root_mod = stand_in  # torch reads only these two of it
        try:
            super()._instrument_fsdp_module()
        finally:
            self._root_mod = root
        for state, modules in members.items():
            if len(modules) > 1 and state._fsdp_param_group:
                self._name_tensors_of(state._fsdp_param_group)

    def _name_tensors_of(self, group: Any) -> None:
        """Assign whole parameters and sharded gradients of a unit to their categories."""
        self._instrument_fsdp_sharded_params_grads(group)
        wait = group.wait_for_unshard
        reduce = group.post_backward

        def wait_for_unshard() -> None:
            wait()
            for param in group.fsdp_params:
                self._update_and_maybe_create_winfos(
                    param.unsharded_param, _FSDPRefType.UNSHARDED_PARAM
                )

        def post_backward(*unused: Any) -> None:
            reduce(*unused)
            self._instrument_fsdp_sharded_params_grads(group)

        group.wait_for_unshard = wait_for_unshard
        group.post_backward = post_backward


def peak_of(tracker: MemTracker) -> Sizes:
    """Return {category: bytes} at the peak, of all devices that the tracker saw.

    Tensors on the meta device have no bytes. transformers computes strides with them.
    """
    sizes = {}
    for device, snapshot in tracker.get_tracker_snapshot("peak").items():
        if device.type == "meta":
            continue
        for name, size in snapshot.items():
            key = getattr(name, "value", name)
            if key != TOTAL and size:
                category = CATEGORIES[key]
                sizes[category] = sizes.get(category, 0) + size
    return sizes
