# SPDX-License-Identifier: Apache-2.0
"""A ViT, and generated images of four classes.

FOLDER/data has train/CLASS/NUMBER.png and test/CLASS/NUMBER.png: a bright circle, cross, square or
triangle on dark noise. Color, position, size and angle vary, so that only the shape determines the
class.
"""

import itertools

import numpy as np
from PIL import Image, ImageDraw

from tiny.maker import ENCODER, NO_DROPOUT, Maker, Row

SIZE = 32  # pixels
SHAPE = ENCODER | NO_DROPOUT | {"image_size": SIZE, "patch_size": 8}
MAKER = Maker("vit", "AutoModel", SHAPE, num_rows=(4000, 400))


def polygon(num_corners: int) -> np.ndarray:
    """Return the corners of a regular polygon around (0, 0), at a distance of 1."""
    turns = np.linspace(0, 2 * np.pi, num_corners, endpoint=False)
    coordinates = [np.sin(turns), -np.cos(turns)]
    return np.stack(coordinates, axis=1)


HALF_CROSS = np.array(
    [(0.3, 0.95), (0.3, 0.3), (0.95, 0.3), (0.95, -0.3), (0.3, -0.3), (0.3, -0.95)]
)
CROSS = np.concatenate([HALF_CROSS, -HALF_CROSS])
SQUARE = np.array([(0.7, 0.7), (-0.7, 0.7), (-0.7, -0.7), (0.7, -0.7)])
# Corners around the middle, at a distance of at most 1, [corners, 2]; 40 look round
OUTLINES = {"circle": polygon(40), "cross": CROSS, "square": SQUARE, "triangle": polygon(3)}


def make_rows(num_train_rows: int, num_test_rows: int, seed: int) -> dict[str, list[Row]]:
    """Return the images of the folders train and test, each with its class; classes take turns."""
    rng = np.random.default_rng(seed)
    files = {}
    for name, count in (("train", num_train_rows), ("test", num_test_rows)):
        files[name] = []
        for kind in itertools.islice(itertools.cycle(OUTLINES), count):
            files[name].append({"label": kind, "image": draw_image(kind, rng)})
    return files


def draw_image(kind: str, rng: np.random.Generator) -> Image.Image:
    """Return a bright shape on dark noise as an image of SIZE x SIZE pixels."""
    ground = rng.integers(0, 100, 3)
    color = rng.integers(130, 256, 3)
    radius = rng.uniform(0.25, 0.42) * SIZE  # pixels
    angle = rng.uniform(-0.3, 0.3)  # radians
    middle = rng.uniform(radius, SIZE - radius, 2)
    cosine = np.cos(angle)
    sine = np.sin(angle)
    rotation = np.array([[cosine, sine], [-sine, cosine]])
    corners = middle + radius * (OUTLINES[kind] @ rotation)

    shape = Image.new("L", (SIZE, SIZE))
    ImageDraw.Draw(shape).polygon([tuple(corner) for corner in corners], fill=1)
    is_shape = np.asarray(shape)[..., None]
    noise = rng.normal(0, 20, (SIZE, SIZE, 3))
    pixels = np.where(is_shape, color, ground) + noise
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
