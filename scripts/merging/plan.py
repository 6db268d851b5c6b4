# SPDX-License-Identifier: Apache-2.0
"""Which tensors of the base's files a merge changes, keeps, writes in addition, or leaves out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from exits import Exit, stop
from merging import deltas
from merging.adapter import AdapterFolder
from merging.skeleton import Skeleton, Target, find_quantized, make_base, shorten

# Returns a tensor of the adapters' file by its name
ReadTensor = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Plan:
    """What a merge does to the tensors of a base. Names are those of the base's files.

    Attributes:
        targets: {name: the target that changes the tensor}. Experts are many tensors of one target.
        whole: {name: the tensor of the adapters that replaces it}.
        quantized: names of the tensors that were quantized in training.
        untied: {name of a tensor that the base does not have: the one that it was tied to}. The
            adapters changed one of the two, so that they are no longer the same.
        doubled: {name of a tensor that the base has twice: the one that it is tied to}.
    """

    skeleton: Skeleton
    targets: Mapping[str, Target]
    whole: Mapping[str, str]
    quantized: frozenset[str] = frozenset()
    untied: Mapping[str, str] = field(default_factory=dict)
    doubled: Mapping[str, str] = field(default_factory=dict)

    @property
    def unties(self) -> bool:
        """Return whether weights that are tied in the base are two in the merged model."""
        return bool(changed_ties(self.skeleton))

    def parts(self, target: Target, read: ReadTensor) -> dict[str, torch.Tensor]:
        """Return what a target adds to each of its tensors, by name, in fp32.

        Args:
            read: returns a tensor of the adapters.
        """
        a = read(target.a)
        b = read(target.b)
        if target.kind == "linear":
            delta = deltas.of_linear(a, b, target.scaling, target.is_transposed)
        elif target.kind == "embedding":
            delta = deltas.of_embedding(a, b, target.scaling)
        else:
            delta = deltas.of_experts(
                a, b, target.scaling, target.num_experts, target.is_transposed
            )
        if self.targets.get(target.parameter) == target:  # The files have the model's own layout
            return {target.parameter: delta}
        return self.skeleton.parts(target.parameter, delta)


def merge_tensor(
    target: Target, weight: torch.Tensor, delta: torch.Tensor, read: ReadTensor
) -> torch.Tensor:
    """Return a tensor of the base with what its target adds to it, in fp32."""
    if target.magnitude is None:
        return deltas.add(weight, delta)
    magnitude = read(target.magnitude)
    return deltas.add_with_magnitude(weight, delta, magnitude, target.is_transposed)


def make_plan(adapter: AdapterFolder, skeleton: Skeleton, names: frozenset[str]) -> Plan:
    """Return the plan of a merge.

    Raises SystemExit with 65 if the base's files lack a tensor that the adapters change.

    Args:
        names: of the tensors in the base's files.
    """
    targets: dict[str, Target] = {}
    whole: dict[str, str] = {}
    can_lack = set(changed_ties(skeleton))
    for target in skeleton.targets:
        for name in names_of(skeleton, target.parameter, names, can_lack):
            if name in targets:
                stop(Exit.DATA, f"{adapter.path}: several adapters change {name}")
            targets[name] = target
    for parameter, replacement in skeleton.whole.items():
        for name in names_of(skeleton, parameter, names, can_lack):
            whole[name] = replacement
    quantized = names_of_quantized(adapter, skeleton, names)
    untied, doubled = sort_ties(skeleton, names)
    return Plan(skeleton, targets, whole, quantized, untied, doubled)


def names_of_quantized(
    adapter: AdapterFolder, skeleton: Skeleton, names: frozenset[str]
) -> frozenset[str]:
    """Return the names of the tensors that were quantized in training."""
    found: set[str] = set()
    if adapter.quantization is not None:
        for parameter in find_quantized(make_base(adapter), adapter.quantization):
            found.update(names_of(skeleton, parameter, names, set()))
    return frozenset(found)


def sort_ties(skeleton: Skeleton, names: frozenset[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the tensors that are no longer tied, and those that the base has twice, as in Plan."""
    changed = changed_ties(skeleton)
    untied = {}
    doubled = {}
    for parameter, source in skeleton.tied.items():
        (name,) = file_names(skeleton, parameter, names)
        (other,) = file_names(skeleton, source, names)
        if parameter in changed and name not in names:
            untied[name] = other
        elif parameter not in changed and name in names and other in names:
            doubled[name] = other
    return untied, doubled


def changed_ties(skeleton: Skeleton) -> dict[str, str]:
    """Return {parameter: the one it is tied to} where the adapters change one of the two.

    peft changes only the one, for example the output but not the input. Tied again, both would be
    changed.
    """
    changed = {target.parameter for target in skeleton.targets} | set(skeleton.whole)
    found = {}
    for parameter, source in skeleton.tied.items():
        if parameter in changed or source in changed:
            found[parameter] = source
    return found


def file_names(skeleton: Skeleton, parameter: str, names: frozenset[str]) -> list[str]:
    """Return the names under which the files have a parameter, or would have it.

    Most files have the layout of the hub, where each expert is a tensor; some have the model's.
    """
    shape = skeleton.model.get_parameter(parameter).shape
    original = list(skeleton.parts(parameter, torch.empty(shape, device="meta")))
    if parameter in names and not names.issuperset(original):
        return [parameter]
    return original


def names_of(
    skeleton: Skeleton, parameter: str, names: frozenset[str], can_lack: set[str]
) -> list[str]:
    """Return the names under which the files have a parameter.

    Raises SystemExit with 65 if they do not have it, unless it was tied.
    """
    found = file_names(skeleton, parameter, names)
    missing = sorted(set(found) - names)
    if missing and parameter not in can_lack:
        stop(
            Exit.DATA,
            f"the files of the base lack {shorten(missing)}, which the adapters change or which "
            "was quantized: another base, or files without the output layer",
        )
    return found
