# SPDX-License-Identifier: Apache-2.0
"""What the core calls of this extra (core/extras.py)."""

from collections.abc import Iterator
from typing import Any


def find_faults(args: Any, layout: Any) -> Iterator[str]:
    """Register the attention before the model is loaded; yield why it cannot run here."""
    if args.attn_implementation == "varlen":
        from extras.varlen import attention  # noqa: F401  registers it

        if layout.accelerator.device.type != "cuda":
            yield "--attn_implementation varlen needs an NVIDIA GPU: use sdpa"
