# SPDX-License-Identifier: Apache-2.0
"""The terminal of a quick start: lines that a real run has printed, as text in an SVG."""

from xml.sax.saxutils import escape

from .recordings import recording_of
from .style import Theme

COLUMNS = 100  # characters; longer lines end with an ellipsis
LINE_HEIGHT = 17.0  # pixels, as all sizes here
CHARACTER = 7.25  # the width of a character of FONT at FONT_SIZE
FONT = "'DejaVu Sans Mono', Menlo, Consolas, 'Liberation Mono', monospace"
FONT_SIZE = 12.0
MARGIN = 16.0
BAR = 30.0  # the height of the title bar
COMMAND = "make quickstart"
MOST_LINES = 12  # lines shown of each section
SECTION = "== "
CUT = "[...]"


def draw_quickstart_terminal(theme: Theme) -> str:
    """Return the terminal, with the first and the last lines of each section of the output."""
    lines = [f"$ {COMMAND}", *shortened(recording_of("quickstart")["output"])]
    width = 2 * MARGIN + COLUMNS * CHARACTER
    height = BAR + 2 * MARGIN + LINE_HEIGHT * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img">',
        f"<title>The output of {COMMAND}</title>",
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="{theme.empty}"/>',
    ]
    for number, color in enumerate(("red", "orange", "green")):
        x = MARGIN + 18 * number
        parts.append(f'<circle cx="{x:g}" cy="17" r="5.5" fill="{theme.series[color]}"/>')
    parts.append(f'<g font-family="{FONT}" font-size="{FONT_SIZE:g}" xml:space="preserve">')
    for number, line in enumerate(lines):
        y = BAR + MARGIN + LINE_HEIGHT * (number + 0.75)
        parts.append(text_element(theme, line, y))
    parts += ["</g>", "</svg>"]
    return "\n".join(parts) + "\n"


def text_element(theme: Theme, line: str, y: float) -> str:
    """Return one line of the terminal."""
    color = theme.text
    weight = "normal"
    if line.startswith("$ "):
        color = theme.series["green"]
        weight = "bold"
    elif line.startswith(SECTION):
        color = theme.series["blue"]
        weight = "bold"
    elif line == CUT:
        color = theme.muted
    style = f'fill="{color}" font-weight="{weight}"'
    return f'<text x="{MARGIN:g}" y="{y:g}" {style}>{escape(fitted(line))}</text>'


def fitted(line: str) -> str:
    """Return a line that is not wider than the terminal."""
    if len(line) <= COLUMNS:
        return line
    return line[: COLUMNS - 3] + "..."


def shortened(output: list[str]) -> list[str]:
    """Return the output without empty lines at its ends, and each section with fewer lines."""
    lines = []
    for section in sections_of(output):
        if len(section) > MOST_LINES:
            half = MOST_LINES // 2
            section = [*section[:half], CUT, *section[-half:]]
        lines += section
    return lines


def sections_of(output: list[str]) -> list[list[str]]:
    """Return the output cut before each heading, without its empty lines and make's own."""
    sections: list[list[str]] = [[]]
    for line in output:
        if not line or line.startswith("make"):
            continue
        if line.startswith(SECTION):
            sections.append([])
        sections[-1].append(line)
    return sections
