# SPDX-License-Identifier: Apache-2.0
"""The memory of GPUs, and what a process takes of it besides tensors. All sizes are in bytes."""

import re
from collections.abc import Mapping

from .errors import UnplannableError

GB = 10**9
GIB = 2**30
# GiB that torch reports as a card's total capacity in the out-of-memory messages of public issues,
# which is less than what is printed on the box
CARDS = {
    "t4": 14.6,
    "v100": 15.7,
    "v100-32gb": 31.7,
    "3090": 23.6,
    "4090": 23.5,
    "5090": 31.3,
    "l4": 22.0,
    "a10g": 22.0,
    "a6000": 47.4,
    "l40s": 44.4,
    "a100-40gb": 39.4,
    "a100": 79.1,
    "h100": 79.1,
    "h200": 139.8,
    "b200": 178.3,
    "mi300x": 191.6,
}
# Cards older than Ampere have no matrix units for bf16.
SLOW_IN_BF16 = ("t4", "v100", "v100-32gb")
# If no card is named, the loss is computed in pieces as on this one.
USUAL_CARD = 80 * GIB

# Memory that no tensor holds. Each number is an assumption, at the upper end of public reports;
# none was measured here (docs/planning.md).
CONTEXT = 0.8 * GIB  # CUDA's context and the kernels that are loaded into it
COMMUNICATOR = 0.5 * GIB  # NCCL's buffers, once there are several ranks
ROUNDING = 0.05  # share of all tensors that the allocator rounds up or cannot reuse


def bytes_of(card: str | None) -> int | None:
    """Return the bytes of a card: a name of CARDS, or a size such as 24GB (10^9) or 24GiB (2^30).

    Returns None for no card. Raises UnplannableError for anything else.
    """
    if card is None:
        return None
    name = known_name(card)
    if name in CARDS:
        return bytes_of_known(name)
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(gb|gib|g)?", name)
    if size is None or float(size[1]) == 0:
        raise UnplannableError(
            f"--gpu {card}: neither a size such as 24GB nor one of {', '.join(CARDS)}"
        )
    unit = GIB if size[2] == "gib" else GB
    return int(float(size[1]) * unit)


def describe(card: str) -> str:
    """Return a sentence on how many GiB of a card count, and why."""
    size = bytes_of(card)
    assert size is not None
    counts = f"--gpu {card} counts as {size / GIB:.1f} GiB"
    if known_name(card) in CARDS:
        return f"{counts}, which torch reports as the capacity of this card."
    unit = "1 GiB is 2^30 bytes" if card.lower().endswith("gib") else "1 GB is 10^9 bytes"
    return f"{counts} ({unit}); the name of a card, as in --gpu 4090, counts what torch reports."


def known_name(card: str) -> str:
    """Return a card's name as CARDS has it, if it has it."""
    return card.lower().replace("rtx", "").strip(" -_")


def bytes_of_known(name: str) -> int:
    """Return the bytes of a card of CARDS."""
    return int(CARDS[name] * GIB)


def with_constants(device: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return what a device holds, {category: bytes}, with "constants" for all but tensors."""
    constants = CONTEXT
    if ranks > 1:
        constants += COMMUNICATOR
    constants += ROUNDING * sum(device.values())
    return {**device, "constants": int(constants)}
