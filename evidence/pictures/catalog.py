# SPDX-License-Identifier: Apache-2.0
"""All pictures by name."""

from collections.abc import Callable

from .agreement import draw_agreement
from .comparison import draw_comparison
from .curves import draw_parity, draw_quickstart_curve, draw_resume
from .diagrams import draw_what_is_split, draw_which_yaml
from .memory import draw_memory
from .meshes import draw_meshes
from .pipeline import draw_pipeline
from .speed import draw_speed
from .style import Theme, under
from .terminal import draw_quickstart_terminal

FUNCTIONS = (
    draw_memory,
    draw_parity,
    draw_agreement,
    draw_resume,
    draw_what_is_split,
    draw_which_yaml,
    draw_quickstart_terminal,
    draw_quickstart_curve,
    draw_comparison,
    draw_speed,
    draw_pipeline,
    draw_meshes,
)
PICTURES: dict[str, Callable[[Theme], str]] = {}
for function in FUNCTIONS:
    name = function.__name__.removeprefix("draw_")
    PICTURES[name] = function


def draw(name: str, theme: Theme) -> str:
    """Return a picture as the text of an SVG. Raises NotRecordedError if a recording is missing."""
    with under(theme):
        return PICTURES[name](theme)
