# SPDX-License-Identifier: Apache-2.0
"""Images are found in folders and tables, bad ones are named, and any kind is RGB and upright."""

import io
from functools import partial

import datasets
import numpy as np
import pytest
from PIL import Image as Pillow

import vit
from core.data import open_sources, prepare_rows
from example_arguments import RowFlags
from tasks.images import check_image, decode_image, open_images


def encoded(picture, kind="PNG", **options):
    """Return the bytes of a file with this picture."""
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def halves(mode="RGB", size=(8, 8)):
    """Return a picture whose left half is white and whose right half is black."""
    pixels = np.zeros((size[1], size[0]), dtype=np.uint8)
    pixels[:, : size[0] // 2] = 255
    return Pillow.fromarray(pixels).convert(mode)


def noise():
    """Return a picture that does not become small when it is encoded."""
    rng = np.random.default_rng(0)
    return Pillow.fromarray(rng.integers(0, 256, (40, 30, 3), dtype=np.uint8))


PNG = encoded(noise())
DEEP = encoded(Pillow.fromarray(np.full((8, 8), 40000, dtype=np.uint16)))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of datasets' cache, empty at first."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def data(tmp_path):
    """A folder for images."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def folder_of(path, **classes):
    """Make a folder with the given number of images per class."""
    for name, number in classes.items():
        (path / name).mkdir(parents=True)
        for i in range(number):
            (path / name / f"{i}.png").write_bytes(encoded(halves(size=(8 + i, 8))))
    return path


def load(source, **changes):
    """Return the rows of the images to train on, and of those to evaluate on."""
    args = RowFlags(str(source), eval_strategy="steps", **changes)
    label = partial(vit.label_image, image_column="image", label_columns=["label", "labels"])
    train, test = open_sources(args, partial(open_images, columns=["image"]))
    return prepare_rows(train, label, args), prepare_rows(test, label, args) if test else None


class TestDecoded:
    def pixels_of(self, content):
        """Return the pixels of an encoded image: [height, width, 3]."""
        return np.asarray(decode_image({"bytes": content, "path": None}))

    @pytest.mark.parametrize(
        ("mode", "kind"),
        [
            ("L", "PNG"),
            ("P", "PNG"),
            ("RGBA", "PNG"),
            ("RGB", "WEBP"),
            ("CMYK", "JPEG"),
        ],
    )
    def test_every_kind_becomes_rgb(self, mode, kind):
        pixels = self.pixels_of(encoded(halves(mode), kind))
        assert pixels.shape == (8, 8, 3)
        assert (pixels[:, :3] > 240).all() and (pixels[:, 5:] < 15).all()

    def test_a_turned_photo_is_put_upright(self):
        lying = halves().rotate(90)  # its white half is below
        turned = lying.getexif()
        turned[0x0112] = 6  # to be turned clockwise, which puts what is below on the left
        pixels = self.pixels_of(encoded(lying, "JPEG", exif=turned, quality=95))
        assert (pixels[:, :3] > 240).all() and (pixels[:, 5:] < 15).all()


class TestChecked:
    @pytest.mark.parametrize(
        ("content", "says"),
        [
            (b"not an image", "cannot identify"),
            (PNG[:-500], "truncated"),
            (DEEP, "8 bits per color"),
        ],
        ids=["text", "cut", "16 bits"],
    )
    def test_each_is_named_with_its_cause(self, content, says, tmp_path):
        path = tmp_path / "cat" / "1.png"
        path.parent.mkdir()
        path.write_bytes(content)
        with pytest.raises(ValueError, match=says) as raised:
            check_image({"bytes": None, "path": str(path)}, "cat")
        assert str(path) in str(raised.value)


class TestFolders:
    def test_the_hash_knows_content_place_and_class_but_not_the_folders_name(self, data):
        folders = [folder_of(data / name, cat=2, dog=1) for name in "ab"]
        hashes = [load(folder)[0].dataset["hash"][:].tolist() for folder in folders]
        assert hashes[0] == hashes[1] and len(set(hashes[0])) == 3
        (data / "a" / "cat" / "0.png").write_bytes(encoded(halves(size=(50, 50))))
        assert load(data / "a")[0].dataset["hash"][:].tolist() != hashes[0]

    @pytest.mark.parametrize("place", ["loose.png", "cat/deep/0.png"])
    def test_an_image_without_a_class_ends_the_run(self, place, data, capsys):
        """Else the name of a split, or of another folder, would be a class."""
        path = folder_of(data / "train", cat=2, dog=2) / place
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(PNG)
        with pytest.raises(SystemExit, match="65"):
            load(data)
        assert "needs image and label" in capsys.readouterr().err
