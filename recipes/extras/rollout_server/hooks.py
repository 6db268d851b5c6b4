# SPDX-License-Identifier: Apache-2.0
"""What the core and a recipe call of this extra (core/extras.py)."""

from dataclasses import dataclass
from typing import Any

from core.cli import free


@dataclass(kw_only=True)
class Arguments:
    """Answers from a server."""

    rollout_server: str | None = free(
        None, "have `transformers serve` or vLLM sample answers, as at http://127.0.0.1:8000/v1"
    )


def answerer(args: Any, *parts: Any) -> Any:
    """Return what answers prompts (`Server`, which gets these parts), or None without the flag."""
    if not args.rollout_server:
        return None
    from extras.rollout_server.server import Server

    return Server(args, *parts)
