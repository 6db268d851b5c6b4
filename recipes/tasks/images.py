# SPDX-License-Identifier: Apache-2.0
"""Find images in a folder or a data set, check them before training, decode them for a batch."""

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from datasets import Image as ImageColumn
from datasets import load_dataset
from PIL import Image

from core.data import Source, find_files, hash_of_row, in_one_line, literal, open_rows
from core.exits import Exit, fail
from core.workarounds import workaround
from tasks.labels import NO_LABELS

EncodedImage = dict[str, Any]  # {"bytes": content or None, "path": of the file or None}
ENDS_OF_FILES = (b"IEND\xaeB`\x82", b"\xff\xd9")  # PNG and JPEG end with these bytes
DEEP_MODES = ("I", "F")  # beginnings of Pillow's modes with more than 8 bits per color


# ---- Find ----
def open_images(
    name: str, config: str | None, split: str, is_required: bool, column: str
) -> Source | None:
    """Return the images of a split, which stay encoded, and their labels.

    This is `core.data.open_rows` for images: a folder may also hold SPLIT/CLASS/IMAGE or, where the
    split is required, CLASS/IMAGE files, which have the columns `image` and `label`.

    Args:
        column: that of the images.
    """
    has_tables = any(file.suffix == ".parquet" for file in find_files(name, split))
    if not Path(name).is_dir() or has_tables:
        source = open_rows(name, config, split, is_required)
        if source is None or column not in source.dataset.column_names:
            return source
        dataset: Any = source.dataset
        return replace(source, dataset=dataset.cast_column(column, ImageColumn(decode=False)))
    folder = Path(name, split)
    if not folder.is_dir():
        if not is_required:
            return None
        folder = Path(name)
    try:
        found = load_dataset("imagefolder", data_files={split: f"{literal(folder)}/**"})
    except Exception as error:  # the loader raises exceptions of its own
        fail(Exit.DATA, f"{folder}: no images in it: {in_one_line(error)}")
    dataset = found[split].cast_column("image", ImageColumn(decode=False))
    return Source(name, (), dataset)


# ---- Check ----
def check_image(image: EncodedImage, label: object) -> None:
    """Check that an image has a label and can be decoded without loss.

    Only the header and the last bytes of a file are read, unless those are not the end of a PNG or
    JPEG file: then the whole image is decoded, since it may be cut off.

    Raises:
        ValueError: the image has no label, is incomplete, or has more than 8 bits per color.
    """
    name = (image or {}).get("path") or "an image without a path"
    if label is None or str(label).strip() in NO_LABELS:
        raise ValueError(f"{name}: has no class, or is not in FOLDER/CLASS")
    try:
        with open_image(image) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 16, 0))
            is_whole = file.read().endswith(ENDS_OF_FILES)
            with Image.open(file) as picture:
                mode = picture.mode
                if not is_whole:
                    picture.load()
    except Exception as error:  # Each decoder raises exceptions of its own.
        raise ValueError(f"{name}: is not a complete image: {error}") from None
    if mode.startswith(DEEP_MODES):
        raise ValueError(f"{name}: save it with 8 bits per color: it has more, which would be lost")


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


# ---- Decode ----
def decode_image(image: EncodedImage) -> Image.Image:
    """Return an image in RGB and upright. Raises ValueError if it is broken after its header."""
    try:
        return ImageColumn(mode="RGB").decode_example(image)
    except Exception as error:  # Each decoder raises exceptions of its own.
        raise ValueError(
            f"{image['path']}: cannot be decoded: {error}: fix it, then resume from the newest "
            "checkpoint with --allow_change data"
        ) from error


@workaround("deepspeed/runtime/engine.py, forward", seen="deepspeed 0.19")
def cast_pixels(model: torch.nn.Module) -> None:
    """Cast a model's pixels to the dtype of its weights before its forward pass.

    DeepSpeed in bf16 does not cast them, and not every model does so itself.
    """

    def cast(model: torch.nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
        dtype = next(model.parameters()).dtype
        return inputs, {"pixel_values": named["pixel_values"].to(dtype)}

    model.register_forward_pre_hook(cast, with_kwargs=True)
