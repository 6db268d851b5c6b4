# SPDX-License-Identifier: Apache-2.0
"""Find images in a folder or a data set, check them before training, decode them for a batch."""

import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from datasets import Dataset, Features, Value
from datasets import Image as ImageColumn
from PIL import Image

from components.data_files import Source, load_rows
from components.fingerprints import prepared_fingerprint
from components.labels import NO_LABELS
from components.rows import (
    HasPreparationArguments,
    Split,
    evaluation_source,
    require,
    training_source,
)
from core.data import hash_of_row, missing_columns
from core.exits import Exit, fail
from core.workarounds import workaround

EncodedImage = dict[str, Any]  # {"bytes": content or None, "path": of the file or None}
ENDS_OF_FILES = (b"IEND\xaeB`\x82", b"\xff\xd9")  # PNG and JPEG end with these bytes
DEEP_MODES = ("I", "F")  # beginnings of Pillow's modes with more than 8 bits per color


class HasImageArguments(HasPreparationArguments, Protocol):
    """What also has the names of the columns that hold an image and its label."""

    @property
    def dataset_name(self) -> str: ...
    @property
    def image_column_name(self) -> str: ...
    @property
    def label_column_name(self) -> str | None: ...


# ---- Find ----
def open_image_splits(args: HasImageArguments, *, evaluate: bool) -> tuple[Split, Split | None]:
    """Return the images to train on and those to evaluate on, with their labels.

    This is `components.rows.open_splits` for images: a folder may also hold SPLIT/CLASS/IMAGE or
    CLASS/IMAGE files. Both splits have two columns, `image`, which stays encoded, and `label`;
    `components.rows.prepare_rows` prepares their rows.
    """
    source = training_source(args.dataset_name, args)
    train_split = require(open_images(source, args, is_training=True), source)
    source = evaluation_source(args.dataset_name, args) if evaluate else None
    if source is None:
        return train_split, None
    return train_split, open_images(source, args, is_training=False)


def open_images(source: Source, args: HasImageArguments, is_training: bool) -> Split | None:
    """Return the images of a source and their labels; None if it has none and needs none."""
    has_tables = any(file.suffix == ".parquet" for file in source.files)
    if Path(source.name).is_dir() and not has_tables:
        folder = load_folder(source)
        return None if folder is None else Split(folder, source, is_training)
    dataset: Any = load_rows(source)
    if source.is_required:
        dataset = require(dataset, source)
    if dataset is None:
        return None
    columns = {args.image_column_name: "image", find_label_column(dataset, source, args): "label"}
    unread = tuple(name for name in dataset.column_names if name not in columns)
    dataset = dataset.select_columns(list(columns)).rename_columns(columns)
    dataset = dataset.cast_column("image", ImageColumn(decode=False))
    return Split(dataset, source, is_training, unread)


def load_folder(source: Source) -> Dataset | None:
    """Return the images in FOLDER/SPLIT/CLASS or, if the source is required, in FOLDER/CLASS."""
    folder = Path(source.name, source.split)
    if source.is_required and not folder.is_dir():
        folder = Path(source.name)
    files = find_visible_files(folder)
    if not files:
        if source.is_required:
            fail(Exit.DATA, f"{folder}: no images in it")
        return None
    # The cache has these in its key, so that a file that has changed is read again.
    known = []
    for file in files:
        stat = file.stat()
        known.append((str(file.relative_to(folder)), stat.st_size, stat.st_mtime_ns))
    return Dataset.from_generator(
        list_images,
        features=Features({"image": ImageColumn(decode=False), "label": Value("string")}),
        gen_kwargs={"folder": str(folder), "files": tuple(path for path, _, _ in known)},
        fingerprint=prepared_fingerprint(json.dumps([str(folder), known]), list_images),
    )


def find_visible_files(folder: Path) -> list[Path]:
    """Return the files in a folder and in its subfolders, except hidden ones, in order."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(path for path in files if not path.name.startswith("."))


def list_images(folder: str, files: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each file, with the label CLASS of CLASS/IMAGE, and None elsewhere."""
    for file in files:
        parts = Path(file).parts
        label = parts[0] if len(parts) == 2 else None
        yield {"image": {"bytes": None, "path": f"{folder}/{file}"}, "label": label}


def find_label_column(dataset: Dataset, source: Source, args: HasImageArguments) -> str:
    """Return the name of the column of labels; end with 65 without it or a column of images."""
    names = ["label", "labels"]
    if args.label_column_name:
        names = [args.label_column_name]
    found = [name for name in names if name in dataset.features]
    if args.image_column_name not in dataset.features or not found:
        needed = f"{args.image_column_name} and {' or '.join(names)}"
        problem = missing_columns(dataset.features, needed, "image", "label")
        fail(Exit.DATA, f"{source.name}: {problem}")
    return found[0]


# ---- Check ----
def check_image(image: EncodedImage, label: object) -> None:
    """Check that an image has a label and can be decoded without loss.

    Only the header and the last bytes of a file are read, unless those are not the end of a PNG or
    JPEG file: then the whole image is decoded, since it may be cut off.

    Raises:
        ValueError: the image has no label, is incomplete, or has more than 8 bits per color.
    """
    name = "an image without a path"
    if image and image["path"]:
        name = image["path"]
    if label is None or str(label).strip() in NO_LABELS:
        raise ValueError(f"{name}: has no class, or is not in FOLDER/CLASS")
    try:
        with open_image(image) as file:
            mode = read_mode(file)
    except Exception as error:  # Each decoder raises exceptions of its own.
        reason = str(error)
        if "cannot identify" in reason:
            reason = "Pillow does not know its format"
        raise ValueError(f"{name}: is not a complete image: {reason}") from None
    if mode.startswith(DEEP_MODES):
        raise ValueError(
            f"{name}: has more than 8 bits per color ({mode}), and decoding would keep 8 of them: "
            "save it with 8 bits per color"
        )


def hash_of_image(image: EncodedImage, label: object) -> int:
    """Return a hash of an image and its label: of its content, or of its file's size and start."""
    content = image["bytes"]
    if not content:
        with open(image["path"], "rb") as file:
            content = f"{os.path.getsize(image['path'])} ".encode() + file.read(2**14)
    return hash_of_row(content + str(label).encode())


def open_image(image: EncodedImage) -> BinaryIO:
    """Return an encoded image as an open file."""
    if image["bytes"]:
        return io.BytesIO(image["bytes"])
    return open(image["path"], "rb")


def read_mode(file: BinaryIO) -> str:
    """Return Pillow's mode of an image; decode it if its last bytes are not those of an image."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 16, 0))
    is_whole = file.read().endswith(ENDS_OF_FILES)
    file.seek(0)
    with Image.open(file) as picture:
        mode = picture.mode
        if not is_whole:
            picture.load()
    return mode


# ---- Decode ----
def decode_image(image: EncodedImage) -> Image.Image:
    """Return an image in RGB and upright; end with 65 if it is broken after its header."""
    try:
        return ImageColumn(mode="RGB").decode_example(image)
    except Exception as error:  # Each decoder raises exceptions of its own.
        fail(
            Exit.DATA,
            f"{image['path']}: cannot be decoded: {error}: fix it, then resume from the newest "
            "checkpoint with --allow_change data",
        )


@workaround("deepspeed/runtime/engine.py, forward", seen="deepspeed 0.19")
def cast_pixels(model: torch.nn.Module) -> None:
    """Cast a model's pixels to the dtype of its weights before its forward pass.

    DeepSpeed in bf16 does not cast them, and not every model does so itself.
    """

    def cast(model: torch.nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
        dtype = next(model.parameters()).dtype
        return inputs, {"pixel_values": named["pixel_values"].to(dtype)}

    model.register_forward_pre_hook(cast, with_kwargs=True)
