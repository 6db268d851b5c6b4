"""Image files: found in folders or data sets, checked before training, decoded for a batch."""

from typing import Any, Protocol

from PIL import Image

from components.rows import Split, SplitArguments

EncodedImage = dict[str, Any]  # {"bytes": content or None, "path": of the file or None}


class ImageArguments(SplitArguments, Protocol):
    """The arguments that say which columns hold an image and its label."""

    @property
    def image_column_name(self) -> str: ...
    @property
    def label_column_name(self) -> str | None: ...


def open_image_splits(args: ImageArguments, *, evaluate: bool) -> tuple[Split, Split | None]:
    """Return images to train on and to evaluate on, with columns `image`, not decoded, and `label`.

    As `components.rows.open_splits`, and a folder may hold SPLIT/CLASS/IMAGE or CLASS/IMAGE files.
    """
    raise NotImplementedError


def check_image(image: EncodedImage, label: object) -> int:
    """Return a hash of an image and its label.

    Of a file, only the head and the last bytes are read, unless those are not the end of a PNG or
    JPEG file: then all of it is decoded, since it may be cut off.

    Raises:
        ValueError: it cannot be used: no whole image, no label, more than 8 bits a color.
    """
    raise NotImplementedError


def decode_image(image: EncodedImage) -> Image.Image:
    """Return an image in RGB, upright. One that is broken behind its head ends the process: 65."""
    raise NotImplementedError
