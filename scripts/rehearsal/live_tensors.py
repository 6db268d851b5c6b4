# SPDX-License-Identifier: Apache-2.0
"""The bytes that one rank really holds, measured from live tensors at its first optimizer step.

Gradients are measured just before the step, parameters and optimizer state just after it, and each
storage is counted once. Whole tensors are those of the model before `Accelerator.prepare`.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from rehearsal.step_hooks import around_steps, when_prepared
from rehearsal.whole_tensors import Part

# Where ZeRO keeps the partitions whose gradients it has offloaded, by stage and version
ZERO_PARTITIONS = (
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
)


def held(tensors: Iterable[torch.Tensor]) -> dict:
    """Return elements, bytes, dtypes and devices of the storages of tensors, each counted once."""
    storages = {}
    for tensor in tensors:
        storage = storage_of(tensor)
        if storage.nbytes():
            storages[str(storage.device), storage.data_ptr()] = (storage, tensor)
    sizes = [storage.nbytes() for storage, _ in storages.values()]
    elements = [storage.nbytes() // tensor.element_size() for storage, tensor in storages.values()]
    return {
        "elements": sum(elements),
        "bytes": sum(sizes),
        "dtypes": sorted({str(one.dtype).removeprefix("torch.") for _, one in storages.values()}),
        "devices": sorted({storage.device.type for storage, _ in storages.values()}),
    }


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor, of a DTensor that of this rank's part."""
    local = tensor
    if hasattr(tensor, "to_local"):
        local = tensor.to_local()
    return local.detach().untyped_storage()


def live_gradients(model: Module, zero: Any) -> list[torch.Tensor]:
    """Return gradients before the step: those of parameters and, under ZeRO, of partitions.

    Args:
        zero: DeepSpeed's optimizer or None.
    """
    gradients = []
    for parameter in model.parameters():
        gradients += [parameter.grad, getattr(parameter, "grad_accum", None)]
    for group in getattr(zero, "averaged_gradients", {}).values():  # ZeRO-1 to ZeRO-3
        gradients += group or []
    for name in ZERO_PARTITIONS:
        gradients += [partition.grad for partition in getattr(zero, name, [])]
    return [gradient for gradient in gradients if gradient is not None]


def measure_first_step(path: Path) -> None:
    """Make the recipe write a measurement to `path` at the first step that its optimizer takes."""

    def begin(model: Any, optimizer: Any, part: Part) -> None:
        found: dict[str, Any] = dataclasses.asdict(part)

        def before(zero: Any, base: Optimizer) -> None:
            if "parameters" not in found:
                found["gradients"] = held(live_gradients(model, zero))

        def after(zero: Any, base: Optimizer) -> None:
            # A step may be skipped in fp16
            if "parameters" in found or not base.state:
                return
            state = []  # tensors of their parameter's size
            most = 0
            for weight, entries in base.state.items():
                tensors = [value for key, value in entries.items() if key != "step"]
                like = [one for one in tensors if getattr(one, "shape", None) == weight.shape]
                state += like
                most = max(most, len(like))
            found["state_tensors_per_parameter"] = most
            parameters = list(model.parameters())
            # Under ZeRO-3 these are small tensors that stay whole, and each has a shard
            shards = [one.ds_tensor for one in parameters if hasattr(one, "ds_tensor")]
            found["parameters"] = held([*parameters, *shards])
            found["optimizer"] = held(state)
            own = {storage_of(one).data_ptr() for one in parameters}
            found["master"] = held(
                one for one in base.state if storage_of(one).data_ptr() not in own
            )
            if zero is not None:
                found["persistence_threshold"] = model.zero_param_persistence_threshold()
            path.write_text(json.dumps(found))

        around_steps(model, optimizer, before, after)

    when_prepared(begin)
