# SPDX-License-Identifier: Apache-2.0
"""Conversations with images: read from rows, made tokens and batches of what a model reads.

In the text of a message IMAGE stands for an image. A chat template is given a part of the message
in its place and writes a placeholder, which the model's processor expands to the image's tokens.
"""

import re
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image

from core.batches import Line, rows_of_lines
from core.chat import (
    ChatTemplate,
    Conversation,
    Message,
    Span,
    find_trained_text,
    label_tokens,
    read_conversation,
)
from core.data import IGNORED, Row, Source, hash_of_row, is_empty
from tasks.images import load_picture

IMAGE = "\ue000"  # a character of no language
PLACEHOLDER = "<image>"  # in texts as ShareGPT and LLaVA have them, for any model
IMAGE_COLUMNS = ("images", "image")
TEXT_KEYS = ("content", "value")  # of a message, the second one in ShareGPT's form
IMAGE_KEYS = ("image", "path", "url", "image_url")  # where a part of a message may have its image
BLANK = Image.new("RGB", (64, 64), "white")  # processors resize it to what their towers need


# ---- Rows ----
def image_options(source: Source, args: Any) -> dict[str, Any]:
    """Return how `load_picture` finds the images of a source: by default beside its file."""
    beside = source.files[0].parent if source.files else source.name
    folder = Path(args.image_folder or beside)
    return {"folder": folder, "allow_image_urls": args.allow_image_urls}


def read_illustrated(
    row: Row, formats: Mapping[str, str], columns: Mapping[str, str] | None = None
) -> Conversation:
    """Return the conversation in a row with its images, by `core.chat.read_conversation`.

    Images are in parts of messages, or in a column and belong where a part or a PLACEHOLDER stands
    for them. Without any place they come before the first text of the user, as in TRL.

    Raises:
        ValueError: also if there are more or fewer images than places.
    """
    columns = columns or {}
    found = [row.get(columns.get(role, role)) for role in IMAGE_COLUMNS]
    held = next((value for value in found if not is_empty(value)), [])
    left = [*held] if isinstance(held, list) else [held]  # those of the column without a place
    images: list[Any] = []

    def place(image: Any) -> str:
        if image is None and left:
            image = left.pop(0)
        images.append(image)
        return IMAGE

    mark = partial(mark_images, place=place, has_column=bool(left))
    marked = {}
    for role in ("messages", "conversations", *chain(*formats.items()), "input"):
        column = columns.get(role, role)
        if column in row:
            marked[column] = mark(row[column])
    maps: list[Any] = [marked, row]  # Of the row itself, which tells what nothing reads
    conversation = read_conversation(ChainMap(*maps), formats, columns)
    images += left
    num_places = sum(message["content"].count(IMAGE) for message in conversation.messages)
    if num_places == 0:
        first = next(said for said in conversation.messages if said["role"] == "user")
        first["content"] = IMAGE * len(images) + first["content"]
    elif num_places != len(images) or None in images:
        number = len(images) - images.count(None)
        raise ValueError(f"has {number} images, but its messages have places for {num_places}")
    return replace(conversation, images=images)


def mark_images(value: Any, place: Callable[[Any], str], has_column: bool) -> Any:
    """Return a text, a message, or a list of messages or parts, with IMAGE in place of images.

    Args:
        place: notes an image, or for None the next one of the row's column, and returns IMAGE.
        has_column: whether the row has one. Without, a PLACEHOLDER in a text is mere text.
    """
    mark = partial(mark_images, place=place, has_column=has_column)
    if isinstance(value, str) and has_column:
        return re.sub(PLACEHOLDER, lambda _: place(None), value)
    if isinstance(value, Mapping):
        return {key: mark(item) if key in TEXT_KEYS else item for key, item in value.items()}
    if not isinstance(value, list):
        return value
    kinds = {item.get("type") for item in value if isinstance(item, Mapping)}
    if kinds.isdisjoint(("image", "image_url")):
        return [mark(item) for item in value]
    text = ""
    for part in value:
        if part.get("type") in ("image", "image_url"):
            own = (part[key] for key in IMAGE_KEYS if not is_empty(part.get(key)))
            text += place(next(own, None))
        else:
            text += part.get("text") or ""
    return text


# ---- Tokens ----
@dataclass(frozen=True)
class IllustratedTemplate(ChatTemplate):
    """The chat template of a model for images and text, which takes the parts of a message."""

    processor: Any = None

    def render_marked(
        self, conversation: Conversation, add_generation_prompt: bool = False
    ) -> tuple[str, list[Span] | None]:
        messages = [in_parts(message) for message in conversation.messages]
        given = replace(conversation, messages=messages)
        return super().render_marked(given, add_generation_prompt)

    def encode(self, texts: Sequence[str], images: Sequence[Sequence[Any]], **options: Any) -> Any:
        """Return what a model reads of texts and of the loaded images of each, [texts, tokens]."""
        given = list(map(list, images)) if any(images) else None  # Some take no empty lists
        return self.processor(text=list(texts), images=given, add_special_tokens=False, **options)


def in_parts(message: Message) -> Message:
    """Return a message whose content is a list of parts, as templates for images expect it."""
    parts = []
    for piece in re.split(f"({IMAGE})", message["content"]):
        if piece == IMAGE:
            parts.append({"type": "image"})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return {**message, "content": parts}


def tokenize_illustrated(
    row: Row,
    read: Callable[[Row], Conversation],
    template: IllustratedTemplate,
    max_length: int,
    folder: Path,
    allow_image_urls: bool,
    **options: Any,
) -> dict[str, Any]:
    """Return the text of a row, its tokens and labels, as columns.

    As `core.chat.tokenize_conversation`, but nothing is cut and no token of an image trained on.

    Args:
        read: returns the conversation in the row.
        folder, allow_image_urls: as in `load_picture`.
        options: as in `core.chat.find_trained_text`.
    """
    conversation = read(row)
    loaded = [load_picture(image, folder, allow_image_urls) for image in conversation.images]
    pictures = [picture for picture, _ in loaded]
    text, spans, rewritten = find_trained_text(conversation, template, **options)
    token = template.processor.image_token
    if text.count(token) != len(pictures):
        written = f"{text.count(token)} times {token}, which no text may have"
        raise ValueError(f"has {len(pictures)} images, but its chat template writes {written}")
    offsets = {"return_offsets_mapping": True, "return_text_replacement_offsets": True}
    encoded = template.encode([text], [pictures], **offsets)
    tokens = encoded["input_ids"][0]
    # Where each token begins in the text, in which an image is not expanded yet
    expanded = np.array([start for start, _ in encoded["offset_mapping"][0]])
    starts = expanded.copy()
    is_of_image = np.zeros(len(tokens), dtype=bool)
    for place in encoded.get("text_replacement_offsets", [[]])[0]:
        begin, end = place["new_span"]
        is_behind = expanded >= end
        is_inside = (expanded >= begin) & ~is_behind
        starts[is_behind] = expanded[is_behind] - end + place["span"][1]
        starts[is_inside] = place["span"][0]
        is_of_image |= is_inside
    labeled = label_tokens(tokens, starts, spans, max_length)
    if labeled["truncated"]:
        raise ValueError(
            f"has {len(tokens)} tokens with those of its images, more than --max_length "
            f"{max_length}, and is not cut: raise it, or leave out such rows by --skip_bad_rows"
        )
    content = [labeled["hash"].to_bytes(8), *[picture.tobytes() for picture in pictures]]
    return {
        **labeled,
        "labels": np.where(is_of_image, IGNORED, labeled["labels"]),
        "rewritten": rewritten,
        "text": text,
        "num_images": len(pictures),
        "recolored": sum(is_changed for _, is_changed in loaded),
        "hash": hash_of_row(b"".join(content)),
    }


# ---- Batches ----
@dataclass(frozen=True)
class IllustratedCollator:
    """Make a batch of n rows with their images, which are loaded again.

    A batch has these entries:
        inputs: what the processor makes: input_ids, [n, tokens], padded on the right, pixels, ...
        positions, targets, counts, row: as core.batches.TokenCollator has them.

    Attributes:
        load: returns the images of a row by its number `row`.
        has_images: whether any row has one. Then a batch without gets a line with a BLANK image and
            no labels: FSDP and ZeRO would wait for ranks that run no tower, and DDP for gradients.
    """

    columns: ClassVar[list[str]] = ["text", "labels", "row"]
    template: IllustratedTemplate
    load: Any
    has_images: bool

    def __call__(self, source: Any, lines: Sequence[Line]) -> dict[str, Any]:
        """Return a batch of the rows of `source` whose numbers are in `lines`, which may be []."""
        rows = rows_of_lines(source, lines)
        texts = [str(row["text"]) for row in rows]
        images = [self.load(int(row["row"])) for row in rows]
        if not rows or (self.has_images and not any(images)):
            content = IMAGE * self.has_images + "1"
            texts.append(self.template.render(Conversation([{"role": "user", "content": content}])))
            images.append([BLANK] * self.has_images)
        options = {"padding": True, "padding_side": "right", "return_tensors": "pt"}
        inputs = self.template.encode(texts, images, **options)
        labels = torch.full_like(inputs["input_ids"], IGNORED)
        for line, row in enumerate(rows):
            own = torch.tensor(row["labels"])
            labels[line, 1 : len(own)] = own[1:]  # No token predicts the first.
        trained_on = (labels.flatten() != IGNORED).nonzero().flatten()
        return {
            "inputs": dict(inputs),
            "positions": trained_on - 1,
            "targets": labels.flatten()[trained_on],
            "counts": torch.tensor([len(trained_on), sum(len(row["labels"]) for row in rows)]),
            "row": [int(row["row"]) for row in rows],
        }
