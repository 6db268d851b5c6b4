# SPDX-License-Identifier: Apache-2.0
"""A ledger of bytes: what is held now and what was held at the peak, by category.

A plan lists these categories:

    parameters      weights at rest: all of them, or this rank's shards
    adapters        LoRA's matrices, likewise
    whole modules   the copies of modules that are trained whole beside adapters, likewise
    quantization    scales of quantized weights
    master copies   DeepSpeed's fp32 copies of trained weights
    optimizer       AdamW's two numbers per weight, and what its step allocates
    gradients       gradients that wait for the optimizer
    unsharded       whole weights and whole gradients of a layer that is being computed
    working copies  weights in the precision that autocast computes in
    communication   buffers of gathers and reductions
    activations     what the forward pass allocates and keeps, and its gradients
    checkpoint      with --async_save, this rank's share while it is written; on the host
    logits          the output of the model's head, and what the loss allocates from it

As in PyTorch, memory is freed when Python drops the last reference to a `Storage`. A function of
the closed form mirrors the function whose memory it counts: a local variable of the model's code is
a local variable here, and is freed at the same point.
"""

Sizes = dict[str, int]  # {category: bytes}


def both(device: Sizes, host: Sizes) -> Sizes:
    """Return what device and host hold together."""
    sizes = dict(device)
    for category, size in host.items():
        sizes[category] = sizes.get(category, 0) + size
    return sizes


class Ledger:
    """Bytes held now and at the peak, in all and by category.

    What is held at the peak is copied when something is freed, not at each new peak on the way up:
    a plan makes millions of entries.
    """

    def __init__(self) -> None:
        self.held: Sizes = {}
        self.total = 0
        self._peak = 0
        self._at_peak: Sizes = {}

    def add(self, category: str, size: int) -> None:
        """Hold more bytes, or fewer if `size` is negative."""
        if size < 0 and self.total > self._peak:
            self._note_peak()
        self.held[category] = self.held.get(category, 0) + size
        self.total += size

    def _note_peak(self) -> None:
        """Remember what is held now, if it is more than ever before."""
        if self.total > self._peak:
            self._peak = self.total
            self._at_peak = dict(self.held)

    @property
    def peak(self) -> int:
        """The most bytes that were held at once."""
        self._note_peak()
        return self._peak

    @property
    def at_peak(self) -> Sizes:
        """What was held then, by category."""
        self._note_peak()
        return self._at_peak


class Storage:
    """Bytes that are held for as long as anything refers to this object."""

    __slots__ = ("ledger", "category", "size")

    def __init__(self, ledger: Ledger, category: str, size: int) -> None:
        self.ledger = ledger
        self.category = category
        self.size = size
        ledger.add(category, size)

    def __del__(self) -> None:
        self.ledger.add(self.category, -self.size)

    def becomes(self, category: str) -> "Storage":
        """Count the same bytes under another category from now on."""
        self.ledger.add(self.category, -self.size)
        self.category = category
        self.ledger.add(category, self.size)
        return self
