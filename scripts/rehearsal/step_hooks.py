# SPDX-License-Identifier: Apache-2.0
"""Hooks on `Accelerator.prepare` and on the optimizer steps of a recipe."""

import functools
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from torch.nn import Module
from torch.optim import Optimizer

from rehearsal.whole_tensors import Part, describe, find_pipeline, part_of_pipeline

PreparedAction = Callable[[Any, Any, Part], None]
StepAction = Callable[[Any, Any], None]


def when_prepared(action: PreparedAction) -> None:
    """Call action(model, optimizer, what this rank has to hold) once both are prepared.

    The model is the first one that is trained, which a reference model is not, and the optimizer
    the first one of all.
    """
    original = Accelerator.prepare
    found: dict[str, Any] = {}

    @functools.wraps(original)
    def prepare_and_call(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        part = None
        for argument in args:
            if isinstance(argument, Module) and is_trained(argument):  # before it is split
                part = Part(describe(argument))
        result = original(self, *args, **kwargs)
        if len(found) == 3:
            return result
        for prepared in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(prepared, Module) and part is not None:
                found.setdefault("model", prepared)
                found.setdefault("part", part)
            if isinstance(prepared, Optimizer):
                found.setdefault("optimizer", prepared)
        pipeline = find_pipeline()
        if pipeline is not None and "optimizer" in found:
            found.update(model=pipeline.model, part=part_of_pipeline(pipeline))
        if len(found) == 3:
            action(found["model"], found["optimizer"], found["part"])
        return result

    Accelerator.prepare = prepare_and_call


def is_trained(model: Module) -> bool:
    """Return whether any parameter of the model is trained."""
    return any(parameter.requires_grad for parameter in model.parameters())


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
