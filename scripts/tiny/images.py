# SPDX-License-Identifier: Apache-2.0
"""Small images of bright shapes on dark noise, in which only the shape determines the class."""

import itertools
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

Point = tuple[float, float]

CLASSES = ("circle", "cross", "square", "triangle")


def equal_turns(count: int) -> np.ndarray:
    """Return `count` equally spaced angles of a full turn, in radians."""
    full_turn = 2 * np.pi
    return np.linspace(0, full_turn, count, endpoint=False)


def polygon(num_corners: int) -> list[Point]:
    """Return the corners of a regular polygon around (0, 0), at a distance of 1."""
    turns = equal_turns(num_corners)
    return [(np.sin(turn), -np.cos(turn)) for turn in turns]


def circle() -> list[Point]:
    """Return enough points of a circle for it to look round."""
    turns = equal_turns(40)
    return [(np.cos(turn), np.sin(turn)) for turn in turns]


def square() -> list[Point]:
    """Return the corners of a square."""
    side = 0.7
    top = [(side, side), (-side, side)]
    bottom = [(-side, -side), (side, -side)]
    return top + bottom


def cross() -> list[Point]:
    """Return the corners of a cross."""
    inner = 0.3
    outer = 0.95
    right_arm = [(inner, inner), (outer, inner), (outer, -inner), (inner, -inner)]
    right_half = [(inner, outer), *right_arm, (inner, -outer)]
    left_half = [(-x, -y) for x, y in right_half]
    return [*right_half, *left_half]


# Corners around the middle, at a distance of at most 1
OUTLINES = {"circle": circle(), "cross": cross(), "square": square(), "triangle": polygon(3)}


def draw_image(kind: str, size: int, rng: np.random.Generator) -> Image.Image:
    """Return a bright shape on dark noise as an image of size x size pixels."""
    ground = rng.integers(0, 100, 3)
    color = rng.integers(130, 256, 3)
    radius = rng.uniform(0.25, 0.42) * size  # pixels
    angle = rng.uniform(-0.3, 0.3)  # radians
    middle = rng.uniform(radius, size - radius, 2)
    corners = middle + radius * turned(OUTLINES[kind], angle)

    shape = Image.new("L", (size, size))
    ImageDraw.Draw(shape).polygon([tuple(corner) for corner in corners], fill=1)
    is_shape = np.asarray(shape)[..., None]
    noise = rng.normal(0, 20, (size, size, 3))
    pixels = np.where(is_shape, color, ground) + noise
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def turned(points: list[Point], angle: float) -> np.ndarray:
    """Return the points turned around (0, 0) by an angle in radians, [points, 2]."""
    cosine = np.cos(angle)
    sine = np.sin(angle)
    rotation = np.array([[cosine, sine], [-sine, cosine]])
    return np.array(points) @ rotation


def write_images(folder: Path, count: int, size: int, rng: np.random.Generator) -> None:
    """Write images to FOLDER/CLASS/NUMBER.png, classes taking turns; print how many there are."""
    for number, kind in zip(range(count), itertools.cycle(CLASSES)):
        path = folder / kind / f"{number:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw_image(kind, size, rng).save(path, compress_level=1)
    print(f"{folder}: {count} images")
