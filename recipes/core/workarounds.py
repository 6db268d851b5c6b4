# SPDX-License-Identifier: Apache-2.0
"""Workarounds for other libraries: what is wrong, where it is reported, and what is done.

Each is one function, called by its name where it is needed. A test that is marked with that name
shows the harm without it (tests/launch/test_upstream.py): once there is no harm any more, the
library is fixed and the workaround is removed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Workaround:
    """The fault that a workaround is for.

    Attributes:
        link: an issue or pull request, or a file of the library's source and a name in it.
        seen: the library and its version; "A to B" where versions differ in what they need.
    """

    link: str
    seen: str


def workaround(link: str, seen: str) -> Callable:
    """Mark a function as a workaround."""

    def mark(function: Callable) -> Callable:
        # pyrefly: ignore[missing-attribute]  # Functions can have attributes.
        function.workaround = Workaround(link, seen)
        return function

    return mark


@workaround(
    "deepspeed/runtime/zero/stage_1_and_2.py, _lazy_init_hp_params_optimizer_state",
    seen="deepspeed 0.19",
)
def link_optimizer_states(zero: Any) -> None:
    """Link each weight of ZeRO-1 and 2 with its optimizer state.

    DeepSpeed does so once, for the first parameter group only, and for none before the first step.

    Args:
        zero: DeepSpeed's optimizer.
    """
    zero._hp_optimizer_states_linked = False
    zero._lazy_init_hp_params_optimizer_state()
