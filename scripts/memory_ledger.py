"""A ledger of bytes, and an autograd that has nothing but sizes.

The memory planner's closed form writes a training step down as in PyTorch, op by op; each op here knows what it makes,
what it keeps for the backward pass and what it makes there (torch's derivatives.yaml). A `Storage` is held as long as
Python refers to it, as a tensor is, and the ledger knows at each moment what is held and remembers the highest.
"""

import heapq
import math


class Ledger:
    """Bytes held now and at the peak, by category."""

    def __init__(self):
        self.held, self.total, self.peak, self.at_peak = {}, 0, 0, {}

    def add(self, category, size):
        self.held[category] = self.held.get(category, 0) + size
        self.total += size
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.held)


class Storage:
    """Bytes that are held until nothing refers to them."""

    __slots__ = ("ledger", "category", "size")

    def __init__(self, ledger, category, size):
        self.ledger, self.category, self.size = ledger, category, size
        ledger.add(category, size)

    def __del__(self):
        self.ledger.add(self.category, -self.size)

    def becomes(self, category):
        self.ledger.add(self.category, -self.size)
        self.category = category
        self.ledger.add(category, self.size)
        return self


class Tensor:
    """Elements, bytes an element, the storage behind them, and the node that differentiates them, if any."""

    __slots__ = ("numel", "width", "storage", "node")

    def __init__(self, numel, width, storage, node=None):
        self.numel, self.width, self.storage, self.node = numel, width, storage, node


class Weight:
    """A parameter: elements, bytes an element that the model computes with, rows (its first dimension), whether it
    trains, and bytes an element of what is stored, if those are others. The strategy counts what it holds."""

    def __init__(self, numel, width, trains, rows=1, stored=None, kind="parameters"):
        self.numel, self.width, self.trains, self.rows, self.stored, self.kind = (
            numel,
            width,
            trains,
            rows,
            stored or width,
            kind,
        )
        self.embeds = False  # an embedding, whose optimizer state is never in 8 bits
        self.order = math.inf  # gradients are accumulated as soon as all of them are there
        self.uses, self.grad, self.copy = 0, None, None

    @property
    def node(self):
        return self if self.trains else None


class Node:
    """One op in the graph. gives: (node, elements, bytes an element or None for a view of the gradient) for each
    input that wants a gradient; keeps: storages that the backward pass reads; scratch: bytes held while that runs;
    before: called first."""

    __slots__ = ("order", "gives", "keeps", "scratch", "before")

    def __init__(self, order, gives, keeps, scratch):
        self.order, self.gives, self.keeps, self.scratch, self.before = (
            order,
            gives,
            keeps,
            scratch,
            None,
        )


class Autograd:
    """Ops over sizes. autocasts: bytes an element that matrix products compute in, or None for those of their input.
    accumulate(weight, storage) takes a finished gradient."""

    def __init__(self, ledger, autocasts=None, accumulate=None):
        self.ledger, self.autocasts, self.accumulate = (
            ledger,
            autocasts,
            accumulate or self.keep_gradient,
        )
        self.order, self.tape, self.checkpoints, self.replays, self.copied = 0, [], False, False, []
        self.evaluates = False  # torch.no_grad: nothing is kept for a backward pass
        self.keeps_inputs = False  # of products with a frozen weight too

    def new(self, numel, width, category="activations"):
        return Storage(self.ledger, category, math.ceil(numel) * width)

    def op(
        self,
        numel,
        width,
        inputs,
        keeps=(),
        scratch=0,
        views=False,
        category="activations",
        storage=None,
    ):
        """A tensor that depends on `inputs`. views: its gradient is also theirs."""
        storage, node = storage or self.new(numel, width, category), None
        inputs = [] if self.evaluates else inputs
        gives = [(x.node, x.numel, None if views else x.width) for x in inputs if x.node]
        if gives:
            self.order += 1
            node = Node(self.order, gives, [x.storage for x in keeps], scratch)
            if keeps and (self.checkpoints or self.replays):
                self.tape.append(node)
            if self.checkpoints:
                node.keeps = []
            if not self.replays:
                for target in (target for target, _, _ in gives if isinstance(target, Weight)):
                    target.uses += 1
        return Tensor(numel, width, storage, node)

    def cast(self, x, width):
        """x in `width` bytes an element; itself where it is so already."""
        return x if width in (None, x.width) else self.op(x.numel, width, [x])

    def add(self, x, y):
        return self.op(x.numel, max(x.width, y.width), [x, y], views=x.width == y.width)

    def mul(self, x, y):
        """Each is kept for the gradient of the other."""
        return self.op(
            x.numel, max(x.width, y.width), [x, y], keeps=[x] * bool(y.node) + [y] * bool(x.node)
        )

    def copy_of(self, weight):
        """The weight in what matrix products compute in. Autocast makes that of a trained one once a forward pass, of
        a frozen one at each use."""
        if self.autocasts in (None, weight.width):
            return Tensor(weight.numel, weight.width, None, weight.node)
        if weight.copy is None or not weight.trains:
            made = self.op(weight.numel, self.autocasts, [weight], category="working copies")
            if not weight.trains:
                return made
            weight.copy = made
            self.copied.append(weight)
        return weight.copy

    def end_autocast(self):
        while self.copied:
            self.copied.pop().copy = None

    def linear(self, x, weight, rows):
        """x of `rows` tokens times a weight: its input is kept for a trained weight, the weight for an input that
        wants a gradient."""
        x, copy = self.cast(x, self.autocasts), self.copy_of(weight)
        numel = weight.numel * rows // x.numel * rows
        return self.op(numel, x.width, [x, copy], keeps=self.kept_by_product(x, copy))

    def kept_by_product(self, x, weight):
        return [x] * bool(weight.node or self.keeps_inputs) + [weight] * bool(x.node)

    def checkpoint(self, segment, x):
        """segment(x), which keeps x alone and computes itself again once a gradient arrives (torch.utils.checkpoint,
        non-reentrant)."""
        if self.checkpoints or self.replays:
            return segment(x)
        self.checkpoints, self.tape = True, []
        y, nodes = segment(x), self.tape
        self.checkpoints, self.tape = False, []
        if not nodes:
            return y

        def again():
            copies, self.copied = self.copied, []
            before = [(weight, weight.copy) for weight in copies]
            for weight in copies:
                weight.copy = None
            self.replays, self.tape = True, []
            segment(x)
            self.end_autocast()
            for node, made in zip(nodes, self.tape, strict=True):
                node.keeps = made.keeps
            self.replays, self.tape, self.copied = False, [], copies
            for weight, copy in before:
                weight.copy = copy

        nodes[-1].before = again
        return y

    def keep_gradient(self, weight, grad):
        """torch takes the first gradient as it is and adds others to it."""
        if weight.grad is None:
            weight.grad = grad.becomes("gradients")

    def backward(self, output, grad):
        """Run the graph behind `output` as torch's engine does: the youngest op first, each freeing what it kept."""
        start, output.node, output.storage = output.node, None, None
        waiting, heap, arrived, number = {start: grad}, [(-start.order, 0, start)], {}, 0
        del grad
        while heap:
            node = heapq.heappop(heap)[2]
            grad = waiting.pop(node)
            if isinstance(node, Weight):
                self.accumulate(node, grad)
                continue
            if node.before:
                node.before()
            scratch = self.new(node.scratch, 1)
            made = [
                (target, grad if width is None else self.new(numel, width))
                for target, numel, width in node.gives
            ]
            del scratch, grad
            node.keeps = node.before = None
            for target, storage in made:
                ready, first = not isinstance(target, Weight), target not in waiting
                waiting[target] = (
                    storage if first else self.new(storage.size, 1)
                )  # a sum, while both are there
                if not ready:
                    arrived[target] = arrived.get(target, 0) + 1
                    ready = first = arrived[target] == target.uses
                if ready and first:
                    number += 1
                    heapq.heappush(heap, (-target.order, number, target))
                    if isinstance(target, Weight):
                        target.uses = arrived[target] = 0
            del made, storage
