# SPDX-License-Identifier: Apache-2.0
"""An autograd over sizes instead of values.

The closed form follows a training step op by op, as PyTorch runs it. Each op states what it
allocates, what it keeps for the backward pass (torch's derivatives.yaml), and what it needs there.
Sizes are in elements (`numel`) and in bytes per element (`itemsize`), as in torch.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Union

from .ledger import Ledger, Storage

FP32 = 4  # bytes per element


@dataclass(slots=True, eq=False)
class Tensor:
    """The result of an op; `storage` is None where the bytes are counted elsewhere.

    node: the op that made it, or the weight that it is; None if it needs no gradient.
    """

    numel: int
    itemsize: int
    storage: Storage | None
    node: Union["Node", "Weight", None] = None


class Weight:
    """A parameter. The ledger counts it where the strategy holds it, not here.

    Args:
        numel: elements.
        itemsize: bytes per element in the precision that the model computes with.
        trains: whether it needs a gradient.
        rows: its first dimension.
        stored_itemsize: bytes per element of what is held at rest, if that is another precision.
        category: of the ledger.
    """

    def __init__(
        self,
        numel: int,
        itemsize: int,
        trains: bool,
        rows: int = 1,
        stored_itemsize: int | None = None,
        category: str = "parameters",
    ) -> None:
        self.numel = numel
        self.itemsize = itemsize
        self.trains = trains
        self.rows = rows
        self.stored_itemsize = itemsize
        if stored_itemsize is not None:
            self.stored_itemsize = stored_itemsize
        self.category = category
        self.is_used = True  # in forward passes; the original of a module that peft copies is not
        self.is_split_expert = False  # whether other ranks have further experts of its layer
        self.is_received = False  # a leaf that stands for what a stage of a pipeline receives
        self.is_embedding = False  # bitsandbytes never keeps an embedding's state in 8 bits
        self.order = math.inf  # in the graph: a complete gradient is accumulated before any op runs
        self.uses = 0  # ops whose backward pass contributes to its gradient
        self.gradient: Storage | None = None
        self.autocast_copy: Tensor | None = None

    @property
    def node(self) -> "Weight | None":
        """Where gradients go: to the weight itself, or nowhere if it is frozen."""
        return self if self.trains else None


class Flow(NamedTuple):
    """A gradient that an op passes to one of its inputs.

    itemsize: bytes per element, or None if the op passes on the gradient of its own result.
    """

    target: Union["Node", Weight]
    numel: int
    itemsize: int | None


@dataclass(slots=True, eq=False)
class Node:
    """One op of the graph: what its backward pass reads, allocates meanwhile, and returns.

    `holds` is what an op refers to by itself: checkpointing frees only what autograd keeps for it.
    """

    order: float  # the youngest runs first
    gives: list[Flow]
    keeps: list[Storage | None]
    scratch: int  # bytes
    whole: int = 0  # bytes of gradients that are held until this rank's part of them has arrived
    before: Callable[[], None] | None = None  # called before it runs
    holds: list[Storage | None] = field(default_factory=list)


class Autograd:
    """Ops over sizes, which record a graph where an input needs a gradient.

    Args:
        ledger: where all memory is counted.
        autocast_itemsize: bytes per element in which matrix products compute under autocast, or
            None without it.
        accumulate: called with a weight and its finished gradient; by default as torch does it.
    """

    def __init__(
        self,
        ledger: Ledger,
        autocast_itemsize: int | None = None,
        accumulate: Callable[[Weight, Storage], None] | None = None,
    ) -> None:
        self.ledger = ledger
        self.autocast_itemsize = autocast_itemsize
        self.accumulate = accumulate or self.keep_gradient
        self.no_grad = False
        # Whether products keep their input even if their weight is frozen and does not need it
        self.keeps_inputs = False
        self.order = 0
        self.is_checkpointing = False
        self.is_recomputing = False
        self.tape: list[Node] = []  # nodes of a checkpointed segment that keep something
        self.with_autocast_copy: list[Weight] = []

    # ---- Memory ----
    def new(self, numel: float, itemsize: int, category: str = "activations") -> Storage:
        """Allocate memory. A share of a tensor may be a fraction of elements: it is rounded up."""
        return Storage(self.ledger, category, math.ceil(numel) * itemsize)

    def touch(self, numel: float, itemsize: int, category: str = "activations") -> None:
        """Allocate memory and free it at once: it counts if this is the peak."""
        size = math.ceil(numel) * itemsize
        self.ledger.add(category, size)
        self.ledger.add(category, -size)

    # ---- Ops ----
    def op(
        self,
        numel: int,
        itemsize: int,
        inputs: Sequence[Tensor | Weight],
        keeps: Sequence[Tensor] = (),
        scratch: int = 0,
        shares_gradient: bool = False,
        storage: Storage | None = None,
    ) -> Tensor:
        """Return the result of an op.

        Args:
            numel: elements of the result.
            itemsize: bytes per element.
            inputs: tensors and weights that may need a gradient.
            keeps: tensors that its backward pass reads.
            scratch: bytes that its backward pass needs while it runs.
            shares_gradient: whether the gradient of the result is, unchanged, that of the inputs.
            storage: of the result, if it was allocated before.
        """
        if storage is None:
            storage = self.new(numel, itemsize)
        node = None
        if not self.no_grad:
            node = self._record(inputs, keeps, scratch, shares_gradient)
        return Tensor(numel, itemsize, storage, node)

    def _record(
        self,
        inputs: Sequence[Tensor | Weight],
        keeps: Sequence[Tensor],
        scratch: int,
        shares_gradient: bool,
    ) -> Node | None:
        """Return the node of an op, or None if no input needs a gradient."""
        gives = []
        for x in inputs:
            if x.node is not None:
                itemsize = None if shares_gradient else x.itemsize
                gives.append(Flow(x.node, x.numel, itemsize))
        if not gives:
            return None
        self.order += 1
        node = Node(self.order, gives, [x.storage for x in keeps], scratch)
        if keeps and (self.is_checkpointing or self.is_recomputing):
            self.tape.append(node)
        if self.is_checkpointing:
            node.keeps = []
        if not self.is_recomputing:  # gradients go through the nodes of the first pass
            for flow in gives:
                if isinstance(flow.target, Weight):
                    flow.target.uses += 1
        return node

    def hold(self, result: Tensor, held: Tensor) -> None:
        """Have the op that made `result` hold a tensor until it has run, also if checkpointed."""
        if isinstance(result.node, Node):
            result.node.holds.append(held.storage)

    def give_whole(self, result: Tensor, size: int) -> None:
        """Have the op that made `result` give gradients of `size` bytes, of which ranks keep parts.

        They are held until this rank's part has been cut out and added to other gradients.
        """
        if isinstance(result.node, Node):
            result.node.whole = size

    def cast(self, x: Tensor, itemsize: int | None) -> Tensor:
        """Return x in another precision, or x itself if `itemsize` is None or the one of x."""
        if itemsize is None or itemsize == x.itemsize:
            return x
        return self.op(x.numel, itemsize, [x])

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x + y. Both inputs get the gradient of the sum, if it has their precision."""
        itemsize = max(x.itemsize, y.itemsize)
        return self.op(x.numel, itemsize, [x, y], shares_gradient=x.itemsize == y.itemsize)

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x * y, element by element. Each is kept for the gradient of the other."""
        return self.op(x.numel, max(x.itemsize, y.itemsize), [x, y], keeps=kept_by_product(x, y))

    def linear(self, x: Tensor, weight: Weight, tokens: int) -> Tensor:
        """Return x, [tokens, in], times a weight, [in, out]: [tokens, out]."""
        x = self.cast(x, self.autocast_itemsize)
        copy = self.autocast_copy(weight)
        features_in = x.numel // tokens
        numel = weight.numel // features_in * tokens
        return self.op(numel, x.itemsize, [x, copy], keeps=self.kept_by_linear(x, copy))

    def kept_by_linear(self, x: Tensor, weight: Tensor) -> list[Tensor]:
        """Return what a product with a weight keeps: `kept_by_product`, or more (keeps_inputs)."""
        if self.keeps_inputs and weight.node is None:
            return [x, *kept_by_product(x, weight)]
        return kept_by_product(x, weight)

    # ---- Autocast ----
    def autocast_copy(self, weight: Weight) -> Tensor:
        """Return the weight in the precision of matrix products.

        torch.autocast casts a weight that trains once per forward pass and remembers the copy; a
        frozen one is cast at each use.
        """
        itemsize = self.autocast_itemsize
        if itemsize is None or itemsize == weight.itemsize:
            return Tensor(weight.numel, weight.itemsize, None, weight.node)
        if weight.autocast_copy is not None:
            return weight.autocast_copy
        storage = self.new(weight.numel, itemsize, "working copies")
        copy = self.op(weight.numel, itemsize, [weight], storage=storage)
        if weight.trains:
            weight.autocast_copy = copy
            self.with_autocast_copy.append(weight)
        return copy

    def end_autocast(self) -> None:
        """Forget the copies of weights, as torch does at the end of an autocast region."""
        while self.with_autocast_copy:
            self.with_autocast_copy.pop().autocast_copy = None

    # ---- Checkpointing ----
    def checkpoint(self, segment: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return segment(x), keeping only x: the backward pass recomputes the rest.

        This is torch.utils.checkpoint with use_reentrant=False. Nested checkpoints have no effect.
        """
        if self.is_checkpointing or self.is_recomputing:
            return segment(x)
        self.is_checkpointing = True
        y = segment(x)
        self.is_checkpointing = False
        nodes = self.tape
        self.tape = []
        if nodes:
            nodes[-1].before = partial(self._recompute, segment, x, nodes)
        return y

    def _recompute(self, segment: Callable[[Tensor], Tensor], x: Tensor, nodes: list[Node]) -> None:
        """Run a segment again, and give what its nodes keep to the nodes of the first pass.

        It runs in an autocast region of its own, so that weights are cast again.
        """
        outer = [(weight, weight.autocast_copy) for weight in self.with_autocast_copy]
        self.end_autocast()
        self.is_recomputing = True
        segment(x)
        self.is_recomputing = False
        self.end_autocast()
        for node, again in zip(nodes, self.tape, strict=True):
            node.keeps = again.keeps
        self.tape = []
        for weight, copy in outer:
            weight.autocast_copy = copy
            self.with_autocast_copy.append(weight)

    # ---- Backward pass ----
    def call_before(self, tensor: Tensor, action: Callable[[], None]) -> None:
        """Call an action before the backward pass of the op that made a tensor.

        Actions that were added earlier run after it. Nothing happens if the tensor needs no
        gradient.
        """
        node = tensor.node
        if not isinstance(node, Node):
            return
        later = node.before

        def before() -> None:
            action()
            if later is not None:
                later()

        node.before = before

    def keep_gradient(self, weight: Weight, gradient: Storage) -> None:
        """Take the first gradient of a weight as it is; torch adds later ones to it in place."""
        if weight.gradient is None:
            weight.gradient = gradient.becomes("gradients")

    def backward(self, loss: Tensor) -> None:
        """Run the graph of the loss as torch's engine does: the youngest op first.

        Each op frees what it kept once it has run. A weight's gradient is accumulated as soon as
        all of its parts have arrived.
        """
        run = BackwardRun(self)
        if loss.node is not None:
            run.start(loss.node, self.new(1, FP32))
        # Only the graph still refers to what the loss was computed from.
        loss.node = None
        loss.storage = None
        while run.ready:
            run.run_next()


class BackwardRun:
    """One pass of the engine: pending gradients, and the nodes that are ready to run."""

    def __init__(self, autograd: Autograd) -> None:
        self.autograd = autograd
        self.waiting: dict[Node | Weight, Storage] = {}
        self.arrived: dict[Weight, int] = {}  # parts of its gradient
        self.ready: list[tuple[float, int, Node | Weight]] = []  # a heap, the youngest first
        self.pushed = 0

    def start(self, node: Node | Weight, gradient: Storage) -> None:
        """Begin with the gradient of the loss with respect to itself."""
        self.waiting[node] = gradient
        self.push(node)

    def push(self, node: Node | Weight) -> None:
        """Queue a node by its order; weights are taken in the order in which they become ready."""
        heapq.heappush(self.ready, (-node.order, self.pushed, node))
        self.pushed += 1

    def run_next(self) -> None:
        """Run the next node of the queue."""
        _, _, node = heapq.heappop(self.ready)
        if isinstance(node, Weight):
            self.autograd.accumulate(node, self.waiting.pop(node))
        else:
            if node.before is not None:
                node.before()
            self.differentiate(node)

    def gradients_along(
        self, flows: Sequence[Flow], node: Node, gradient: Storage
    ) -> list[tuple[Node | Weight, Storage]]:
        """Return (input, its gradient) for some inputs of an op, with the op's scratch memory.

        gradient: that of the op's result, which some inputs share.
        """
        made = []
        self.autograd.ledger.add("activations", node.scratch)
        for flow in flows:
            part = gradient
            if flow.itemsize is not None:
                part = self.autograd.new(flow.numel, flow.itemsize)
            made.append((flow.target, part))
        self.autograd.ledger.add("activations", -node.scratch)
        return made

    def differentiate(self, node: Node) -> None:
        """Compute the gradients of an op's inputs; the gradient of its result is then freed."""
        whole = self.autograd.new(node.whole, 1)
        made = self.gradients_along(node.gives, node, self.waiting.pop(node))
        node.keeps = []
        node.holds = []
        node.before = None
        for target, part in made:
            self.arrive(target, part)
        del whole

    def arrive(self, target: Node | Weight, part: Storage) -> None:
        """Take a part of a gradient; a second one is added to the first in new memory."""
        is_first = target not in self.waiting
        if is_first:
            self.waiting[target] = part
        else:
            self.waiting[target] = self.autograd.new(part.size, 1)
        if not isinstance(target, Weight):
            # All parts come from younger nodes, which run before its turn.
            if is_first:
                self.push(target)
            return
        self.arrived[target] = self.arrived.get(target, 0) + 1
        if self.arrived[target] == target.uses:
            self.arrived[target] = 0
            target.uses = 0
            self.push(target)


def kept_by_product(x: Tensor, y: Tensor) -> list[Tensor]:
    """Return what a product keeps: each factor, if the other one needs a gradient."""
    kept = []
    if y.node is not None:
        kept.append(x)
    if x.node is not None:
        kept.append(y)
    return kept
