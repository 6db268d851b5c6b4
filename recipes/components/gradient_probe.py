# SPDX-License-Identifier: Apache-2.0
"""A probe of the first step: is the engine's gradient the sum of what the ranks computed?

The recipes multiply a loss by the number by which the engine divides the sum of the gradients
(`backward_of_sum` of components/strategy.py). An engine that came to divide by another number would
train with wrong gradients, and nothing would show it: Adam's step has the same length for any
constant factor. So the probe takes one small weight, catches the gradients that autograd computes
for it on each rank, before the engine sees them, adds them up itself, and compares the sum with
what the engine hands to the optimizer. There is no other pass and no other loss, and so nothing to
undo: a run with the probe has the same bits as one without.

What it does not see: other weights than that one, so neither experts or shards that are reduced
in another group of ranks nor a split that lacks a part; a loss that is divided by a wrong count; a
clipping or an optimizer that is wrong; an engine that changes its mind after the first step.
Pipelines add up their gradients by themselves and are not probed.
"""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor

from components.deepspeed_state import clean_name
from components.exits import Exit
from components.fsdp1_state import fsdp1_parts
from components.mesh import Mesh, divided
from components.optimizer import is_bias_or_norm
from components.state import get_loss_scale
from components.strategy import Strategy

# The largest difference, as a share of the gradient's norm. In fp32 only the order of additions
# differs. With 16 bits, ZeRO-0 and ZeRO-1 round whenever they add a micro-batch: 0.3 % after two of
# them, and more after many. An engine that counts a group of ranks too much or not at all is off by
# half or more.
BOUND = 1e-4
BOUND_OF_16_BITS = 0.1


class GradientProbe:
    """Watches one weight until a step has shown that its gradient is right.

    Every rank makes every call. The first step counts whose gradient is finite and not zero.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: AcceleratedOptimizer,
        end: Callable[[int, str], None],
    ) -> None:
        """Hook the module that uses the weight.

        Args:
            model: as `prepare` returned it.
            optimizer: as `prepare` returned it.
            end: ends all ranks with an exit code and a message.
        """
        self._accelerator = accelerator
        self._model: Any = model
        self._optimizer = optimizer
        self._end = end
        self._strategy = Strategy.of(accelerator)
        weights = dict(model.named_parameters())
        self._name = choose_weight([name for name in weights if weights[name].requires_grad])
        place, _, self._attribute = self._name.rpartition(".")
        self._owner = model.get_submodule(place)
        self._sum: Any = None  # The gradients of this rank's micro-batches, added up
        self._factor: Any = None
        self._watched: list[torch.Tensor] = []
        outermost = outermost_compiled(model, place)
        self._hook = outermost.register_forward_pre_hook(self._watch_weight)
        self._handles: list[Any] = []

    @contextmanager
    def watching(self, loss: torch.Tensor) -> Generator[None]:
        """Catch the gradients of a backward pass, and after the last of a step compare their sum.

        Args:
            loss: this micro-batch's part of the loss, as it is before any factor.
        """
        self._handles.append(loss.register_hook(self._note_factor))
        compares = self._accelerator.sync_gradients
        if compares and self._strategy.zero_stage is not None:
            with self._comparing_before_engine_steps():
                yield
        else:
            yield
            if compares:
                self._compare()
        self._forget_graph()

    @contextmanager
    def _comparing_before_engine_steps(self) -> Generator[None]:
        """Compare in the backward pass of accelerate, in which DeepSpeed's engine steps as well."""
        step = self._model.step

        def compare_and_step(*args: Any, **kwargs: Any) -> Any:
            self._compare()
            return step(*args, **kwargs)

        self._model.step = compare_and_step
        try:
            yield
        finally:
            self._model.step = step

    @property
    def _weight(self) -> Any:
        """The weight as the optimizer has it.

        After a forward pass without a backward one, FSDP2 has the gathered one in its place.
        """
        return self._model.get_parameter(self._name)

    # ---- What this rank computes ----
    def _watch_weight(self, *_: Any) -> None:
        """Hook the tensor that a forward pass uses, which FSDP makes again from its shards."""
        weight = getattr(self._owner, self._attribute)
        is_watched = any(weight is other for other in self._watched)  # Checkpointing runs it twice.
        if is_watched or not torch.is_grad_enabled():
            return
        self._watched.append(weight)
        self._handles.append(weight.register_hook(self._add))

    def _note_factor(self, gradient: torch.Tensor) -> None:
        """Note what the loss is multiplied by, all in all, before its gradient is computed."""
        self._factor = gradient.detach().float()

    def _add(self, gradient: torch.Tensor) -> None:
        """Add the gradient of this rank's part of the loss, without any factor."""
        if self._factor is None:  # A backward pass of something else than the loss
            return
        own = gradient.detach().float() / self._factor
        self._sum = own if self._sum is None else self._sum + own

    def _forget_graph(self) -> None:
        """Remove the hooks on tensors, of which the next forward pass may have others."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched.clear()
        self._factor = None

    # ---- What the engine makes of it ----
    def _compare(self) -> None:
        """Compare both; end all ranks if they differ."""
        accelerator = self._accelerator
        device = accelerator.device
        own = self._sum
        self._sum = None
        is_used = torch.tensor(float(own is not None), device=device)
        if accelerator.reduce(is_used).item() < accelerator.num_processes:
            self._stop_watching()
            accelerator.print(
                f"warning: not every rank used {clean_name(self._name)} in the first step: the "
                "gradient probe has compared nothing"
            )
            return
        if isinstance(own, DTensor):
            own = own.full_tensor()
        tp = Mesh.of(accelerator).tp
        expected = divided(accelerator.reduce(own), tp) * self._loss_scale()
        found, expected = self._parts_of_rank(expected)
        products = torch.stack(
            [(found * expected).sum(), expected.square().sum(), (found - expected).square().sum()]
        )
        along, square, off = accelerator.reduce(products).tolist()
        if square == 0 or not math.isfinite(along + square + off):
            return
        self._stop_watching()
        self._judge(ratio=along / square, difference=math.sqrt(off / square))

    def _judge(self, ratio: float, difference: float) -> None:
        """End all ranks if the difference is above its bound."""
        is_fp32 = self._accelerator.mixed_precision == "no" and self._weight.dtype == torch.float32
        if difference <= (BOUND if is_fp32 else BOUND_OF_16_BITS):
            return
        self._end(
            Exit.DIFFERS,
            f"{self._strategy.name} trains {clean_name(self._name)} with {ratio:.4g} times its "
            f"gradient (difference {difference:.1%}), and no weight was changed: the engine "
            f"averages otherwise than the recipes expect. Here are {installed_versions()}: "
            "install those of requirements.txt, or correct `averaged` in components/mesh.py",
        )

    def _stop_watching(self) -> None:
        """Remove the hook and the probe: the next steps are as if there had been none."""
        self._hook.remove()
        self._accelerator.gradient_probe = None  # pyrefly: ignore[missing-attribute]

    def _loss_scale(self) -> float:
        """Return fp16's loss scale, by which the engine's gradient is still multiplied."""
        if self._strategy.zero_stage is None and self._accelerator.scaler is None:
            return 1.0  # As on a CPU, where accelerate scales no loss
        state = get_loss_scale(self._accelerator, self._optimizer)
        return float(state.get("scale", state.get("cur_scale", 1.0)))

    def _parts_of_rank(self, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's part of the engine's gradient, and the same part of the expected one.

        Args:
            expected: the whole gradient, in fp32.
        """
        gradient: Any = self._weight.grad
        if self._strategy.zero_stage is not None:
            from deepspeed.utils import safe_get_full_grad

            gradient = safe_get_full_grad(self._weight)
        elif self._strategy.fsdp_version == 1:
            part = fsdp1_parts(self._model)[self._weight]
            expected = expected.flatten()[part]
            if gradient is None:  # This rank has nothing of the weight.
                gradient = torch.zeros_like(expected)
            gradient = gradient.flatten()
            if gradient.numel() != expected.numel():
                gradient = gradient[part]
        elif isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            whole = distribute_tensor(expected, mesh, gradient.placements, src_data_rank=None)
            expected = whole.to_local()
            gradient = gradient.to_local()
        return gradient.detach().float().to(expected.device), expected


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


def choose_weight(names: list[str]) -> str:
    """Return the name of a trained weight that is small, and that every forward pass uses.

    It is the last B of adapters, whose gradient is not zero at the start, or else the last bias or
    norm. Engines reduce whole modules that are trained beside adapters as they do other weights,
    and may still know nothing of adapters, which are added after a model is made.

    Args:
        names: of the trained weights, in the order of the model.
    """
    for is_small in (is_second_matrix, is_bias_or_norm):
        found = [name for name in names if is_small(clean_name(name))]
        if found:
            return found[-1]
    return names[-1]


def is_second_matrix(name: str) -> bool:
    """Return whether a parameter's name is that of the matrix B of LoRA on a layer of its own.

    Adapters of experts do not run as modules of their own, and of embeddings B has another form.
    """
    return ".lora_B." in name and ".experts." not in name


def installed_versions() -> str:
    """Return the versions of the libraries that reduce gradients, such as "torch 2.13.0"."""
    from accelerate.utils import is_deepspeed_available

    names = ["torch", "accelerate"]
    if is_deepspeed_available():
        names.append("deepspeed")
    return ", ".join(f"{name} {version(name)}" for name in names)
