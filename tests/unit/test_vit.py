# SPDX-License-Identifier: Apache-2.0
"""recipes/vit.py: images become batches, of which a run's seed draws the same on any rank."""

import io

import numpy as np
import torch
from datasets import Dataset, Features, Image, Value
from PIL import Image as Pillow
from transformers import ViTImageProcessorPil

import vit

SIZE = (8, 8)
PROCESSOR = ViTImageProcessorPil(size={"height": 8, "width": 8}, resample=0)


def encoded(picture):
    """The bytes of a PNG file with this picture."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def batch_of(contents, numbers, **options):
    """The batch that the recipe makes of these files."""
    files = [{"image": {"bytes": one, "path": f"{i}.png"}} for i, one in enumerate(contents, 1)]
    images = Dataset.from_list(files, features=Features({"image": Image(decode=False)}))
    found = {
        "row": range(1, len(contents) + 1),
        "labels": np.zeros(len(contents), dtype=int),
        "weights": np.ones(len(contents), dtype=np.float32),
    }
    source = Dataset.from_dict(found).cast_column("weights", Value("float32")).with_format("numpy")
    options = {"processor": PROCESSOR, "size": SIZE} | options
    return vit.ImageCollator(images, **options)(source, [[number] for number in numbers])


def noise(seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    return Pillow.fromarray(pixels)


def test_without_augmentation_pixels_are_those_of_the_models_own_processor():
    pixels = batch_of([encoded(noise())], [0])["inputs"]["pixel_values"]
    assert torch.equal(pixels, PROCESSOR(noise(), return_tensors="pt")["pixel_values"])


class TestAugmentation:
    NOISE = [encoded(noise(seed)) for seed in range(4)]

    def pixels(self, numbers, augmentation="crop_flip", seed=0):
        batch = batch_of(self.NOISE, numbers, augmentation=augmentation, seed=seed)
        return dict(zip(numbers, batch["inputs"]["pixel_values"], strict=True))

    def test_what_is_drawn_depends_on_seed_epoch_and_row_alone(self):
        together, alone = self.pixels([2, 0, 7, 1]), self.pixels([7]) | self.pixels([1, 2])
        assert all(torch.equal(together[number], alone[number]) for number in alone)
        assert not torch.equal(together[2], self.pixels([2], seed=1)[2])
        assert not torch.equal(together[2], self.pixels([6])[6])  # the same row in the next epoch

    def test_flip_mirrors_half_of_them_and_changes_nothing_else(self):
        plain = self.pixels([1], "none")[1]
        epochs = [1 + 4 * epoch for epoch in range(100)]
        drawn = list(self.pixels(epochs, "flip").values())
        mirrored = sum(torch.equal(pixels, plain.flip(2)) for pixels in drawn)
        assert mirrored + sum(torch.equal(pixels, plain) for pixels in drawn) == 100
        assert 30 <= mirrored <= 70  # four standard deviations of 5 to each side

    def test_crops_lie_inside_and_have_the_area_and_shape_that_are_told(self):
        boxes = []

        class Picture:
            width, height = 100, 80

            def resize(self, size, resample, box):
                assert size == (10, 20)  # width and height
                boxes.append(box)

        for i in range(2000):
            vit.augment(Picture(), (20, 10), "crop", np.random.default_rng(i))
        left, top, right, bottom = np.array(boxes).T
        assert left.min() >= 0 and top.min() >= 0 and right.max() <= 100 and bottom.max() <= 80
        wide, high = right - left, bottom - top
        cut = np.isclose(wide, 100) | np.isclose(high, 80)  # what would have stuck out
        assert 0 < cut.mean() < 0.5
        area, shape = (wide * high / 8000)[~cut], (wide / high)[~cut]
        assert 0.08 <= area.min() < 0.1 and area.max() > 0.8
        assert 3 / 4 <= shape.min() < 0.77 and 1.3 < shape.max() <= 4 / 3 + 1e-9
