# SPDX-License-Identifier: Apache-2.0
"""What a rank holds: `Replica` under one process and DDP, `Gathered` where parameters are sharded.

A strategy states what is held at rest, what it does around each part of a forward and backward
pass, and what the optimizer's step allocates. With P trained parameters of b bytes each, AdamW and
N ranks, a rank holds at rest, in bytes:

                parameters    gradients     AdamW's two numbers
    DDP         b P           b P           2 b P
    sharded     b P / N       b P / N       2 b P / N

In one process, gradients exist only within a step. Around the layer that is being computed, a
sharded strategy holds all of its parameters, and then all of its gradients.

FSDP's two versions are in fsdp.py, DeepSpeed's stages in zero.py and zero3.py.
evidence/test_planner.py compares each with live tensors.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from .autograd import FP32, Autograd, Tensor, Weight
from .blocks import EMBEDDING, TAIL, Part
from .decoder import Experts, Layer
from .ledger import Sizes, Storage
from .plan import Plan

# bitsandbytes' 8-bit optimizers
BLOCK_8BIT = 256  # numbers that share an fp32 scale
LEAST_8BIT = 4096  # elements: the state of smaller tensors stays in fp32


def state_in_8_bits(elements: int) -> int:
    """Return the bytes of AdamW's two numbers per element in 8 bits, with their scales."""
    scales = FP32 * math.ceil(elements / BLOCK_8BIT)
    return 2 * (elements + scales)


def state_bytes(weight: Weight, elements: int, optim: str) -> int:
    """Return the bytes of AdamW's state for some elements of a weight.

    torch's AdamW keeps two numbers per element in the precision of the weight. bitsandbytes keeps
    them in 8 bits, but in fp32 for embeddings and small tensors.
    """
    if optim.startswith("adamw_torch"):
        return 2 * elements * weight.stored_itemsize
    if is_8bit(optim) and not weight.is_embedding and weight.numel >= LEAST_8BIT:
        return state_in_8_bits(elements)
    return 2 * elements * FP32


def is_8bit(optim: str) -> bool:
    """Return whether --optim keeps AdamW's state in 8 bits."""
    return optim in ("adamw_8bit", "paged_adamw_8bit")


def add_to(sizes: Sizes, category: str, size: int) -> None:
    """Add bytes to those of a category."""
    sizes[category] = sizes.get(category, 0) + size


class Replica:
    """Every rank has all parameters: one process, and DDP.

    DDP holds all gradients as well, at any time, since they are views of the buckets it reduces.

    Args:
        plan: what determines memory.
        weights: all weights of the model, adapters included.
        extra: what else is held at rest, such as the scales of quantized weights.
    """

    autograd: Autograd  # from `begin` on
    is_last: bool  # whether the micro-batch is the last one of its step, from `begin_pass` on

    def __init__(self, plan: Plan, weights: Sequence[Weight], extra: Sizes) -> None:
        self.plan = plan
        self.weights = weights
        self.extra = extra
        self.trained = [weight for weight in weights if weight.trains]
        self.elements = sum(weight.numel for weight in self.trained)

    # ---- At rest ----
    def parameters(self) -> Sizes:
        """Return {category: bytes} of whole parameters and what belongs to them."""
        held = dict(self.extra)
        for weight in self.weights:
            add_to(held, weight.category, weight.numel * weight.itemsize)
        return held

    def at_rest(self) -> tuple[Sizes, Sizes]:
        """Return what is held between steps, on the device and on the host."""
        optim = self.plan.args.optim
        device = self.parameters()
        host = {}
        states = host if optim.startswith("paged") else device
        sizes = [state_bytes(weight, weight.numel, optim) for weight in self.trained]
        states["optimizer"] = sum(sizes)
        if self.plan.engine == "ddp":
            sizes = [
                weight.numel * weight.itemsize
                for weight in self.trained
                if not weight.is_split_expert
            ]
            device["gradients"] = sum(sizes)
        return device, host

    # ---- In a step ----
    def begin(self, autograd: Autograd) -> None:
        """Connect to an autograd, whose finished gradients go to `accumulate`."""
        self.autograd = autograd
        autograd.accumulate = self.accumulate

    def begin_pass(self, is_last: bool) -> None:
        """Called before each micro-batch. Gradients are reduced with the last one of a step."""
        self.is_last = is_last

    def around(self, part: Part, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return forward(x) for a part of the model, with what the strategy does around it."""
        if self.plan.args.gradient_checkpointing and isinstance(part, Layer):
            return self.autograd.checkpoint(forward, x)
        return forward(x)

    def end_forward(self) -> None:
        """Called between forward and backward pass."""

    def accumulate(self, weight: Weight, gradient: Storage) -> None:
        """Take a finished gradient. DDP copies that of the last micro-batch into its bucket.

        Experts that are spread over ranks have no bucket: the recipe averages each of their
        gradients by itself, in new memory.
        """
        if weight.is_split_expert:
            average = self.autograd.new(weight.numel, weight.itemsize, "gradients")
            self.autograd.keep_gradient(weight, average)
        elif self.plan.engine == "ddp" and self.is_last:
            weight.gradient = None
        else:
            self.autograd.keep_gradient(weight, gradient)

    def end_pass(self) -> None:
        """Called after each micro-batch."""

    def step(self) -> None:
        """Run the optimizer.

        Fused kernels allocate nothing. torch's foreach implementation allocates a tensor for each
        weight.
        """
        if self.plan.args.optim == "adamw_torch":
            size = sum(weight.numel * weight.stored_itemsize for weight in self.trained)
            self.autograd.touch(size, 1, "optimizer")
        for weight in self.trained:
            weight.gradient = None


@dataclass(frozen=True)
class Share:
    """What one rank has of a weight, in elements, and what all ranks have together.

    FSDP2 splits a weight by rows, and pads it to a multiple of the ranks. The other engines split a
    flat buffer of many weights, so that the share of one weight may be a fraction.
    """

    weight: Weight
    elements: float
    of_all: float  # with padding

    @property
    def rounded(self) -> int:
        """Elements of this rank, rounded up."""
        return math.ceil(self.elements)


def share_of(weight: Weight, plan: Plan, shards: int) -> Share:
    """Return what each of a number of shards has of a weight."""
    elements = weight.numel / shards
    if plan.engine == "fsdp2":
        elements_per_row = weight.numel // weight.rows
        elements = math.ceil(weight.rows / shards) * elements_per_row
    return Share(weight, elements, elements * shards)


class Unit:
    """Parameters that are gathered together.

    Args:
        weights: the parameters, under tensor or expert parallelism what a rank has of them.
        plan: what determines memory.
        shards: ranks that share them.

    Attributes, in bytes:
        gathered: of all parameters, in the precision that the model computes with.
        cast: of this rank's shards that are cast to that precision before they are gathered.
        gradients: of all gradients, in the precision of the backward pass.
        reduced: of all gradients, in the precision in which they are reduced.
    """

    def __init__(self, weights: Sequence[Weight], plan: Plan, shards: int) -> None:
        self.weights = weights
        self.shards = shards
        self.shares = [share_of(weight, plan, shards) for weight in weights]
        self.trained = [share for share in self.shares if share.weight.trains]
        self.gathered = 0.0
        self.cast = 0.0
        for share in self.shares:
            weight = share.weight
            self.gathered += share.of_all * weight.itemsize
            if weight.stored_itemsize != weight.itemsize:
                self.cast += share.elements * weight.itemsize
        self.gradients = 0.0
        self.reduced = 0.0
        for share in self.trained:
            itemsize = share.weight.itemsize
            self.gradients += share.of_all * itemsize
            # Under mixed precision the recipes reduce in fp32 (reduce_in_fp32).
            self.reduced += share.of_all * (FP32 if plan.low_itemsize else itemsize)
        # What is held at the moment
        self.whole: Storage | None = None  # the gathered parameters
        self.buffer: Storage | None = None  # the buffer that they are copied out of
        self.whole_gradients: dict[Weight, Storage] = {}
        self.shard_of_gradients: Storage | None = None
        self.all_reduce_input: Storage | None = None


class Gathered(Replica):
    """A rank has 1/N of everything at rest; around a part of the model its parameters are whole.

    Gradients of a part are whole until its backward pass is done. They are then reduced, and each
    rank keeps 1/N of the result. Subclasses define how parameters are gathered and gradients
    reduced.

    Args:
        plan, weights, extra: as for `Replica`.
        units: the weights of each part of the model that is gathered as one.
        gathers_tail_first: whether the unit of the tail is whole from the start of a pass to its
            end, because it also holds the embedding.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Sequence[Weight],
        extra: Sizes,
        units: Mapping[Part, Sequence[Weight]],
        gathers_tail_first: bool,
    ) -> None:
        super().__init__(plan, weights, extra)
        self.units = {}
        for part, members in units.items():
            if members:
                self.units[part] = Unit(members, plan, self.shards_of(part))
        self.gathers_tail_first = gathers_tail_first
        self.place: dict[
            Part, int
        ] = {}  # each unit's place in the order in which forward passes end
        self.in_order: list[Unit] = []
        self.unit_of = {weight: unit for unit in self.units.values() for weight in unit.weights}
        self.trained_shares = [share for unit in self.units.values() for share in unit.trained]
        self.own = sum(share.elements for share in self.trained_shares)

    def at_rest(self) -> tuple[Sizes, Sizes]:
        """Return what is held between steps, on the device and on the host: this rank's shares."""
        device = dict(self.extra)
        host = {}
        parameters = host if self.plan.offloads_parameters else device
        states = host if self.plan.offloads_optimizer else device
        for unit in self.units.values():
            for share in unit.shares:
                size = share.rounded * share.weight.stored_itemsize
                add_to(parameters, share.weight.category, size)
        optim = self.plan.args.optim
        states["optimizer"] = 0
        for share in self.trained_shares:
            states["optimizer"] += state_bytes(share.weight, share.rounded, optim)
        if self.plan.offloads_optimizer:
            sizes = [share.rounded * share.weight.stored_itemsize for share in self.trained_shares]
            states["gradients"] = sum(sizes)
        return device, host

    def shards_of(self, part: Part) -> int:
        """Return how many ranks share a part: of experts those that have the same ones."""
        if isinstance(part, Experts):
            return self.plan.shards // self.plan.ep
        return self.plan.shards

    # ---- Around a part ----
    def gather(self, unit: Unit, is_backward: bool = False) -> None:
        """Make the parameters of a unit whole, if they are not."""
        raise NotImplementedError

    def gather_ahead(self, unit: Unit) -> None:
        """Called in the backward pass before a part is computed, with the unit that comes next."""

    def release(self, unit: Unit) -> None:
        """Free whole parameters."""
        unit.whole = None

    def keeps(self, part: Part) -> bool:
        """Return whether the parameters of a part stay whole between the passes."""
        return not self.plan.reshards or part == TAIL

    def reduce(self, unit: Unit) -> None:
        """Turn whole gradients of a unit into this rank's share, and free its whole parameters."""
        raise NotImplementedError

    def around(self, part: Part, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return forward(x), with parameters gathered before it and freed after it.

        Hooks in the graph of the result do the same in the backward pass.
        """
        if part == EMBEDDING and self.gathers_tail_first:
            self.gather(self.units[TAIL])
        unit = self.units.get(part)
        if unit is None:
            return super().around(part, forward, x)
        self.gather(unit)
        if x.node is not None and not self.ends_with_pass(part):
            x = self.reducing_after(unit, x)
        y = super().around(part, forward, x)
        if part not in self.place:
            self.place[part] = len(self.in_order)
            self.in_order.append(unit)
        self.autograd.call_before(y, partial(self.gather_for_backward, part))
        if not self.keeps(part):
            self.release(unit)
        return y

    def ends_with_pass(self, part: Part) -> bool:
        """Return whether the unit of a part is in use until the backward pass is over."""
        return part == TAIL and self.gathers_tail_first

    def reducing_after(self, unit: Unit, x: Tensor) -> Tensor:
        """Return x with a node that reduces a unit's gradients at the end of its backward pass.

        FSDP places such a node at the input of a layer.
        """
        x = self.autograd.op(x.numel, x.itemsize, [x], shares_gradient=True, storage=x.storage)
        self.autograd.call_before(x, partial(self.reduce, unit))
        return x

    def gather_for_backward(self, part: Part) -> None:
        """Gather the unit of a part before its backward pass, and before it is recomputed."""
        self.gather(self.units[part], is_backward=True)
        place = self.place[part]
        if place > 0:
            self.gather_ahead(self.in_order[place - 1])

    # ---- Gradients and optimizer ----
    def accumulate(self, weight: Weight, gradient: Storage) -> None:
        """Keep a whole gradient until those of its unit are reduced."""
        self.unit_of[weight].whole_gradients[weight] = gradient.becomes("unsharded")

    def reduce_scatter(self, unit: Unit) -> Storage:
        """Return this rank's share of gradients, the output of a reduce-scatter.

        torch adds later shares to the first in place. With offload the share moves to the host.
        """
        output = self.autograd.new(unit.reduced / unit.shards, 1, "communication")
        if unit.shard_of_gradients is None and not self.plan.offloads_optimizer:
            unit.shard_of_gradients = output.becomes("gradients")
        return output

    def end_pass(self) -> None:
        """Reduce the gradients of units that no hook has reduced."""
        for unit in self.units.values():
            self.reduce(unit)

    def step(self) -> None:
        """Run the optimizer over this rank's shares."""
        if self.plan.args.optim == "adamw_torch" and not self.plan.offloads_optimizer:
            self.autograd.touch(self.own, FP32, "optimizer")
        for unit in self.units.values():
            unit.shard_of_gradients = None
