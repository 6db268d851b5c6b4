# SPDX-License-Identifier: Apache-2.0
"""The recipe's loss: cross-entropy of the supervised tokens, computed in the model's head.

Logits take 4 bytes x vocabulary per token, and the loss briefly holds about three times that. The
recipe therefore computes them only for supervised tokens, and in pieces if they would take more
than --max_logits_mib (core/loss.py).
"""

import math

from .autograd import FP32, Autograd, Tensor, Weight
from .decoder import Decoder
from .ledger import Storage

MIB = 2**20


class HeadLoss:
    """The loss of hidden states, [tokens, hidden], computed for `piece` tokens at a time."""

    def __init__(
        self, autograd: Autograd, decoder: Decoder, logits_mib: float, tp: int = 1
    ) -> None:
        self.autograd = autograd
        self.decoder = decoder
        self.tp = tp  # ranks that share the head
        bytes_per_token = FP32 * decoder.vocabulary
        self.piece = max(int(logits_mib * MIB / bytes_per_token), 1)

    def __call__(self, x: Tensor, supervised: int) -> Tensor:
        """Return the loss of the supervised tokens among those of x."""
        hidden = self.autograd.op(supervised * self.decoder.hidden, x.itemsize, [x])
        if supervised <= self.piece:
            return self.at_once(hidden, supervised)
        return self.in_pieces(hidden, supervised)

    def at_once(self, hidden: Tensor, tokens: int) -> Tensor:
        """Return the loss of all tokens, computed together."""
        logits = self.logits(hidden, tokens)
        logits = in_fp32(self.autograd, logits)
        return loss_of_logits(self.autograd, logits)

    def logits(self, hidden: Tensor, tokens: int) -> Tensor:
        """Return the output of the head, [tokens, vocabulary]."""
        x = self.autograd.cast(hidden, self.autograd.autocast_itemsize)
        head = self.autograd.autocast_copy(self.decoder.head.weight)
        numel = tokens * self.decoder.vocabulary
        return product_with_head(self.autograd, x, head, numel, self.tp)

    # ---- In pieces ----
    def in_pieces(self, hidden: Tensor, tokens: int) -> Tensor:
        """Return the loss as the recipe's LossInPieces computes it.

        It is one op, which keeps the hidden states and computes each piece in both passes. Under
        mixed precision the head's gradient, a sum in fp32, is rounded at the end of the backward
        pass.
        """
        ag = self.autograd
        weight = self.decoder.head.weight
        self.touch_piece_of_forward(hidden)
        head = Tensor(weight.numel, weight.itemsize, None, weight.node)
        scratch = 0
        if weight.trains and weight.itemsize != FP32:
            scratch = weight.numel * FP32
        losses = ag.op(tokens, FP32, [hidden, head], keeps=[hidden], scratch=scratch)
        ag.call_before(losses, lambda: self.touch_piece_of_backward(hidden))
        return ag.op(1, FP32, [losses])

    def touch_piece_of_forward(self, hidden: Tensor) -> None:
        """Briefly hold what a piece of the forward pass takes, without a graph."""
        decoder = self.decoder
        itemsize = self.itemsize_of_pieces(hidden)
        copy = self.copy_of_head(itemsize)
        head = Tensor(decoder.head.weight.numel, itemsize, copy)
        x = Tensor(self.piece * decoder.hidden, itemsize, None)
        self.loss_of_piece(Autograd(self.autograd.ledger), x, head)

    def touch_piece_of_backward(self, hidden: Tensor) -> None:
        """Briefly hold what a piece of the backward pass takes.

        The piece has a graph of its own. Besides it there are the gradients of all pieces so far:
        of the hidden states, and of the head in fp32.
        """
        ag = self.autograd
        weight = self.decoder.head.weight
        itemsize = self.itemsize_of_pieces(hidden)
        copy = self.copy_of_head(itemsize)
        sums = []
        if hidden.node is not None:
            sums.append(ag.new(hidden.numel, hidden.itemsize))
        if weight.trains:
            sums.append(ag.new(weight.numel, FP32, "gradients"))
        inner = Autograd(ag.ledger, accumulate=drop_gradient)
        head_leaf = Weight(weight.numel, itemsize, weight.trains)
        head = Tensor(weight.numel, itemsize, copy, head_leaf.node)
        loss = self.loss_of_rows(inner, hidden, head)
        inner.backward(loss)

    def loss_of_rows(self, inner: Autograd, hidden: Tensor, head: Tensor) -> Tensor:
        """Return the loss of one piece of the hidden states, which are cast to the head's type."""
        numel = self.piece * self.decoder.hidden
        rows = None
        if head.itemsize != hidden.itemsize:
            rows = inner.new(numel, head.itemsize)
        leaf = Weight(numel, head.itemsize, trains=hidden.node is not None)
        x = Tensor(numel, head.itemsize, rows, leaf.node)
        return self.loss_of_piece(inner, x, head)

    def loss_of_piece(self, inner: Autograd, x: Tensor, head: Tensor) -> Tensor:
        """Return the loss of one piece."""
        numel = self.piece * self.decoder.vocabulary
        logits = product_with_head(inner, x, head, numel, self.tp)
        logits = in_fp32(inner, logits)
        return loss_of_logits(inner, logits)

    def itemsize_of_pieces(self, hidden: Tensor) -> int:
        """Return the bytes per element that matrix products of pieces compute in."""
        return self.autograd.autocast_itemsize or hidden.itemsize

    def copy_of_head(self, itemsize: int) -> Storage | None:
        """Allocate a copy of the head's weight in another precision, or None if it has that one."""
        weight = self.decoder.head.weight
        if itemsize == weight.itemsize:
            return None
        return self.autograd.new(weight.numel, itemsize, "working copies")


def product_with_head(ag: Autograd, x: Tensor, head: Tensor, numel: int, tp: int) -> Tensor:
    """Return logits in the precision of x.

    numel: of all logits. tp: ranks that each compute a part of the vocabulary.
    """
    if tp > 1:  # Ranks add up the gradients of x.
        x = ag.op(x.numel, x.itemsize, [x], storage=x.storage)
    own = math.ceil(numel / tp)
    storage = ag.new(own, x.itemsize, "logits")
    keeps = ag.kept_by_linear(x, head)
    logits = ag.op(own, x.itemsize, [x, head], keeps=keeps, storage=storage)
    if tp == 1:
        return logits
    return gathered(ag, logits, numel)


def gathered(ag: Autograd, logits: Tensor, numel: int) -> Tensor:
    """Return the logits of the whole vocabulary, concatenated from those of all ranks."""
    parts = ag.new(numel, logits.itemsize, "communication")
    storage = ag.new(numel, logits.itemsize, "logits")
    del parts
    return ag.op(numel, logits.itemsize, [logits], storage=storage)


def in_fp32(ag: Autograd, logits: Tensor) -> Tensor:
    """Return logits in fp32, in which the loss is computed."""
    if logits.itemsize == FP32:
        return logits
    storage = ag.new(logits.numel, FP32, "logits")
    return ag.op(logits.numel, FP32, [logits], storage=storage)


def loss_of_logits(ag: Autograd, logits: Tensor) -> Tensor:
    """Return the summed cross-entropy: log_softmax, which keeps its result, and nll_loss."""
    storage = ag.new(logits.numel, FP32, "logits")
    result = Tensor(0, FP32, storage)
    log_probabilities = ag.op(logits.numel, FP32, [logits], keeps=[result], storage=storage)
    del storage, result
    return ag.op(1, FP32, [log_probabilities])


def drop_gradient(weight: Weight, gradient: Storage) -> None:
    """Ignore a gradient that is counted elsewhere."""
