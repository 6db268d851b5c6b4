# SPDX-License-Identifier: Apache-2.0
"""tasks/illustrated.py: rows with images in the usual forms become one conversation; what is
missing, broken, surplus or too long is named; no image is trained on."""

import io
import json
from functools import partial

import numpy as np
import pytest
from PIL import Image

import image_models
import vlm
from core.cli import parse
from core.data import prepare_rows
from core.exits import End
from tasks.illustrated import IMAGE, IllustratedTemplate, tokenize_illustrated
from tasks.images import load_picture, open_images

ANSWER = {"role": "assistant", "content": "A cat."}


def part(kind, **content):
    return {"type": kind, **content}


TEXT = part("text", text="What is it?")
FORMS = [
    {"images": ["a", "b"], "prompt": "What is it?", "completion": "A cat."},
    {"images": ["a", "b"], "messages": [{"role": "user", "content": "What is it?"}, ANSWER]},
    {
        "images": ["a", "b"],
        "messages": [{"role": "user", "content": [part("image"), part("image"), TEXT]}, ANSWER],
    },
    {
        "images": ["b"],
        "messages": [
            {"role": "user", "content": [part("image", image="a"), part("image"), TEXT]},
            ANSWER,
        ],
    },
    {
        "messages": [
            {
                "role": "user",
                "content": [
                    part("image", path="a"),
                    part("image_url", image_url={"url": "b"}),
                    TEXT,
                ],
            },
            ANSWER,
        ],
    },
    {
        "image": ["a", "b"],
        "conversations": [
            {"from": "human", "value": "<image><image>What is it?"},
            {"from": "gpt", "value": "A cat."},
        ],
    },
]


@pytest.mark.parametrize("row", FORMS, ids=range(len(FORMS)))
def test_each_form_is_the_same_conversation(row):
    conversation = vlm.row_to_conversation(row)
    images = [image["url"] if isinstance(image, dict) else image for image in conversation.images]
    assert images == ["a", "b"]
    assert [said["content"] for said in conversation.messages] == [
        f"{IMAGE}{IMAGE}What is it?",
        "A cat.",
    ]


def test_a_text_without_images_is_left_as_it_is():
    conversation = vlm.row_to_conversation({"prompt": "What is <image>?", "completion": "A tag."})
    assert conversation.messages[0]["content"] == "What is <image>?"
    assert not conversation.images


@pytest.mark.parametrize("number", [0, 1, 3])
def test_more_or_fewer_images_than_places_are_refused(number):
    asked = {"role": "user", "content": [part("image"), part("image"), TEXT]}
    row = {"images": ["a"] * number, "messages": [asked, ANSWER]}
    with pytest.raises(ValueError, match=f"has {number} images, but .* places for 2"):
        vlm.row_to_conversation(row)


# ---- Images ----
def encoded(picture, kind="PNG", **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return {"bytes": file.getvalue(), "path": None}


def test_an_image_is_upright_and_its_transparent_parts_are_white(tmp_path):
    load = partial(load_picture, folder=tmp_path, allow_image_urls=False)
    turned = Image.Exif()
    turned[0x0112] = 6  # The camera was turned by 90 degrees
    picture, is_changed = load(encoded(Image.new("RGB", (4, 2)), "JPEG", exif=turned))
    assert (picture.size, is_changed) == ((2, 4), False)
    picture, is_changed = load(encoded(Image.new("RGBA", (1, 1), (0, 0, 0, 0))))
    assert (picture.getpixel((0, 0)), is_changed) == ((255, 255, 255), True)
    picture, is_changed = load(encoded(Image.new("CMYK", (1, 1)), "JPEG"))
    assert (picture.mode, is_changed) == ("RGB", True)


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        ("https://example.com/cat.png", "--allow_image_urls"),
        ("missing.png", "missing.png"),
        ({"bytes": b"no image", "path": "cat.png"}, "cat.png cannot be read"),
        ({"bytes": None, "path": None}, "without a path"),
        (encoded(Image.fromarray(np.zeros((2, 2), np.uint16))), "8 bits per color"),
    ],
)
def test_an_image_that_cannot_be_used_is_named(image, problem, tmp_path):
    with pytest.raises(ValueError, match=problem):
        load_picture(image, tmp_path, False)


# ---- Rows ----
@pytest.fixture(scope="module")
def template():
    _, processor = image_models.make("idefics3")
    return IllustratedTemplate(processor.tokenizer, {}, processor)


def prepare(rows, template, tmp_path, *flags):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = parse(vlm.Arguments, words=["--dataset_name", str(path), *flags])
    source = open_images(str(path), None, "train", True, ["images"])
    function = partial(
        tokenize_illustrated, read=vlm.row_to_conversation, template=template, max_length=60
    )
    return prepare_rows([source], function, args, partial(vlm.image_options, args=args))


def test_a_bad_row_is_named_with_file_and_line(template, tmp_path, capsys):
    image_models.picture(40, 40).save(tmp_path / "cat.png")
    row = FORMS[0] | {"images": ["cat.png"]}
    long = row | {"completion": "long " * 60}
    with pytest.raises(End):
        prepare([row, row | {"images": ["dog.png"]}, long], template, tmp_path)
    told = capsys.readouterr().err.splitlines()
    first, second, *_ = [line for line in told if "train.jsonl, line" in line]
    assert "train.jsonl, line 2: " in first and "dog.png" in first
    assert "train.jsonl, line 3: " in second and "is not cut" in second
    rows = prepare([row, long], template, tmp_path, "--skip_bad_rows")
    assert len(rows) == 1


def test_no_token_of_an_image_is_trained_on(template, tmp_path):
    image_models.picture(40, 40).save(tmp_path / "cat.png")
    row = FORMS[0] | {"images": ["cat.png"]}
    options = {"folder": tmp_path, "allow_image_urls": False, "completion_only_loss": False}
    read = vlm.row_to_conversation
    prepared = tokenize_illustrated(row, read, template, 500, **options)
    labels = np.array(prepared["labels"])
    of_image = np.array(prepared["input_ids"]) == template.processor.image_token_id
    assert of_image.any() and (labels[of_image] == -100).all()
    written = template.tokenizer.decode(labels[labels != -100])
    assert written.endswith("What is it?<|end_of_turn|><|assistant|>A cat.<|end_of_turn|>")
    assert "global-img" not in written
