# SPDX-License-Identifier: Apache-2.0
"""An Idefics3, the architecture of SmolVLM, and questions about pictures of colored shapes.

FOLDER/data has train.jsonl and test.jsonl, rows of {"images", "messages", "skill"}, and the
pictures in images/. Questions are about the color, the shape, or both; some are about two pictures
and some about none. No picture of test.jsonl is in train.jsonl.
"""

import itertools
import json
import re
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from tiny.maker import DECODER, Maker, Row, Shape
from tiny.vit import OUTLINES, SIZE

COLORS = {"red": (220, 30, 30), "green": (40, 190, 60), "blue": (50, 80, 230)}
COLORS |= {"yellow": (240, 220, 40), "purple": (150, 50, 180), "white": (245, 245, 245)}
SKILLS = ("color", "shape", "both", "color", "shape", "both", "two pictures")
# Of the sheet of the quick start, in pixels: a question with its answers, and a picture
CELL = (350, 210)
SHOWN_SIZE = 112


def settings(shape: Shape) -> Shape:
    """Return the settings of an Idefics3 whose tower is as wide as its language model."""
    sizes = {name: shape[name] for name in ("hidden_size", "intermediate_size")}
    sizes |= {name: shape[name] for name in ("num_hidden_layers", "num_attention_heads")}
    sizes["initializer_range"] = 0.7 * shape["hidden_size"] ** -0.5  # as all tiny models
    return {
        "text_config": {"model_type": "llama", **shape, **sizes},
        "vision_config": {**sizes, "image_size": SIZE, "patch_size": 16},
        "scale_factor": 1,
        "tie_word_embeddings": shape["tie_word_embeddings"],
    }


MAKER = Maker(
    "idefics3",
    "AutoModelForImageTextToText",
    DECODER,
    num_rows=(6000, 300),
    tokenizer="chat",
    columns=("messages",),
    settings=settings,
    image_size=SIZE,
)


def make_rows(num_train_rows: int, num_test_rows: int, seed: int) -> dict[str, list[Row]]:
    """Return the rows of the files train and test; skills take turns."""
    rng = np.random.default_rng(seed)
    files = {}
    for name, count in (("train", num_train_rows), ("test", num_test_rows)):
        # Of the few questions without a picture none would be new in the test
        kinds = (*SKILLS, "no picture") if name == "train" else SKILLS
        skills = itertools.islice(itertools.cycle(kinds), count)
        files[name] = [make_row(skill, rng) for skill in skills]
    return files


def make_row(skill: str, rng: np.random.Generator) -> Row:
    """Return a question with its answer, and the pictures that it is about."""
    colors = rng.choice(list(COLORS), 2).tolist()
    shapes = rng.choice(list(OUTLINES), 2).tolist()
    names = [f"a {color} {shape}" for color, shape in zip(colors, shapes, strict=True)]
    number = {"two pictures": 2, "no picture": 0}.get(skill, 1)
    kind = "color"
    word = colors[0]
    if rng.random() < 0.5:
        kind = "shape"
        word = shapes[0]
    said = {
        "color": ("What color is it?", colors[0]),
        "shape": ("What shape is it?", shapes[0]),
        "both": ("What is it?", names[0]),
        "two pictures": ("What are they?", " and ".join(names)),
        "no picture": (f"Is {word} a color or a shape?", f"a {kind}"),
    }
    question, answer = said[skill]
    pictures = []
    for shape, color in zip(shapes[:number], colors[:number], strict=True):
        pictures.append(draw_picture(shape, COLORS[color], rng))
    asked = [{"type": "image"} for _ in pictures]
    asked.append({"type": "text", "text": question})
    answered = [{"type": "text", "text": answer}]
    messages = []
    for role, content in (("user", asked), ("assistant", answered)):
        messages.append({"role": role, "content": content})
    return {"images": pictures, "messages": messages, "skill": skill}


def draw_picture(shape: str, color: tuple[int, int, int], rng: np.random.Generator) -> Image.Image:
    """Return a shape of about this color near the middle of a dark ground."""
    shade = np.array(color) + rng.integers(-10, 11, 3)
    ground = rng.integers(0, 60, 3)
    middle = SIZE / 2 + rng.uniform(-2, 2, 2)  # pixels, as the radius
    corners = middle + rng.uniform(11, 14) * OUTLINES[shape]
    picture = Image.new("RGB", (SIZE, SIZE), tuple(ground.tolist()))
    places = [tuple(corner) for corner in corners.tolist()]
    ImageDraw.Draw(picture).polygon(places, fill=tuple(shade.tolist()))
    return picture


def draw_answers(folder: Path) -> None:
    """Draw the questions that generate.py prints, with pictures and answers, as answers.png.

    Args:
        folder: of the quick start. Its before.jsonl and after.jsonl are from generate.py --output.
    """
    files = []
    for name in ("data/test", "before", "after"):
        lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        files.append([json.loads(line) for line in lines])
    asked = list(zip(*files, strict=True))
    sheet = Image.new("RGB", (4 * CELL[0], 2 * CELL[1]), "white")
    draw = ImageDraw.Draw(sheet)
    for place, (row, before, after) in enumerate(asked[:: len(asked) // 8][:8]):
        left = place % 4 * CELL[0] + 12
        top = place // 4 * CELL[1] + 12
        for number, path in enumerate(row["images"]):
            picture = Image.open(folder / "data" / path).resize((SHOWN_SIZE, SHOWN_SIZE))
            sheet.paste(picture, (left + number * (SHOWN_SIZE + 8), top))
        said = [row["messages"][0]["content"][-1]["text"]]
        for name, line in (("before", before), ("after", after)):
            answer = re.sub("[^ -~]", "?", line["answer"])[:40]  # The model has written any bytes
            said.append(f"{name}: {answer}")
        draw.text((left, top + SHOWN_SIZE + 8), "\n".join(said), "black", font_size=15)
    sheet.save(folder / "answers.png")
