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


def test_classes_take_turns_and_images_of_an_earlier_call_go(tmp_path, capsys):
    for count in (12, 5):
        images.write_images(tmp_path, count, 16, np.random.default_rng(0))
    assert {path.name for path in tmp_path.iterdir()} == set(images.CLASSES)
    written = {path.parent.name: path.name for path in sorted(tmp_path.rglob("*.png"))}
    assert written == {
        "circle": "00004.png",
        "cross": "00001.png",
        "square": "00002.png",
        "triangle": "00003.png",
    }
    assert Image.open(tmp_path / "cross" / "00001.png").size == (16, 16)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"{tmp_path}: 5 images (circle 2, cross 1, square 1, triangle 1)"
