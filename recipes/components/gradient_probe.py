# SPDX-License-Identifier: Apache-2.0
"""A probe of the first step: is the engine's gradient the sum of what the ranks computed?

The recipes multiply a loss by the number by which the engine divides the sum of the gradients
(`backward_of_sum` of components/strategy.py). An engine that came to divide by another number would
train with wrong gradients, and nothing would show it: Adam's step has the same length for any
constant factor. So the probe takes one small weight, catches the gradients that autograd computes
for it on each rank, before the engine sees them, adds them up itself, and compares the sum with
what the engine hands to the optimizer. There is no other pass and no other loss, and so nothing to
undo: a run with the probe has the same bits as one without.

Experts that are spread over ranks are reduced in another group of ranks, so that a row of each is
compared too: with the sum over the ranks that have the same experts, since the gradient on each of
them is already that of the tokens of its group. Pipelines: components/pipeline_probe.py.

What it does not see: other weights than these; a split that lacks a part, or an expert that lacks
the tokens of a rank; a loss that is divided by a wrong count; a clipping or an optimizer that is
wrong; an engine that changes its mind after the first step.
"""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from components.deepspeed_state import clean_name
from components.exits import Exit
from components.experts import COPIES, names_of_experts
from components.fsdp1_state import fsdp1_parts
from components.mesh import Mesh, divided
from components.optimizer import is_bias_or_norm
from components.state import get_loss_scale
from components.strategy import Strategy
from components.watched_weight import WatchedWeight, parts_of_rank, products_of

# The largest difference, as a share of the gradient's norm. In fp32 only the order of additions
# differs. With 16 bits, ZeRO-0 and ZeRO-1 round whenever they add a micro-batch: 0.3 % after two of
# them, and more after many. An engine that counts a group of ranks too much or not at all is off by
# half or more.
BOUND = 1e-4
BOUND_OF_16_BITS = 0.1


class GradientProbe:
    """Watches one weight, and one of spread experts, until a step has shown that they are right.

    Every rank makes every call. The first step counts whose gradients are finite and not zero.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: AcceleratedOptimizer,
        end: Callable[[int, str], None],
    ) -> None:
        """Hook the modules that use the weights.

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
        trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
        experts = [name for name in names_of_experts(model) if name in trained]
        shared = [name for name in trained if name not in experts]
        self._shared = [WatchedWeight(model, choose_weight(shared))] if shared else []
        self._experts = [WatchedWeight(model, experts[-1], keep=row_of_each)] if experts else []

    @contextmanager
    def watching(self, loss: torch.Tensor) -> Generator[None]:
        """Catch the gradients of a backward pass, and after the last of a step compare their sum.

        Args:
            loss: this micro-batch's part of the loss, as it is before any factor.
        """
        handle = loss.register_hook(self._note_factor)
        compares = self._accelerator.sync_gradients
        if compares and self._strategy.zero_stage is not None:
            with self._comparing_before_engine_steps():
                yield
        else:
            yield
            if compares:
                self._compare()
        handle.remove()
        for watched in self._watched:
            watched.forget_graph()

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
    def _watched(self) -> list[WatchedWeight]:
        """All watched weights, in the order in which they are compared."""
        return [*self._shared, *self._experts]

    def _note_factor(self, gradient: torch.Tensor) -> None:
        """Note what the loss is multiplied by, all in all, before its gradient is computed."""
        for watched in self._watched:
            watched.factor = gradient.detach().float()

    # ---- What the engine makes of it ----
    def _compare(self) -> None:
        """Compare each weight, and end all ranks if one differs.

        A weight that some rank did not use cannot be compared. Where a gradient is zero or not
        finite, the next step is watched instead.
        """
        sums = [watched.take() for watched in self._watched]
        unused = self._unused_by_a_rank(sums)
        if unused is not None:
            self._stop_watching()
            self._accelerator.print(
                f"warning: not every rank used {unused.name} in the first step: the gradient probe "
                "has compared nothing"
            )
            return
        found = self._products(sums)
        if any(square == 0 or not math.isfinite(square + off) for _, square, off in found):
            return
        self._stop_watching()
        for watched, (along, square, off) in zip(self._watched, found, strict=True):
            self._judge(watched, along, square, off)

    def _unused_by_a_rank(self, sums: Sequence[Any]) -> WatchedWeight | None:
        """Return the first weight that some rank did not use. Every rank takes part.

        Args:
            sums: of this rank's gradients of each watched weight; None where it used it nowhere.
        """
        accelerator = self._accelerator
        are_used = torch.tensor([float(own is not None) for own in sums], device=accelerator.device)
        users = accelerator.reduce(are_used).tolist()
        for watched, num_ranks in zip(self._watched, users, strict=True):
            if num_ranks < accelerator.num_processes:
                return watched
        return None

    def _products(self, sums: Sequence[Any]) -> list[list[float]]:
        """Return what `_judge` is given for each watched weight. Every rank takes part."""
        products = []
        for watched, own in zip(self._watched, sums, strict=True):
            parts_of = self._parts_of_experts if watched in self._experts else self._parts_of_shared
            products.append(products_of(*parts_of(watched.weight, own)))
        return self._accelerator.reduce(torch.stack(products)).tolist()

    def _judge(self, watched: WatchedWeight, along: float, square: float, off: float) -> None:
        """End all ranks if the gradient of a weight is off by more than its bound.

        Args:
            along: the sum of what was found x expected.
            square: of expected^2.
            off: of the squared differences.
        """
        difference = math.sqrt(off / square)
        if difference <= bound_of(self._accelerator, watched.weight):
            return
        cure = "correct `averaged` in components/mesh.py"
        if watched in self._experts:
            cure = "correct components/experts.py"
        told = describe_difference(watched.name, along / square, difference, cure)
        self._end(Exit.DIFFERS, f"{self._strategy.name} trains {told}")

    def _stop_watching(self) -> None:
        """Remove hooks and probe: the next steps are as if there had been none."""
        for watched in self._watched:
            watched.stop()
        self._accelerator.gradient_probe = None  # pyrefly: ignore[missing-attribute]

    def _loss_scale(self) -> float:
        """Return fp16's loss scale, by which the engine's gradient is still multiplied."""
        if self._strategy.zero_stage is None and self._accelerator.scaler is None:
            return 1.0  # As on a CPU, where accelerate scales no loss
        state = get_loss_scale(self._accelerator, self._optimizer)
        return float(state.get("scale", state.get("cur_scale", 1.0)))

    def _parts_of_shared(self, weight: Any, own: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's part of the engine's gradient, and the same part of the expected one.

        Args:
            weight: that all ranks train.
            own: the sum of this rank's gradients.
        """
        if isinstance(own, DTensor):
            own = own.full_tensor()
        tp = Mesh.of(self._accelerator).tp
        expected = divided(self._accelerator.reduce(own), tp) * self._loss_scale()
        gradient = weight.grad
        if self._strategy.zero_stage is not None:
            from deepspeed.utils import safe_get_full_grad

            gradient = safe_get_full_grad(weight)
        elif self._strategy.fsdp_version == 1:
            part = fsdp1_parts(self._model)[weight]
            expected = expected.flatten()[part]
            if gradient is None:  # This rank has nothing of the weight.
                gradient = torch.zeros_like(expected)
            gradient = gradient.flatten()
            if gradient.numel() != expected.numel():
                gradient = gradient[part]
        return parts_of_rank(gradient, expected)

    def _parts_of_experts(self, weight: Any, own: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first rows of this rank's experts in the engine's gradient, and as expected.

        Args:
            weight: of experts, [experts, ...], as the rank has it.
            own: the sum of the gradients of the experts of this rank's group, [experts, columns].
        """
        mesh: Any = self._accelerator
        copies = mesh.expert_mesh[COPIES]
        expected = own.clone()
        dist.all_reduce(expected, group=copies.get_group())
        if self._strategy.fsdp_version == 2:
            shards = distribute_tensor(expected, copies, [Shard(0)], src_data_rank=None)
            expected = shards.to_local()
        return row_of_each(weight.grad), expected


def row_of_each(experts: Any) -> torch.Tensor:
    """Return the first row of each expert of this rank, since a whole one may be large.

    Args:
        experts: [experts, rows, columns], spread over ranks.
    """
    return experts.to_local()[:, 0]


def bound_of(accelerator: Accelerator, weight: torch.Tensor) -> float:
    """Return the largest difference that is rounding.

    DeepSpeed may reduce gradients in 16 bits although all else is fp32 (communication_data_type).
    """
    is_fp32 = accelerator.mixed_precision == "no" and weight.dtype == torch.float32
    may_round = Strategy.of(accelerator).zero_stage is not None
    return BOUND if is_fp32 and not may_round else BOUND_OF_16_BITS


def describe_difference(name: str, ratio: float, difference: float, cure: str) -> str:
    """Return what follows "... trains " in the message about a weight that differs.

    Args:
        cure: what to do where versions are not the cause.
    """
    return (
        f"{name} with {ratio:.4g} times its gradient (difference {difference:.1%}), and no weight "
        "was changed: the engine averages otherwise than the recipes expect. Here are "
        f"{installed_versions()}: install those of requirements.txt, or {cure}"
    )


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
