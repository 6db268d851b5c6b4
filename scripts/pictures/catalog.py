# SPDX-License-Identifier: Apache-2.0
"""All pictures by name."""

from collections.abc import Callable

from .agreement import draw_agreement
from .curves import draw_parity, draw_quickstart_curve, draw_resume
from .diagrams import draw_what_is_split, draw_which_yaml
from .memory import draw_memory
from .speed import draw_speed
from .style import Theme, under
from .terminal import draw_quickstart_terminal

PICTURES: dict[str, Callable[[Theme], str]] = {
    "memory": draw_memory,
    "parity": draw_parity,
    "agreement": draw_agreement,
    "resume": draw_resume,
    "what_is_split": draw_what_is_split,
    "which_yaml": draw_which_yaml,
    "quickstart_terminal": draw_quickstart_terminal,
    "quickstart_curve": draw_quickstart_curve,
    "speed": draw_speed,
}


def draw(name: str, theme: Theme) -> str:
    """Return a picture as the text of an SVG. Raises NotRecordedError if a recording is missing."""
    with under(theme):
        return PICTURES[name](theme)
