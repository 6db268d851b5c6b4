# SPDX-License-Identifier: Apache-2.0
"""Drawn images: the forms differ, and the class depends only on the form."""

import numpy as np
from PIL import Image

from tiny import images


def test_a_form_is_brighter_than_its_ground():
    rng = np.random.default_rng(0)
    for kind in images.CLASSES:
        pixels = np.asarray(images.draw_image(kind, 32, rng)).mean(axis=2)
        assert pixels.shape == (32, 32)
        assert pixels.max() > pixels[0, 0] + 50


def test_classes_take_turns(tmp_path):
    images.write_images(tmp_path, 5, 16, np.random.default_rng(0))
    written = [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*.png"))]
    assert written == [
        "circle/00000.png",
        "circle/00004.png",
        "cross/00001.png",
        "square/00002.png",
        "triangle/00003.png",
    ]
    assert Image.open(tmp_path / "cross" / "00001.png").size == (16, 16)
