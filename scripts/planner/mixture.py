# SPDX-License-Identifier: Apache-2.0
"""The forward pass through the experts of a layer, and the loss of their routers, over sizes.

The hidden state of a token is copied into one line for each expert that its router picks. The
experts of a rank are computed together, on all lines sorted by expert
(grouped_mm_experts_forward of transformers).

Under expert parallelism lines travel to the ranks of their experts, and the results come back
(AllToAllEP). Routers decide how many lines arrive at a rank. Unless a batch says so, a plan counts
as many as are sent from it, which is the mean over the ranks of a group: the loss of the routers
evens them out.
"""

from collections.abc import Mapping

from .autograd import FP32, Autograd, Tensor, Weight
from .decoder import Experts
from .plan import Plan
from .recipe import has_router_loss

INDEX = 8  # bytes of a place in a tensor


class Mixture:
    """The experts of a decoder's layers.

    Args:
        autograd: whose ops are recorded.
        plan: what determines memory.
        tokens: their number in this rank's micro-batch.
        hidden: the number of features of a token.
        arrived: the lines that this rank computes for the experts of each layer under expert
            parallelism; as many as it sends for those that are not in it.
    """

    def __init__(
        self,
        autograd: Autograd,
        plan: Plan,
        tokens: int,
        hidden: int,
        arrived: Mapping[Experts, int],
    ) -> None:
        self.autograd = autograd
        self.plan = plan
        self.tokens = tokens
        self.hidden = hidden
        self.arrived = arrived
        self.has_router_loss = has_router_loss(plan.args)
        # One tensor for each layer, [tokens, experts]
        self.router_logits: list[Tensor] = []

    # ---- The router ----
    def routed(self, experts: Experts, logits: Tensor) -> Tensor:
        """Return how much each of a token's experts counts, [tokens, experts per token]."""
        ag = self.autograd
        if self.has_router_loss and not ag.is_recomputing:
            self.router_logits.append(logits)
        storage = ag.new(logits.numel, FP32)
        result = Tensor(logits.numel, FP32, storage)
        full = ag.cast(logits, FP32)
        probabilities = ag.op(logits.numel, FP32, [full], keeps=[result], storage=storage)
        lines = self.lines_sent(experts)
        chosen = self.places(lines)
        return ag.op(lines, FP32, [probabilities], keeps=[chosen])

    def lines_sent(self, experts: Experts) -> int:
        """Return the number of lines of this rank's tokens."""
        return self.tokens * experts.per_token

    def lines_computed(self, experts: Experts) -> int:
        """Return the number of lines that the experts of this rank compute."""
        return self.arrived.get(experts, self.lines_sent(experts))

    def places(self, lines: int) -> Tensor:
        """Allocate a number for each line: the expert or the place of a token."""
        return Tensor(lines, INDEX, self.autograd.new(lines, INDEX))

    # ---- The experts ----
    def combined(self, experts: Experts, weights: Tensor, x: Tensor) -> Tensor:
        """Return what the experts of each token put out, weighted and summed, [tokens, hidden]."""
        if self.plan.ep == 1:
            return self.computed(experts, x, weights)
        lines = self.dispatched(experts, x)
        out = self.computed(experts, lines)
        return self.collected(experts, out, weights)

    def dispatched(self, experts: Experts, x: Tensor) -> Tensor:
        """Return the lines that other ranks send, once this one has sent its own."""
        ag = self.autograd
        order = self.places(self.lines_sent(experts))
        sent = self.picked(x, order)
        return ag.op(self.lines_computed(experts) * self.hidden, sent.itemsize, [sent])

    def picked(self, x: Tensor, order: Tensor) -> Tensor:
        """Return the line at each of the places in `order`, [lines, hidden]."""
        return self.autograd.op(order.numel * self.hidden, x.itemsize, [x], keeps=[order])

    def collected(self, experts: Experts, out: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of the results of each token, which come back from other ranks."""
        ag = self.autograd
        lines = self.lines_sent(experts)
        back = ag.op(lines * self.hidden, out.itemsize, [out])
        order = self.places(lines)
        back = ag.op(back.numel, back.itemsize, [back], keeps=[order])
        return self.summed(self.weighted(back, weights))

    def weighted(self, lines: Tensor, weights: Tensor) -> Tensor:
        """Return each line times its weight, whose gradient is a sum over features."""
        ag = self.autograd
        keeps = [lines, weights]
        scratch = lines.numel * lines.itemsize
        return ag.op(lines.numel, lines.itemsize, [lines, weights], keeps=keeps, scratch=scratch)

    def summed(self, lines: Tensor) -> Tensor:
        """Return the sum of the lines of each token; their gradients are views of its own."""
        numel = self.tokens * self.hidden
        return self.autograd.op(numel, lines.itemsize, [lines], shares_gradient=True)

    def computed(self, experts: Experts, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return what the experts of this rank put out.

        Args:
            experts: of a layer.
            x: the hidden states of tokens, or under expert parallelism the lines of other ranks.
            weights: of the experts of each token; None if they are applied where the token is.
        """
        ag = self.autograd
        order = self.places(self.lines_computed(experts))
        back = self.places(self.lines_computed(experts))
        lines = self.sorted_lines(x, order)
        out = self.product(experts, lines, experts.gate_up, 2 * experts.width)
        out = self.gated(out)
        projected = self.product(experts, out, experts.down, self.hidden)
        if weights is not None:
            out = self.weighted(projected, weights)
        else:
            out = ag.op(projected.numel, projected.itemsize, [projected])  # times 1
        out = ag.op(out.numel, out.itemsize, [out], keeps=[back])
        if weights is not None:
            return self.summed(out)
        return ag.op(out.numel, out.itemsize, [out], shares_gradient=True)

    def sorted_lines(self, x: Tensor, order: Tensor) -> Tensor:
        """Return lines sorted by their expert."""
        lines = self.picked(x, order)
        return self.masked(lines, storage_of=lines)

    def product(self, experts: Experts, x: Tensor, weight: Weight, width: int) -> Tensor:
        """Return the product of each line with the matrix of its expert."""
        ag = self.autograd
        x = ag.cast(x, weight.itemsize)
        numel = self.lines_computed(experts) * width
        matrix = Tensor(weight.numel, weight.itemsize, None, weight.node)
        out = ag.op(numel, x.itemsize, [x, matrix], keeps=ag.kept_by_linear(x, matrix))
        return self.masked(out)

    def masked(self, x: Tensor, storage_of: Tensor | None = None) -> Tensor:
        """Return x with zeros in the lines of no expert, which only expert parallelism knows."""
        if self.plan.ep == 1:
            return x
        storage = None if storage_of is None else storage_of.storage
        return self.autograd.op(x.numel, x.itemsize, [x], storage=storage)

    def gated(self, inside: Tensor) -> Tensor:
        """Return activation(gate) * up. Both are views of one tensor, as are their gradients."""
        ag = self.autograd
        numel = inside.numel // 2
        scratch = numel * inside.itemsize  # the gradient of the other half
        gate = ag.op(numel, inside.itemsize, [inside], scratch=scratch, storage=inside.storage)
        up = Tensor(numel, inside.itemsize, inside.storage, gate.node)
        activated = ag.op(numel, inside.itemsize, [gate], keeps=[gate])
        return ag.mul(activated, up)

    # ---- The loss of the routers ----
    def router_loss(self) -> Tensor:
        """Return the loss of the routers of all layers (router_loss of recipes/mixtral.py)."""
        ag = self.autograd
        first, *_ = self.router_logits
        numel = first.numel * len(self.router_logits)
        logits = ag.op(numel, first.itemsize, self.router_logits)
        self.router_logits = []
        logits = ag.cast(ag.op(numel, logits.itemsize, [logits]), FP32)
        storage = ag.new(numel, FP32)
        result = Tensor(numel, FP32, storage)
        probabilities = ag.op(numel, FP32, [logits], keeps=[result], storage=storage)
        ag.touch(2 * numel, FP32)
        return ag.op(1, FP32, [probabilities])
