# SPDX-License-Identifier: Apache-2.0
"""What a rank holds under DeepSpeed's ZeRO, stages 0 to 2, which keep parameters whole.

With P trained parameters, mixed precision and N ranks, a rank holds at rest, in bytes (arXiv
1910.02054, figure 1, has 2 + 2 + 12 per parameter in all):

               parameters    gradients       master copies    AdamW's two numbers
    ZeRO-0     2 P           2 P             4 P              8 P
    ZeRO-1     2 P           2 P             4 P / N          8 P / N
    ZeRO-2     2 P           4 P / N         4 P / N          8 P / N
    ZeRO-3     2 P / N       4 P / N         4 P / N          8 P / N

The recipes add gradients in fp32, hence 4 where the paper has 2. Stages 1 and above have fp32
master copies even without mixed precision. ZeRO-3 is in zero3.py.

Sources: DeepSpeed's engine.py, unfused_optimizer.py (stage 0 in mixed precision) and
zero/stage_1_and_2.py, with the settings that accelerate leaves as they are.
"""

import math
from collections.abc import Sequence

from .autograd import FP32, Autograd, Weight
from .ledger import Sizes, Storage
from .plan import Plan
from .ranks import Replica, is_8bit, state_in_8_bits

BUCKET = 500_000_000  # elements: reduce_bucket_size, and of stage 0's buckets
NORM_ITEMSIZE = 8  # bytes: the norm of each gradient is computed in fp64


def state_of_master_copies(elements: int, optim: str) -> int:
    """Return the bytes of AdamW's two numbers for each fp32 master weight."""
    if is_8bit(optim):
        return state_in_8_bits(elements)
    return 2 * FP32 * elements


def fullest_part(sizes: Sequence[int], parts: int) -> int:
    """Return the elements of all tensors that the fullest rank has a piece of.

    The tensors are concatenated in a flat buffer, which is split into equal parts.
    """
    part = math.ceil(sum(sizes) / parts)
    elements = [0] * parts
    start = 0
    for size in sizes:
        first = start // part
        last = min((start + size - 1) // part, parts - 1)
        for rank in range(first, last + 1):
            elements[rank] += size
        start += size
    return max(elements)


class Bucket:
    """Gradients on their way to other ranks.

    They are copied into a buffer. A full buffer is reduced through a flat copy, in which each
    rank's part is contiguous, and under mixed precision through an fp32 copy of that
    (reduce_in_fp32 of the recipes). A gradient larger than the buffer is kept as it is.
    """

    def __init__(self, autograd: Autograd, itemsize: int, buffer: Storage | None = None) -> None:
        self.autograd = autograd
        self.itemsize = itemsize
        self.buffer = buffer
        self.filled = 0  # elements
        self.waiting: list[Storage | None] = []

    def is_full_with(self, elements: int) -> bool:
        """Return whether there is no room for this many more elements."""
        return self.filled + elements > BUCKET

    def add(self, elements: int, gradient: Storage | None) -> None:
        """Copy a gradient into the buffer."""
        self.filled += elements
        if elements > BUCKET:
            self.waiting.append(gradient)

    def reduce(self, bytes_meanwhile: int = 0) -> None:
        """Empty the buffer. bytes_meanwhile: needed briefly while the flat copy is allocated."""
        flat = self.autograd.new(self.filled, self.itemsize, "communication")
        if self.itemsize < FP32:
            self.autograd.touch(self.filled, FP32, "communication")
        self.autograd.touch(bytes_meanwhile, 1, "gradients")
        del flat
        self.filled = 0
        self.waiting = []


class Zero(Replica):
    """ZeRO stages 0 to 2: parameters are whole.

    In stage 0 the state and, under mixed precision, the master weights are whole too. In stages 1
    and 2 a rank has 1/N of the fp32 master weights and of the state, in stage 2 also 1/N of the
    gradients. A gradient that is split between two ranks is whole on both.
    """

    def __init__(self, plan: Plan, weights: Sequence[Weight], extra: Sizes) -> None:
        super().__init__(plan, weights, extra)
        parts = plan.ranks if plan.stage else 1
        self.own = math.ceil(self.elements / parts)  # elements that this rank updates
        self.itemsize = plan.low_itemsize or FP32
        self.largest = max((weight.numel for weight in self.trained), default=0)
        self.in_part = self.elements_in_part()
        # Micro-batches are added in fp32 (reduce_in_fp32 of the recipes), but not with offload.
        self.adds_in_fp32 = (
            plan.stage == 2 and plan.low_itemsize is not None and not plan.offloads_optimizer
        )
        self.bucket: Bucket | None = None
        self.part: Storage | None = None  # this rank's gradients of a micro-batch
        self.sum: Storage | None = None  # this rank's gradients of the step

    def elements_in_part(self) -> int:
        """Return the elements of tensors that this rank has a piece of.

        The recipes have two groups of parameters: matrices, with weight decay, and vectors such as
        norms and biases, without. DeepSpeed splits each group by itself.
        """
        vectors = [weight.numel for weight in self.trained if weight.rows == weight.numel]
        matrices = [weight.numel for weight in self.trained if weight.rows != weight.numel]
        return sum(fullest_part(sizes, self.plan.ranks) for sizes in (matrices, vectors) if sizes)

    def at_rest(self) -> tuple[Sizes, Sizes]:
        """Return what is held between steps, on the device and on the host."""
        plan = self.plan
        device = self.parameters()
        host = {}
        states = host if plan.offloads_optimizer else device
        if plan.low_itemsize or plan.stage:
            states["master copies"] = FP32 * self.own
        states["optimizer"] = state_of_master_copies(self.own, plan.args.optim)
        if plan.offloads_optimizer:
            # In transit: sums of micro-batches, new weights, and one gradient
            sums = 0
            if plan.args.gradient_accumulation_steps > 1:
                sums = self.in_part
            host["gradients"] = FP32 * self.own
            host["communication"] = self.itemsize * (sums + self.own + self.largest)
            device["communication"] = self.itemsize * self.largest
        return device, host

    # ---- Gradients ----
    def accumulate(self, weight: Weight, gradient: Storage) -> None:
        """Take a finished gradient.

        Stage 2 copies gradients into a bucket; the other stages keep them whole. Stage 1 allocates
        the bucket at the same time, and fills it after the pass.
        """
        if self.plan.stage > 0 and self.bucket is None:
            buffer = self.autograd.new(BUCKET, self.itemsize, "communication")
            self.bucket = Bucket(self.autograd, self.itemsize, buffer)
        if self.plan.stage == 2 and self.bucket is not None:
            self.into_bucket(self.bucket, weight, gradient)
        else:
            self.autograd.keep_gradient(weight, gradient)

    def into_bucket(self, bucket: Bucket, weight: Weight, gradient: Storage | None) -> None:
        """Copy a gradient into the bucket, which is reduced first if it is full."""
        if bucket.is_full_with(weight.numel):
            self.reduce(bucket)
        bucket.add(weight.numel, gradient)

    def reduce(self, bucket: Bucket) -> None:
        """Empty the bucket; this rank's part is copied out of it."""
        on_device = not self.plan.offloads_optimizer
        if on_device and self.adds_in_fp32 and self.sum is None:
            # Gradients go straight into the flat part that the optimizer reads.
            self.sum = self.autograd.new(self.own, FP32, "gradients")
        bucket.reduce()
        if on_device and not self.adds_in_fp32 and self.part is None:
            self.part = self.autograd.new(self.in_part, self.itemsize, "gradients")

    def end_pass(self) -> None:
        """Stage 2 reduces each micro-batch and adds it up; the others reduce the last one."""
        if self.plan.stage == 0:
            if self.is_last:
                self.all_reduce()
            return
        if self.bucket is None:
            return
        if self.plan.stage == 1:
            if not self.is_last:
                return
            self.empty_gradients_into(self.bucket)
        self.reduce(self.bucket)
        if self.sum is None:
            self.sum = self.part
        self.part = None
        self.bucket = None

    def all_reduce(self) -> None:
        """Reduce all gradients through buckets, which are cast to fp32 under mixed precision."""
        elements = min(self.elements, BUCKET)
        flat = self.autograd.new(elements, self.itemsize, "communication")
        if self.itemsize < FP32:
            self.autograd.touch(elements, FP32, "communication")
        del flat

    def empty_gradients_into(self, bucket: Bucket) -> None:
        """Move the gradients that stage 1 has kept whole into the bucket, one after another.

        Biases take room there too, although the forward pass ignores them for their size.
        """
        for weight in self.trained:
            gradient = weight.gradient
            weight.gradient = None
            self.into_bucket(bucket, weight, gradient)
            del gradient

    # ---- Optimizer ----
    def step(self) -> None:
        """Run the optimizer on gradients in fp32.

        Under mixed precision, stage 0 allocates them besides those of the model, and the other
        stages from a flat copy.
        """
        if self.plan.offloads_optimizer:
            return
        if self.plan.stage:
            self.autograd.touch(min(self.largest, self.own), NORM_ITEMSIZE, "gradients")
        gradients = self.gradients_in_fp32()
        self.sum = None
        if self.plan.args.optim == "adamw_torch":
            self.autograd.touch(self.own, FP32, "optimizer")
        del gradients
        for weight in self.trained:
            weight.gradient = None

    def gradients_in_fp32(self) -> Storage | None:
        """Return this rank's gradients as the optimizer reads them."""
        if self.adds_in_fp32:
            return self.sum
        own = self.own if self.plan.stage else 0
        flat = self.autograd.new(own, self.itemsize, "gradients")
        if self.plan.low_itemsize:
            return self.autograd.new(self.own, FP32, "gradients")
        return flat
