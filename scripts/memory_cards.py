"""Cards and their memory, and what a card holds besides tensors."""

import re

from model_shapes import Unplannable

GIB = 2**30
# GiB that torch reports as the card's total capacity, in out-of-memory messages of public issues; less than on the box
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
CONTEXT, COMMUNICATOR, ROUNDING = 0.8 * GIB, 0.5 * GIB, 0.05


def bytes_of(card):
    """Bytes of a card: a name of CARDS, or a size as 24GB (10^9) or 24GiB (2^30); None without one."""
    if card is None:
        return None
    name = card.lower().replace("rtx", "").strip(" -_")
    if name in CARDS:
        return int(CARDS[name] * GIB)
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(gb|gib|g)?", name)
    if not size or not float(size[1]):
        raise Unplannable(f"--gpu {card}: neither a size, as 24GB, nor one of {', '.join(CARDS)}")
    return int(float(size[1]) * (GIB if size[2] == "gib" else 10**9))


def pieces_on(card):
    """MiB of fp32 logits that the recipes compute at a time on a card of so many bytes, without --max_logits_mib."""
    from llama import LOGITS_SHARE  # here, since it imports all that a recipe needs

    return LOGITS_SHARE * card / 2**20


def constants_of(plan, device):
    """{"constants": bytes} that no tensor holds, assumed and not measured: CUDA's context and modules, a
    communicator's buffers, and what the allocator rounds up or cannot use again. The upper end of what is reported
    (README, "Will it fit?")."""
    return {
        "constants": int(
            CONTEXT + COMMUNICATOR * (plan.ranks > 1) + ROUNDING * sum(device.values())
        )
    }
