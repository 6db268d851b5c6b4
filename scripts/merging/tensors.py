# SPDX-License-Identifier: Apache-2.0
"""Whether each tensor of a merged folder is what it must be, by peft's own code.

Logits cannot show that: rounding to bf16 may move them by more than mild adapters do, so that an
adapter that was forgotten would pass. Here each tensor is read back from the folder. One with an
adapter must be what peft's layer makes of the base's tensor in fp32, rounded to its dtype. Any
other must be the base's, or that of a module that was saved whole, in its dtype.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer, ParamWrapper
from safetensors import safe_open
from safetensors.torch import load_file

from components import upstream
from merging import shards
from merging.adapter import WEIGHTS, AdapterFolder
from merging.plan import Plan, file_names
from merging.skeleton import ADAPTER, PREFIX, Skeleton, make_base, shorten

# How far two sums in fp32 of the same numbers in another order may lie apart, as a part of the
# largest value of a tensor: 8 units in the last place
FP32_SUMS = 8 * torch.finfo(torch.float32).eps
WRITTEN_AS = (torch.float32, torch.bfloat16, torch.float16)

# Returns a tensor of the base with its adapter, in fp32
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Expected:
    """What the tensors of a merged folder must be.

    Attributes:
        names: of the tensors in the base's files.
        changes: {name: what peft's layer makes of the base's tensor}.
        use_quantized: whether the values of the quantized base take the place of the base's own.
    """

    adapter: AdapterFolder
    plan: Plan
    files: shards.Files
    names: frozenset[str]
    changes: Mapping[str, Change]
    use_quantized: bool

    def base_of(self, name: str) -> str | None:
        """Return the name of the base's tensor that a written one is made from, or None."""
        if name in self.names:
            return name
        return self.plan.untied.get(name)

    def read_base(self, name: str) -> torch.Tensor:
        """Return the base's tensor for a written one, or what it is after it was quantized."""
        tensor = self.files.read_tensor(self.base_of(name) or name)
        if self.use_quantized and name in self.plan.quantized:
            quantization: Any = self.adapter.quantization
            return quantization.round_trip(tensor)
        return tensor


def find_wrong_tensors(
    adapter: AdapterFolder, plan: Plan, files: shards.Files, written: shards.Files, quantized: bool
) -> Iterator[str]:
    """Yield what is wrong with the tensors of a merged folder, kind by kind.

    In memory are the adapters, one tensor, and what its adapter adds to it.

    Args:
        files: of the base.
        written: of the merged folder.
        quantized: whether the adapters were merged into the values of the quantized base.
    """
    names = files.names
    changes = changes_of(adapter, plan, names)
    expected = Expected(adapter, plan, files, names, changes, quantized)
    missing = sorted(names - written.names - set(plan.doubled))
    if missing:
        yield f"the merged files lack {shorten(missing)}"
    found: dict[str, list[str]] = {}
    with ExitStack() as stack:
        adapters: Any = stack.enter_context(safe_open(adapter.path / WEIGHTS, "pt"))
        for shard in written.shards:
            for name, tensor in shard.read():
                problem = find_problem(name, tensor, expected, adapters.get_tensor)
                if problem is not None:
                    found.setdefault(problem, []).append(name)
    for problem, wrong in found.items():
        yield f"{problem}: {shorten(wrong)}"


def find_problem(
    name: str, tensor: torch.Tensor, expected: Expected, read: Callable[[str], torch.Tensor]
) -> str | None:
    """Return what is wrong with one written tensor, or None.

    Args:
        read: returns a tensor of the adapters' file.
    """
    if expected.base_of(name) is None:
        return "the base has no such tensor"
    if tensor.is_floating_point() and not tensor.isfinite().all():
        return "a merged tensor has values that are not numbers, or infinite"
    base = expected.read_base(name)
    if tensor.dtype not in (base.dtype, *WRITTEN_AS):
        return f"a merged tensor is written as {tensor.dtype}"
    if name in expected.plan.whole:
        whole = read(expected.plan.whole[name])
        if not torch.equal(tensor, whole.to(tensor.dtype)):
            return "a merged tensor is not that of the module that was saved whole"
    elif name in expected.changes:
        if not is_rounded(tensor, expected.changes[name](base)):
            return "a merged tensor is not what peft makes of the base and its adapter"
    elif not torch.equal(tensor, base.to(tensor.dtype)):
        return "a merged tensor without an adapter is not the base's"
    return None


def is_rounded(tensor: torch.Tensor, exact: torch.Tensor) -> bool:
    """Return whether a tensor is an exact one, in fp32, rounded once to its own dtype.

    The exact one may differ by the order of its sums. That is less than a unit in the last place of
    bf16, with which a mild adapter could be left out.
    """
    if tensor.shape != exact.shape:
        return False
    slack = FP32_SUMS * exact.abs().max()
    lowest = (exact - slack).to(tensor.dtype)
    highest = (exact + slack).to(tensor.dtype)
    return bool(((lowest <= tensor) & (tensor <= highest)).all())


# ---- What peft makes of a tensor ----
def changes_of(adapter: AdapterFolder, plan: Plan, names: frozenset[str]) -> dict[str, Change]:
    """Return {name: what peft's layer makes of the base's tensor} of each tensor with an adapter.

    Args:
        names: of the tensors in the base's files.
    """
    changes: dict[str, Change] = {}
    for path, layer in load_adapters(adapter).named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        module = path.removeprefix(PREFIX).replace(".base_layer", "")
        if isinstance(layer, ParamWrapper):
            parameter = f"{module}.{layer.parameter_name}"
            parts = PartsOfParameter(layer, plan.skeleton, parameter)
            for name in file_names(plan.skeleton, parameter, names):
                changes[name] = partial(parts.add, name)
        else:
            for name in file_names(plan.skeleton, f"{module}.weight", names):
                changes[name] = partial(merge, layer)
    return changes


def load_adapters(adapter: AdapterFolder) -> Any:
    """Return the model of peft with its adapters, and with zeros as its base.

    A parameter of the base is a single zero in memory, in fp32. So it has the device and the dtype
    in which peft shall compute.
    """
    upstream.silence_old_name_of_checkpointing()
    with init_empty_weights(include_buffers=False):
        model: Any = get_peft_model(make_base(adapter), adapter.config)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            zeros = torch.zeros(()).expand(weight.shape)
            setattr(module, name, torch.nn.Parameter(zeros, requires_grad=False))
    weights = {}
    for name, weight in load_file(adapter.path / WEIGHTS).items():
        weights[name] = weight.float()
    set_peft_model_state_dict(model, weights, low_cpu_mem_usage=True)
    return model


def merge(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """Return what a layer of peft's makes of the weight of its base layer, in fp32."""
    base = layer.get_base_layer()
    before = base.weight
    base.weight = torch.nn.Parameter(weight.float(), requires_grad=False)
    layer.merge()
    merged = base.weight.data
    layer.merged_adapters.clear()
    base.weight = before
    return merged


class PartsOfParameter:
    """What peft adds to a parameter that is many tensors in the files, such as experts.

    It is computed when the first of them is asked for, and each is kept until then.

    Args:
        layer: peft's, of the parameter.
    """

    def __init__(self, layer: Any, skeleton: Skeleton, parameter: str) -> None:
        self._layer = layer
        self._skeleton = skeleton
        self._parameter = parameter
        self._parts: dict[str, torch.Tensor] = {}

    def add(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the base with what peft adds to it, in fp32."""
        if name not in self._parts:
            self._parts = self._compute(name)
        return weight.float() + self._parts.pop(name)

    def _compute(self, name: str) -> dict[str, torch.Tensor]:
        delta = self._layer.get_delta_weight(ADAPTER).detach()
        if name == self._parameter:  # The files have the model's own layout
            return {name: delta}
        return self._skeleton.parts(self._parameter, delta)
