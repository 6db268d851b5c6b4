# SPDX-License-Identifier: Apache-2.0
"""recipes/vit.py: images become batches, of which a run's seed draws the same on any rank."""

import io
from argparse import Namespace
from functools import partial

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as Pillow
from torch.utils.data import DataLoader
from transformers import ViTImageProcessorPil

import vit
from components import upstream
from components.cli import parse_arguments
from components.rows import describe_rows
from components.watch import leave_process_group

SIZE = (8, 8)
PROCESSOR = ViTImageProcessorPil(size={"height": 8, "width": 8}, resample=0)


def encoded(picture):
    """The bytes of a PNG file with this picture."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def halves(size=(8, 8)):
    """A picture whose left half is white and whose right half is black."""
    pixels = np.zeros((size[1], size[0]), dtype=np.uint8)
    pixels[:, : size[0] // 2] = 255
    return Pillow.fromarray(pixels).convert("RGB")


def batch_of(contents, numbers, labels=None, weights=None, **options):
    """The batch that the recipe makes of these files."""
    files = [
        {"image": {"bytes": content, "path": f"{i}.png"}} for i, content in enumerate(contents, 1)
    ]
    images = Dataset.from_list(files, features=Features({"image": Image(decode=False)}))
    found = {
        "row": range(1, len(contents) + 1),
        "labels": np.array(labels or [0] * len(contents)),
        "weights": np.array(weights or [1.0] * len(contents), dtype=np.float32),
    }
    source = Dataset.from_dict(found).cast_column("weights", Value("float32")).with_format("numpy")
    options = {"processor": PROCESSOR, "size": SIZE} | options
    return vit.ImageCollator(images, **options)(source, [[number] for number in numbers])


def arguments(name, *flags):
    words = ["--dataset_name", str(name), "--augmentation", "none", *flags]
    return parse_arguments(vit.Arguments, words=words)


def notes_of(found):
    """What the start summary says of the images that were found, and of their classes."""
    train_images, eval_images, classes = found
    eval_rows = eval_images.rows if eval_images else None
    return describe_rows(train_images.rows, eval_rows) | {"labels": classes.describe()}


def folder_of(path, **classes):
    """A folder with the given number of images per class."""
    for name, number in classes.items():
        (path / name).mkdir(parents=True)
        for i in range(number):
            (path / name / f"{i}.png").write_bytes(encoded(halves(size=(8 + i, 8))))
    return path


def noise(seed=0):
    return Pillow.fromarray(
        np.random.default_rng(seed).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    )


class TestImages:
    def test_images_of_any_size_and_mode_make_one_batch(self):
        images = [
            halves(),
            halves(size=(40, 10)).convert("RGBA"),
            halves(size=(1, 30)).convert("L"),
        ]
        batch = batch_of([encoded(image) for image in images], [0, 1, 2], [0, 1, 1])
        assert batch["inputs"]["pixel_values"].shape == (3, 3, 8, 8) and batch["row"] == [1, 2, 3]
        assert batch["counts"].tolist() == [3, 3] and batch["labels"].tolist() == [0, 1, 1]

    def test_a_batch_counts_the_weights_of_its_classes(self):
        batch = batch_of([encoded(halves())] * 2, [0, 1], [0, 1], weights=[0.5, 4.0])
        assert batch["weights"].tolist() == [0.5, 4] and batch["counts"].tolist() == [4.5, 2]

    def test_a_rank_without_rows_has_an_image_and_no_label(self):
        batch = batch_of([encoded(halves())], [])
        assert batch["inputs"]["pixel_values"].shape == (1, 3, 8, 8)
        assert (
            batch["counts"].tolist() == [0, 0]
            and batch["labels"].shape == (0,)
            and batch["row"] == []
        )

    def test_without_augmentation_pixels_are_those_of_the_models_own_processor(self):
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

    def test_none_leaves_images_as_they_are(self):
        assert torch.equal(self.pixels([2], "none")[2], self.pixels([6], "none", seed=5)[6])

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


class TestDataSets:
    def test_folders_are_classes_and_images_stay_encoded(self, tmp_path):
        folder_of(tmp_path / "train", dog=2, cat=3)
        folder_of(tmp_path / "test", cat=1, bird=1)
        train, held_out, classes = found = vit.load_data(arguments(tmp_path, "--skip_bad_rows"))
        assert classes.names == ["cat", "dog"]
        assert train.rows.dataset["labels"][:].tolist() == [0, 0, 0, 1, 1]
        assert held_out.rows.dataset["labels"][:].tolist() == [0] and len(held_out.encoded) == 2
        path = str(tmp_path / "train" / "dog" / "1.png")
        assert train.encoded[4]["image"] == {"bytes": None, "path": path}
        assert "image" not in train.rows.dataset.column_names
        notes = notes_of(found)
        assert "1 of the 1 held-out rows" in notes.pop("warning")
        assert notes == {
            "train rows": "5, 0 left out",
            "eval rows": "2, 0 left out, 1 more for their label",
            "labels": "2 classes: cat 3, dog 2",
        }

    def test_a_class_that_is_not_trained_is_named(self, tmp_path, capsys):
        folder_of(tmp_path / "train", dog=1, cat=1)
        folder_of(tmp_path / "test", bird=1)
        with pytest.raises(SystemExit, match="65"):
            vit.load_data(arguments(tmp_path))
        told = "'bird' occurs in no training row: those have cat, dog"
        assert told in capsys.readouterr().err

    def test_one_class_is_an_error(self, tmp_path, capsys):
        folder_of(tmp_path, cat=2)
        with pytest.raises(SystemExit, match="65"):
            vit.load_data(arguments(tmp_path))
        assert "nothing to tell apart" in capsys.readouterr().err

    def test_numbered_classes_keep_their_order_and_names(self, tmp_path):
        images = [{"bytes": encoded(halves(size=(8 + i, 8))), "path": None} for i in range(3)]
        kinds = Features({"image": Image(), "labels": ClassLabel(names=["zebra", "ant"])})
        table = Dataset.from_dict({"image": images, "labels": [1, 0, 1]}, features=kinds)
        table.to_parquet(tmp_path / "train.parquet")
        weighted = arguments(tmp_path / "train.parquet", "--class_weights", "balanced")
        train, _, classes = vit.load_data(weighted)
        found = train.rows.dataset
        assert classes.names == ["zebra", "ant"] and found["labels"][:].tolist() == [1, 0, 1]
        # rows / (classes x rows of the class)
        assert found["weights"][:].tolist() == pytest.approx([3 / 4, 3 / 2, 3 / 4])


def test_pixels_get_the_type_of_the_weights():
    model = torch.nn.Linear(2, 2).to(torch.bfloat16)
    seen = []
    model.forward = lambda pixel_values: seen.append(pixel_values.dtype)
    upstream.cast_pixels(model)
    model(pixel_values=torch.zeros(1, 3, 8, 8))
    assert seen == [torch.bfloat16]


def test_batches_do_not_depend_on_who_makes_them(tmp_path):
    contents = [encoded(halves(size=(10 + i, 8))) for i in range(6)]
    batches = {}
    for workers in (0, 2):
        make = partial(batch_of, contents, augmentation="crop_flip", seed=1)
        options = {"num_workers": workers, "worker_init_fn": leave_process_group}
        loader = DataLoader(range(12), batch_size=4, collate_fn=make, **options)
        batches[workers] = [batch["inputs"]["pixel_values"] for batch in loader]
    assert len(batches[0]) == 3 and not torch.equal(batches[0][0], batches[0][1])
    for alone, by_workers in zip(*batches.values(), strict=True):
        assert torch.equal(alone, by_workers)


MIB = 2**20
SIZE_OF_1_MIB = (104, 105)  # 8 such images, the default batch, take just less than 1 MiB


@pytest.mark.parametrize(
    ("flags", "device", "cores", "ranks", "shared", "workers"),
    [
        ([], "cuda", 8, 1, 1024 * MIB, 8),
        ([], "cuda", 8, 4, 1024 * MIB, 2),
        ([], "cuda", 128, 4, 1024 * MIB, 16),
        ([], "cuda", 2, 4, 1024 * MIB, 0),
        ([], "cuda", 16, 1, 64 * MIB, 10),  # Docker's default: 32 MiB for three batches of each
        ([], "cuda", 16, 8, 64 * MIB, 1),
        ([], "cuda", 16, 1, 0, 0),
        ([], "cpu", 8, 1, 1024 * MIB, 0),
        (["--dataloader_num_workers", "3"], "cuda", 1, 1, 0, 3),
        (["--dataloader_num_workers", "0"], "cuda", 8, 1, 1024 * MIB, 0),
        (["--dataloader_num_workers", "3"], "cpu", 1, 1, 1024 * MIB, 3),
    ],
)
def test_workers_are_the_cores_of_a_rank_and_fit_into_shared_memory(
    flags, device, cores, ranks, shared, workers, monkeypatch
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(vit.os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(vit.shutil, "disk_usage", lambda _: Namespace(free=shared))
    accelerator = Namespace(device=torch.device(device), num_processes=ranks)
    args = parse_arguments(vit.Arguments, words=flags)
    assert vit.choose_num_workers(args, accelerator, SIZE_OF_1_MIB) == workers


def test_without_word_of_the_launcher_ranks_are_counted_by_the_gpus(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(vit.os, "sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr(vit.shutil, "disk_usage", lambda _: Namespace(free=1024 * MIB))
    accelerator = Namespace(device=torch.device("cuda"), num_processes=64)
    args = parse_arguments(vit.Arguments, words=[])
    assert vit.choose_num_workers(args, accelerator, SIZE_OF_1_MIB) == 4
