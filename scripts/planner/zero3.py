# SPDX-License-Identifier: Apache-2.0
"""What a rank holds under DeepSpeed's ZeRO-3, which also shards parameters.

Sources: DeepSpeed's zero/stage3.py, zero/partition_parameters.py and
zero/partitioned_param_coordinator.py, with the settings that accelerate leaves as they are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .autograd import FP32, Autograd, Weight
from .blocks import EMBEDDING, TAIL, Part
from .decoder import Layer
from .ledger import Sizes, Storage
from .plan import Plan
from .ranks import Gathered, Unit, add_to
from .zero import BUCKET, NORM_ITEMSIZE, Bucket, state_of_master_copies

# Elements of DeepSpeed's settings
PREFETCH = 50_000_000  # stage3_prefetch_bucket_size
PERSISTENT = 100_000  # stage3_param_persistence_threshold: smaller tensors stay whole
MOST_LIVE = 1_000_000_000  # stage3_max_live_parameters: bound of prefetching, with what is in use
REUSE = 1_000_000_000  # stage3_max_reuse_distance: what is needed again that soon stays
SUB_GROUP = 1_000_000_000  # sub_group_size: elements that the optimizer updates at a time


class Gathering:
    """Parameters that are gathered together, in one flat buffer.

    All are copied out when the first is used; the buffer stays until the last is used.
    """

    def __init__(self, weights: Sequence[Weight], buffer: Storage) -> None:
        self.weights = weights
        self.buffer = buffer
        self.is_copied = False


def large_and_used(weights: Sequence[Weight]) -> list[Weight]:
    """Return the weights that are gathered: smaller ones are whole at any time."""
    return [weight for weight in weights if weight.is_used and weight.numel > PERSISTENT]


@dataclass
class Progress:
    """How far a micro-batch has come in the recorded order."""

    part: int = 0  # number of the next part, in `Zero3.uses_of_parts`
    position: int = 0  # position of the next use, in `Zero3.trace`
    prefetched: int = 0  # position up to which weights have been prefetched
    live: int = 0  # elements that are whole or in flight
    last_prefetched: dict[Weight, int] = field(default_factory=dict)  # position of each weight


class Zero3(Gathered):
    """A rank has 1/N of parameters, gradients, master weights and state, and small tensors whole.

    A module's parameters are gathered when it is called. Each call also prefetches up to PREFETCH
    elements of those that come next in the recorded order of a micro-batch (forward and backward
    pass), up to MOST_LIVE in all. Used parameters are freed unless they are used again within REUSE
    elements.
    """

    bucket: Bucket  # from `begin` on

    def __init__(
        self,
        plan: Plan,
        weights: Sequence[Weight],
        extra: Sizes,
        units: Mapping[Part, Sequence[Weight]],
        gathers_tail_first: bool,
    ) -> None:
        super().__init__(plan, weights, extra, units, gathers_tail_first)
        self.updated = math.ceil(self.own)  # elements that this rank updates
        self.largest = max((share.rounded for share in self.trained_shares), default=0)
        self.whole: dict[Weight, Storage] = {}
        self.inflight: dict[Weight, Gathering] = {}
        self.uses_of_parts = self.uses_in_a_pass()
        self.trace = [weight for weights in self.uses_of_parts for weight in weights]
        self.progress = Progress()

    def at_rest(self) -> tuple[Sizes, Sizes]:
        """Return what is held between steps, on the device and on the host.

        DeepSpeed's bucket for reductions is never freed.
        """
        plan = self.plan
        device = dict(self.extra)
        host = {}
        parameters = host if plan.offloads_parameters else device
        states = host if plan.offloads_optimizer else device
        for unit in self.units.values():
            for share in unit.shares:
                weight = share.weight
                add_to(parameters, weight.category, share.rounded * weight.itemsize)
                if weight.numel <= PERSISTENT:
                    add_to(device, "unsharded", weight.numel * weight.itemsize)
        states["master copies"] = FP32 * self.updated
        states["optimizer"] = state_of_master_copies(self.updated, plan.args.optim)
        # The recipes reduce and add gradients in fp32.
        states["gradients"] = FP32 * self.updated
        if plan.offloads_optimizer:
            host["communication"] = FP32 * self.updated  # gradients of a micro-batch
        device["communication"] = FP32 * BUCKET
        return device, host

    # ---- The recorded order ----
    def uses_in_a_pass(self) -> list[list[Weight]]:
        """Return each part's large weights in order of use, of a forward and backward pass."""
        large = {part: large_and_used(unit.weights) for part, unit in self.units.items()}
        if EMBEDDING not in large:  # The embedding is tied to the head.
            large = {EMBEDDING: large[TAIL]} | large
        forward = list(large.values())
        backward = []
        for part, weights in reversed(large.items()):
            if part == EMBEDDING and not self.trains(part):
                continue
            if self.plan.args.gradient_checkpointing and isinstance(part, Layer):
                backward.append(weights + weights[::-1])
            else:
                backward.append(weights[::-1])
        return forward + backward

    def trains(self, part: Part) -> bool:
        """Return whether any weight of a part trains."""
        unit = self.units.get(part, self.units[TAIL])
        return bool(unit.trained)

    def begin(self, autograd: Autograd) -> None:
        """Connect to an autograd."""
        super().begin(autograd)
        autograd.keeps_inputs = True  # DeepSpeed's linear layer keeps them for frozen weights too
        self.bucket = Bucket(autograd, FP32)

    def begin_pass(self, is_last: bool) -> None:
        """Called before each micro-batch: return to the start of the recorded order."""
        super().begin_pass(is_last)
        self.progress = Progress()
        for _ in range(2):  # Two outer modules of the model have no parameters but prefetch.
            self.prefetch()

    # ---- Gathering ----
    def fetch(self, weights: Sequence[Weight]) -> None:
        """Gather weights that are not whole: one in place, several through a flat buffer."""
        missing = [w for w in weights if w not in self.whole and w not in self.inflight]
        self.progress.live += sum(weight.numel for weight in missing)
        if len(missing) == 1:
            weight = missing[0]
            self.whole[weight] = self.autograd.new(weight.numel, weight.itemsize, "unsharded")
        elif missing:
            self.fetch_together(missing)

    def fetch_together(self, weights: list[Weight]) -> None:
        """Gather several weights through a flat buffer; shards on the host are copied first."""
        size = sum(weight.numel * weight.itemsize for weight in weights)
        share = size / self.plan.ranks if self.plan.offloads_parameters else 0
        shards = self.autograd.new(share, 1, "communication")
        buffer = self.autograd.new(size, 1, "communication")
        self.inflight |= dict.fromkeys(weights, Gathering(weights, buffer))
        del shards

    def prefetch(self) -> None:
        """Fetch the weights that come next; those that are whole already must stay until then."""
        progress = self.progress
        room = min(MOST_LIVE - progress.live, PREFETCH)
        wanted = []
        while progress.prefetched < len(self.trace) and sum(w.numel for w in wanted) < room:
            weight = self.trace[progress.prefetched]
            progress.last_prefetched[weight] = progress.prefetched
            is_there = weight in self.whole or weight in self.inflight or weight in wanted
            if not is_there:
                wanted.append(weight)
            progress.prefetched += 1
        self.fetch(wanted)

    def use(self, weight: Weight) -> None:
        """Gather the weight of a module that is called, and prefetch the next ones."""
        self.fetch([weight])
        gathering = self.inflight.pop(weight, None)
        if gathering is not None and not gathering.is_copied:
            for member in gathering.weights:
                self.whole[member] = self.autograd.new(member.numel, member.itemsize, "unsharded")
            gathering.is_copied = True
        del gathering
        progress = self.progress
        progress.position += 1
        progress.prefetched = max(progress.prefetched, progress.position)
        self.prefetch()

    def gather(self, unit: Unit, is_backward: bool = False) -> None:
        """Use all weights of the next part, in the order in which its modules are called."""
        weights = self.uses_of_parts[self.progress.part]
        self.progress.part += 1
        for weight in weights:
            self.use(weight)

    def keeps(self, part: Part) -> bool:
        """Return False: `release` decides for each weight whether it stays whole between passes."""
        return False

    def release(self, unit: Unit) -> None:
        """Free weights that are not used again soon, unless a prefetch counts on them."""
        progress = self.progress
        soon = self.used_soon()
        for weight in unit.weights:
            last = progress.last_prefetched.get(weight, -1)
            is_needed = weight in soon or last >= progress.position
            if weight in self.whole and not is_needed:
                del self.whole[weight]
                progress.live -= weight.numel

    def used_soon(self) -> set[Weight]:
        """Return the weights that are used within the next REUSE elements."""
        soon = set()
        distance = 0
        for weight in self.trace[self.progress.position :]:
            if distance >= REUSE:
                break
            soon.add(weight)
            distance += weight.numel
        return soon

    # ---- Gradients and optimizer ----
    def accumulate(self, weight: Weight, gradient: Storage) -> None:
        """Copy a gradient into the bucket, which is emptied first if it is full."""
        if self.bucket.filled and self.bucket.is_full_with(weight.numel):
            self.empty_bucket()
        self.bucket.add(weight.numel, gradient)

    def empty_bucket(self) -> None:
        """Reduce the bucket.

        With offload the norm of each gradient is computed before it is copied to the host
        (partition_grads of stage3.py).
        """
        norm = 0
        if self.plan.offloads_optimizer:
            norm = NORM_ITEMSIZE * self.largest
        self.bucket.reduce(norm)

    def reduce(self, unit: Unit) -> None:
        """Free parameters; gradients are reduced by bucket and not by unit."""
        self.release(unit)

    def end_pass(self) -> None:
        """Reduce what is left in the bucket, and free all whole parameters."""
        self.empty_bucket()
        self.whole = {}
        self.inflight = {}

    def step(self) -> None:
        """Run the optimizer on gradients in fp32, flat copies of SUB_GROUP elements at a time."""
        if self.plan.offloads_optimizer:
            return
        own = min(self.updated, SUB_GROUP)
        self.autograd.touch(self.largest, NORM_ITEMSIZE, "gradients")
        gradients = self.autograd.new(own, FP32, "gradients")
        if self.plan.args.optim == "adamw_torch":
            self.autograd.touch(own, FP32, "optimizer")
        del gradients
