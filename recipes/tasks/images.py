# SPDX-License-Identifier: Apache-2.0
"""Find images in a folder or a data set, check them before training, decode them for a batch."""

import base64
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from accelerate import Accelerator
from datasets import Image as ImageColumn
from datasets import List, load_dataset
from PIL import Image, ImageOps
from transformers import AutoImageProcessor, AutoProcessor
from transformers.image_utils import load_image

from core.data import Source, find_files, hash_of_row, in_one_line, literal, open_rows
from core.exits import Exit, fail
from core.workarounds import workaround
from tasks.labels import NO_LABELS

EncodedImage = dict[str, Any]  # {"bytes": content or None, "path": of the file or None}
ENDS_OF_FILES = (b"IEND\xaeB`\x82", b"\xff\xd9")  # PNG and JPEG end with these bytes
MOST_WORKERS = 16  # processes of a rank that decode images
DEEP_MODES = ("I", "F")  # beginnings of Pillow's modes with more than 8 bits per color


# ---- Find ----
def open_images(
    name: str,
    config: str | None,
    split: str,
    is_required: bool,
    columns: Sequence[str],
    **options: Any,
) -> Source | None:
    """Return the images of a split, which stay encoded, and what is beside them, such as labels.

    This is `core.data.open_rows` for images: a folder may also hold SPLIT/CLASS/IMAGE or, where the
    split is required, CLASS/IMAGE files, which have the columns `image` and `label`.

    Args:
        columns: those that hold an image or a list of them, if they are there.
        options: of `open_rows`.
    """
    if not Path(name).is_dir() or find_files(name, split):
        source = open_rows(name, config, split, is_required, **options)
        if source is None:
            return None
        dataset: Any = source.dataset
        for column in columns:
            kind: Any = ImageColumn(decode=False)
            if isinstance(dataset.features.get(column), List):
                kind = List(kind)
            if column in dataset.column_names:
                dataset = dataset.cast_column(column, kind)
        return replace(source, dataset=dataset)
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
def load_processor_of_text_and_images(name: str, **options: Any) -> Any:
    """Return a model's processor, whose pixels are the same with and without torchvision.

    Args:
        options: of from_pretrained.
    """
    processor: Any = AutoProcessor.from_pretrained(name, trust_remote_code=False, **options)
    processor.image_processor = AutoImageProcessor.from_pretrained(
        name, backend="pil", trust_remote_code=False, **options
    )
    return processor


def decode_image(image: EncodedImage) -> Image.Image:
    """Return an image in RGB and upright. Raises ValueError if it is broken after its header."""
    try:
        return ImageColumn(mode="RGB").decode_example(image)
    except Exception as error:  # Each decoder raises exceptions of its own.
        raise ValueError(
            f"{image['path']}: cannot be decoded: {error}: fix it, then resume from the newest "
            "checkpoint with --allow_change data"
        ) from error


def load_picture(image: Any, folder: Path, allow_image_urls: bool) -> tuple[Image.Image, bool]:
    """Return an image upright and in RGB, and whether its colors were others.

    What is transparent becomes white, since the color behind it may be any.

    Args:
        image: a path, an address, a data URL, or an encoded image.
        folder: where relative paths begin.
        allow_image_urls: whether it may be fetched from an address.

    Raises:
        ValueError: if there is no whole image, or it has more than 8 bits per color.
    """
    if not isinstance(image, Mapping):
        image = {"path": str(image), "bytes": None}
    path = image.get("path") or image.get("url") or "without a path"
    content: Any = image.get("bytes")
    name = f"the image {path:.80}"
    try:
        if not content and path.startswith("data:"):
            content = base64.b64decode(path.partition(",")[2])
        if not content and path.startswith(("http://", "https://")):
            if not allow_image_urls:
                raise ValueError("an address is fetched only with --allow_image_urls")
            picture = load_image(path)
        else:
            picture = Image.open(io.BytesIO(content) if content else folder / path)
        picture = ImageOps.exif_transpose(picture)
        picture.load()
    except Exception as error:  # Each decoder raises exceptions of its own.
        raise ValueError(f"{name} cannot be read: {error}") from None
    if picture.mode.startswith(DEEP_MODES):
        raise ValueError(f"{name} has more than 8 bits per color: save it with 8, or they are lost")
    if picture.has_transparency_data:
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB"), True
    return picture.convert("RGB"), picture.mode == "CMYK"


def choose_num_workers(num_workers: int | None, accelerator: Accelerator) -> int:
    """Return how many processes decode images for each rank; images do not depend on it.

    Args:
        num_workers: --dataloader_num_workers. If that is None, it is one per core of the rank, at
            most 16, and none where the cores train the model.
    """
    if num_workers is not None:
        return num_workers
    if accelerator.device.type == "cpu":
        return 0
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)) // ranks_here)


@workaround("deepspeed/runtime/engine.py, forward", seen="deepspeed 0.19.8")
def cast_pixels(model: torch.nn.Module) -> None:
    """Cast a model's pixels to the dtype of its weights before its forward pass.

    DeepSpeed in bf16 does not cast them, and not every model does so itself.
    """

    def cast(model: torch.nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
        if "pixel_values" in named:
            dtype = next(model.parameters()).dtype
            named = {**named, "pixel_values": named["pixel_values"].to(dtype)}
        return inputs, named

    model.register_forward_pre_hook(cast, with_kwargs=True)
