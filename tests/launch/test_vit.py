# SPDX-License-Identifier: Apache-2.0
"""recipes/vit.py as a user runs it: it learns, its result loads, and bad images are named.

Ranks and resume: test_recipes.py.
"""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

from components.shuffling import shuffled
from launching import REPO, quickstart, read_metrics, run

RECIPE = REPO / "recipes" / "vit.py"


def copied(tiny, folder):
    """The tiny model's images, to spoil."""
    shutil.copytree(tiny / "data", folder / "data")
    return [
        "--model_name_or_path",
        tiny / "model",
        "--dataset_name",
        folder / "data",
        "--output_dir",
        folder / "run",
    ]


def test_the_quickstart_learns_and_its_result_does_as_well_outside_of_the_recipe(tmp_path):
    quickstart("vit", tmp_path)
    evaluations = read_metrics(tmp_path / "run")[1]
    assert [line["step"] for line in evaluations] == list(
        range(0, 505, 63)
    )  # before, and after each epoch
    before, after = evaluations[0]["eval_accuracy"], evaluations[-1]["eval_accuracy"]
    assert (
        before < 0.4 and after > 0.9 and evaluations[-1]["eval_f1"] > 0.9
    )  # 4 classes: chance is 0.25
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

    model = AutoModelForImageClassification.from_pretrained(tmp_path / "run").eval()
    assert model.config.id2label == {0: "circle", 1: "cross", 2: "square", 3: "triangle"}
    processor = AutoImageProcessor.from_pretrained(tmp_path / "run")
    paths = list((tmp_path / "data" / "test").glob("*/*.png"))
    with torch.no_grad():
        inputs = processor([Image.open(path).convert("RGB") for path in paths], return_tensors="pt")
        told = [
            model.config.id2label[number] for number in model(**inputs).logits.argmax(1).tolist()
        ]
    right = np.mean([name == path.parent.name for name, path in zip(told, paths, strict=True)])
    assert len(paths) == 400 and right == pytest.approx(after, abs=1e-6)  # fp32 of a fraction


def test_a_bad_image_is_named_before_weights_are_looked_for(tiny_of, tmp_path):
    arguments = copied(tiny_of("vit"), tmp_path)
    (bad := tmp_path / "data" / "train" / "cross" / "00001.png").write_text("no image")
    done = run(sys.executable, RECIPE, *arguments)
    assert done.returncode == 65 and f"{bad}: is not a complete image" in done.output, done.output[
        -3000:
    ]
    assert "Loading weights" not in done.output and "Traceback" not in done.output
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 65


def test_an_image_that_breaks_in_a_loader_in_mid_training_is_named_and_a_checkpoint_is_there(
    tiny_of, tmp_path
):
    arguments = copied(tiny_of("vit"), tmp_path)
    images = sorted((tmp_path / "data" / "train").glob("*/*.png"))
    number = shuffled(210, (42, 0)).at(np.array([160]))[0]
    bad = images[number]  # with 8 rows per step it is read in step 21
    content = bad.read_bytes()
    # Head and end are sound.
    bad.write_bytes(content[:100] + bytes(len(content) - 112) + content[-12:])
    flags = ["--max_steps", 40, "--save_steps", 10, "--dataloader_num_workers", 1]
    done = run(sys.executable, RECIPE, *arguments, *flags)
    assert done.returncode == 65 and f"{bad}: cannot be decoded" in done.output, done.output[-3000:]
    assert "Traceback" not in done.output
    assert (tmp_path / "run" / "checkpoint-10" / "manifest.json").exists()
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 65) and str(bad) in status["why"]
