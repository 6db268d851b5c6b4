# SPDX-License-Identifier: Apache-2.0
"""Hooks on `Accelerator.prepare` and on the optimizer steps of a recipe."""

import functools
import math
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer
from transformers.distributed.parallel_utils import _get_parameter_plan

# (elements, rows, whether it is trained) of each tensor of a model, which its strategy may split;
# under tensor and expert parallelism of the part that the model's plan gives to a rank
Shapes = list[tuple[int, int, bool]]
# The style of a plan that spreads the experts of a weight, its first dimension
OF_EXPERTS = "grouped_gemm"
# The dimension that each style of a plan splits, from the last one; the others leave weights whole
SPLIT_DIMENSION = {
    "colwise": -2,
    "colwise_gather_output": -2,
    "colwise_rep": -2,
    "embedding_colwise": -1,
    "embedding_rowwise": -2,
    "packed_colwise": -2,
    "packed_rowwise": -1,
    "rowwise": -1,
    "rowwise_rep": -1,
    "rowwise_split_input": -1,
}
# The matrix of an adapter that is split with a weight's dimension; the other one is whole
SPLIT_MATRIX = {-2: "lora_B", -1: "lora_A"}
# What peft puts into the names of weights
OF_PEFT = ("base_layer", "original_module", "modules_to_save", "default")
PreparedAction = Callable[[Module, Optimizer, Shapes], None]
StepAction = Callable[[Any, Any], None]


def is_trained(model: Module) -> bool:
    """Return whether any parameter of the model is trained; a reference model has none."""
    return any(parameter.requires_grad for parameter in model.parameters())


def describe(model: Any, expert_ranks: int = 1) -> Shapes:
    """Return the tensors of a model that is not prepared, tied ones once.

    ZeRO-3 has split such a model already and keeps the shape of each whole tensor in `ds_shape`.

    Args:
        expert_ranks: over how many ranks the experts are spread that no engine splits further.
    """
    described = []
    for name, parameter in model.named_parameters():
        shape = list(getattr(parameter, "ds_shape", parameter.shape))
        dimension = planned_dimension(model, name, len(shape))
        if dimension is not None:
            shape[dimension] //= model.tp_size
        if has_experts(model, name):
            shape[0] //= expert_ranks
        rows = shape[0] if shape else 1
        described.append((math.prod(shape), rows, parameter.requires_grad))
    return described


def planned_dimension(model: Any, name: str, dimensions: int = 2) -> int | None:
    """Return the dimension by which the plan of tensor parallelism splits a weight, if it does.

    Args:
        name: of the weight, as peft names it if the model has adapters.
        dimensions: their number, 1 for a bias.
    """
    if (getattr(model, "tp_size", None) or 1) == 1:
        return None
    words = name.removeprefix("base_model.model.").split(".")
    matrix = {"lora_A", "lora_B"}.intersection(words)
    planned = ".".join(word for word in words if word not in {*OF_PEFT, *matrix})
    dimension = SPLIT_DIMENSION.get(_get_parameter_plan(planned, model.tp_plan) or "")
    if dimension is None or (matrix and SPLIT_MATRIX[dimension] not in matrix):
        return None
    if dimensions == 1:  # A bias is as long as the output.
        return 0 if dimension == -2 else None
    return dimension


def has_experts(model: Any, name: str) -> bool:
    """Return whether a weight holds experts, which the model's plan spreads over ranks."""
    plan = getattr(model, "ep_plan", None)
    name = name.removeprefix("base_model.model.")
    return bool(plan) and _get_parameter_plan(name, plan) == OF_EXPERTS


def ranks_of_experts(model: Module) -> int:
    """Return over how many ranks the experts of a model are spread that no engine splits further.

    FSDP2 shards the parts over the ranks that have the same experts, which comes to one shard for
    each rank, as of all other weights.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return 1
    for name, weight in model.named_parameters():
        if isinstance(weight, DTensor) and has_experts(model, name):
            return weight.device_mesh.size()
    return 1


def when_prepared(action: PreparedAction) -> None:
    """Call action(model, optimizer, shapes of the whole tensors) once both are prepared.

    The model is the first one that is trained, the optimizer the first one of all.
    """
    original = Accelerator.prepare
    models: list[tuple[Any, Shapes]] = []
    optimizers: list[Optimizer] = []

    @functools.wraps(original)
    def prepare_and_call(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        shapes: Shapes = []
        for argument in args:
            if isinstance(argument, Module) and is_trained(argument):  # before it is split
                shapes = describe(argument, ranks_of_experts(argument))
        had_both = bool(models and optimizers)
        result = original(self, *args, **kwargs)
        for prepared in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(prepared, Module) and shapes:
                models.append((prepared, shapes))
            if isinstance(prepared, Optimizer):
                optimizers.append(prepared)
        if models and optimizers and not had_both:
            action(models[0][0], optimizers[0], models[0][1])
        return result

    Accelerator.prepare = prepare_and_call


def around_steps(model: Any, optimizer: Any, before: StepAction, after: StepAction) -> None:
    """Call before(zero, base) and after(zero, base) around each optimizer step.

    `zero` is DeepSpeed's optimizer or None, `base` is torch's.

    Args:
        model: as `Accelerator.prepare` returns it: a module, or DeepSpeed's engine.
        optimizer: as it returns it, wrapped.
    """
    zero = model.optimizer if hasattr(model, "zero_optimization_stage") else None
    base = zero or optimizer
    while hasattr(base, "optimizer"):
        base = base.optimizer
    if zero is None:
        base.register_step_pre_hook(lambda *_: before(zero, base))
        base.register_step_post_hook(lambda *_: after(zero, base))
        return
    # The step of DeepSpeed's engine also moves gradients and casts parameters.
    step = model.step

    def step_and_call(*args: Any, **kwargs: Any) -> None:
        before(zero, base)
        step(*args, **kwargs)
        after(zero, base)

    model.step = step_and_call
