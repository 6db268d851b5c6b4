# SPDX-License-Identifier: Apache-2.0
"""What a rank holds under PyTorch's FSDP, in both versions.

At rest a rank has 1/N of parameters, gradients and state (ranks.py). What it holds on top of that
depends on the size of a layer: U bytes of parameters in the precision of the computation, and G
bytes of gradients in that of reductions, which is fp32 under mixed precision. Around a layer a rank
holds at most

              forward pass    backward pass
    FSDP2     3 U             3 U + G
    FSDP1     U (1 + 1/N)     3 U or U + G (1 + 1/N), and U more with BACKWARD_PRE

FSDP2: in the forward pass the parameters, the buffer that they were gathered into, and the buffer
of the previous layer; in the backward pass the parameters, the buffer of the next layer, the
gradients, and the buffer of the last reduction. FSDP1: in the forward pass the parameters and the
shards that were cast to another precision; in the backward pass the parameters, the gradients and
their flat copy, or that copy, its cast and the reduced share.

Sources: torch's FSDPParamGroup and foreach_all_gather for FSDP2, its FlatParamHandle and
_runtime_utils.py for FSDP1, and accelerate's fsdp_utils.py, which makes each layer a unit.
"""

from collections.abc import Callable

from .autograd import Tensor
from .blocks import Part
from .ledger import Storage
from .ranks import Gathered, Unit


class Fsdp2(Gathered):
    """FSDP2 gathers into a flat buffer and copies the parameters out of it.

    In the forward pass that buffer lives until the next layer's is copied out, so that copying and
    gathering overlap. In the backward pass the next layer is gathered while one is computed.
    Gradients are reduced through a buffer of their size, which lives until the next reduction. The
    last gradient lives until its own reduction is done (the loop variable of foreach_reduce).
    Under hybrid sharding, the share that replicas all-reduce lives to the end of the pass
    (AllReduceState in FSDPParamGroup). It takes extra memory from the second micro-batch on, whose
    shares are added to the first.

    Experts of which no other rank has copies are a unit of one shard: they are copied without a
    buffer, and their gradients are divided by the number of ranks in new memory.
    """

    buffer_of_last_gather: Storage | None = None
    buffer_of_last_reduction: Storage | None = None

    def gather(self, unit: Unit, is_backward: bool = False) -> None:
        """Copy the parameters of a unit out of the buffer that they are gathered into."""
        if unit.whole is not None:
            return
        self.gather_ahead(unit)
        unit.whole = self.autograd.new(unit.gathered, 1, "unsharded")
        if not is_backward:
            self.buffer_of_last_gather = unit.buffer
        unit.buffer = None

    def gather_ahead(self, unit: Unit) -> None:
        """Gather a unit into its buffer; shards stored in another precision are cast first."""
        if unit.shards == 1:
            return
        if unit.buffer is None and unit.whole is None:
            cast = self.autograd.new(unit.cast, 1, "communication")
            unit.buffer = self.autograd.new(unit.gathered, 1, "communication")
            del cast

    def around(self, part: Part, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return forward(x), with parameters gathered before it and freed after it.

        Experts in a checkpointed layer are gathered when it is recomputed. FSDP2 takes that for a
        forward pass of its own, after which it frees the buffer (FSDPState._post_forward).
        """
        y = super().around(part, forward, x)
        if self.autograd.is_recomputing:
            self.end_forward()
        return y

    def keeps(self, part: Part) -> bool:
        """Return whether the parameters of a part stay whole after it was computed.

        Those that recompute it do, for the backward pass that follows
        (FSDPParamGroup.post_forward).
        """
        return super().keeps(part) or self.autograd.is_recomputing

    def reduce(self, unit: Unit) -> None:
        """Copy the gradients of a unit into a buffer, and reduce that."""
        self.release(unit)
        if not unit.whole_gradients:
            return
        self.buffer_of_last_reduction = None
        self.buffer_of_last_reduction = self.autograd.new(unit.reduced, 1, "communication")
        with_gradient = [weight for weight in unit.weights if weight in unit.whole_gradients]
        last = unit.whole_gradients[with_gradient[-1]]
        unit.whole_gradients = {}
        share = self.reduce_scatter(unit)
        if unit.shards == 1 and self.plan.ep > 1:
            self.autograd.touch(unit.reduced, 1, "communication")
        if self.plan.replicas > 1:
            unit.all_reduce_input = share
        del last, share

    def end_forward(self) -> None:
        """Free the buffer that the last unit was gathered into."""
        self.buffer_of_last_gather = None

    def end_pass(self) -> None:
        """Reduce the remaining gradients, and free all buffers."""
        super().end_pass()
        self.buffer_of_last_reduction = None
        self.buffer_of_last_gather = None
        for unit in self.units.values():
            unit.all_reduce_input = None


class Fsdp1(Gathered):
    """FSDP1 gathers in place, into the flat parameter of a unit, whose views are the weights.

    autograd returns a flat gradient: once all gradients of a unit are there it concatenates them
    (split_with_sizes_backward). The root, which holds embedding and head, is whole from the start
    of a pass to its end.

    Under NO_SHARD parameters and gradients are whole at any time. Only the copy of the parameters
    that is used for computation in mixed precision is allocated and freed.
    """

    @property
    def is_sharded(self) -> bool:
        """Whether several ranks share one copy of the state."""
        return self.plan.shards > 1

    def gather(self, unit: Unit, is_backward: bool = False) -> None:
        """Gather the parameters of a unit in place; shards are cast first."""
        is_whole_anyway = not self.is_sharded and not unit.cast
        if unit.whole is not None or is_whole_anyway:
            return
        cast_shards = unit.cast if self.is_sharded else 0
        cast = self.autograd.new(cast_shards, 1, "communication")
        unit.whole = self.autograd.new(unit.gathered, 1, "unsharded")
        del cast

    def gather_ahead(self, unit: Unit) -> None:
        """Gather the next unit while one is computed (BACKWARD_PRE)."""
        if self.plan.prefetches:
            self.gather(unit)

    def keeps(self, part: Part) -> bool:
        """Return whether the parameters of a part stay whole; copies under NO_SHARD do not."""
        return super().keeps(part) and self.is_sharded

    def reduce(self, unit: Unit) -> None:
        """Reduce the gradients of a unit, if it has any, and free its whole parameters."""
        if unit.whole_gradients:
            self.reduce_flat_gradient(unit)
        self.release(unit)

    def reduce_flat_gradient(self, unit: Unit) -> None:
        """Concatenate a unit's gradients, cast them to the precision of reductions, and reduce.

        Without shards the result is kept whole.
        """
        flat = self.autograd.new(unit.gradients, 1, "unsharded")
        unit.whole_gradients = {}
        self.release(unit)
        if unit.reduced != unit.gradients:
            cast = self.autograd.new(unit.reduced, 1, "unsharded")
        else:
            cast = flat
        if self.is_sharded:
            self.reduce_scatter(unit)
        elif unit.shard_of_gradients is None:
            unit.shard_of_gradients = cast.becomes("gradients")
