"""recipes/vit.py as a user runs it: the quick start learns and its result loads; resume, ranks and bad images."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import parity
import pytest
import torch
from launching import REPO, data_of, read_metrics, run
from PIL import Image
from safetensors.numpy import load_file
from transformers import AutoImageProcessor, AutoModelForImageClassification

RECIPE = REPO / "recipes" / "vit.py"


def lines_of(folder):
    """The lines of metrics.jsonl without what depends on the machine."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("images_per_second", "peak_memory_gib")} for line in lines]


def copied(tiny, folder):
    """The tiny model's images, to spoil."""
    shutil.copytree(tiny / "data", folder / "data")
    return ["--model_name_or_path", tiny / "model", "--dataset_name", folder / "data", "--output_dir", folder / "run"]


def test_the_quick_start_learns_and_its_result_does_as_well_outside_of_the_recipe(tmp_path):
    venv = Path(sys.prefix)
    (venv / ".installed").touch()  # the tests' environment holds what the quick start would install
    done = run("make", "quickstart", "RECIPE=vit", f"VENV={venv}", f"OUT={tmp_path}", "THREADS=1", timeout=900)
    assert done.returncode == 0, done.output[-4000:]
    evaluations = read_metrics(tmp_path / "run")[1]
    assert [line["step"] for line in evaluations] == list(range(0, 505, 63))  # before, and after each epoch
    before, after = evaluations[0]["eval_accuracy"], evaluations[-1]["eval_accuracy"]
    assert before < 0.4 and after > 0.9 and evaluations[-1]["eval_f1"] > 0.9  # 4 classes: chance is 0.25
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

    model = AutoModelForImageClassification.from_pretrained(tmp_path / "run").eval()
    assert model.config.id2label == {0: "circle", 1: "cross", 2: "square", 3: "triangle"}
    processor = AutoImageProcessor.from_pretrained(tmp_path / "run")
    paths = list((tmp_path / "data" / "test").glob("*/*.png"))
    with torch.no_grad():
        inputs = processor([Image.open(path).convert("RGB") for path in paths], return_tensors="pt")
        told = [model.config.id2label[number] for number in model(**inputs).logits.argmax(1).tolist()]
    right = np.mean([name == path.parent.name for name, path in zip(told, paths, strict=True)])
    assert len(paths) == 400 and right == pytest.approx(after, abs=1e-6)  # fp32 of a fraction


def test_two_sharded_ranks_see_the_same_pixels_and_give_the_numbers_of_one_process(tiny_of, one_process, tmp_path):
    job = parity.Run("vit", "fsdp2_full_shard", 2, *parity.CUT[2], recipe="vit")  # with random crops and flips
    assert job in parity.all_runs()
    reference = one_process("full", "vit")
    row = parity.measure(job, tiny_of("vit"), tmp_path / "run", reference)
    assert row["verdict"] == "ok", row
    ours, theirs = read_metrics(tmp_path / "run"), read_metrics(reference)
    assert [line["num_images_seen"] for line in ours[0]] == [line["num_images_seen"] for line in theirs[0]]
    assert ours[0][-1]["num_images_seen"] == 210 + 2 * 12  # an epoch of 17 windows of 12 and one of 6, and 2 more
    for mine, other in zip(ours[1], theirs[1], strict=True):
        assert mine["eval_accuracy"] == other["eval_accuracy"] and mine["eval_f1"] == other["eval_f1"]


def test_a_run_that_was_stopped_ends_as_one_that_was_not(tiny_of, one_process, tmp_path):
    flags = parity.Run("vit", "single", recipe="vit").arguments
    command = [RECIPE, *data_of(tiny_of("vit")), *flags, "--output_dir", tmp_path]
    fault = json.dumps({"do": "SIGTERM", "at": "hold_back", "call": 19})  # in the second epoch
    done = run(sys.executable, REPO / "scripts" / "faults.py", *command, env=os.environ | {"FAULT": fault})
    assert done.returncode == 75 and "Stopped and saved after step 19 of 20" in done.output, done.output[-3000:]
    done = run(sys.executable, *command)
    assert done.returncode == 0 and "checkpoint-19, made with one process" in done.output, done.output[-3000:]
    whole = one_process("full", "vit")
    assert lines_of(tmp_path) == lines_of(whole)
    weights, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path, whole))
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[name], expected[name]) for name in expected)


def test_a_bad_image_is_named_before_weights_are_looked_for(tiny_of, tmp_path):
    arguments = copied(tiny_of("vit"), tmp_path)
    (bad := tmp_path / "data" / "train" / "cross" / "00001.png").write_text("no image")
    done = run(sys.executable, RECIPE, *arguments)
    assert done.returncode == 65 and f"{bad}: is no whole image" in done.output, done.output[-3000:]
    assert "Loading weights" not in done.output and "Traceback" not in done.output
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 65


def test_an_image_that_breaks_in_a_loader_in_mid_training_is_named_and_a_checkpoint_is_there(tiny_of, tmp_path):
    arguments = copied(tiny_of("vit"), tmp_path)
    images = sorted((tmp_path / "data" / "train").glob("*/*.png"))
    bad = images[np.random.default_rng((42, 0)).permutation(210)[160]]  # it comes in step 21, 8 rows a step
    content = bad.read_bytes()
    bad.write_bytes(content[:100] + bytes(len(content) - 112) + content[-12:])  # head and end are sound
    flags = ["--max_steps", 40, "--save_steps", 10, "--dataloader_num_workers", 1]
    done = run(sys.executable, RECIPE, *arguments, *flags)
    assert done.returncode == 65 and f"{bad}: cannot be decoded" in done.output, done.output[-3000:]
    assert "Traceback" not in done.output
    assert (tmp_path / "run" / "checkpoint-10" / "manifest.json").exists()
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 65) and str(bad) in status["why"]


def test_copied_alone_it_trains(tiny_of, tmp_path):
    shutil.copy(RECIPE, tmp_path / "train.py")
    arguments = ["--model_name_or_path", tiny_of("vit") / "model", "--dataset_name", tiny_of("vit") / "data"]
    done = run(sys.executable, "train.py", *arguments, "--max_steps", 4, "--output_dir", "run", cwd=tmp_path)
    assert done.returncode == 0 and "fault_tolerance.py is not beside this recipe" in done.output, done.output[-3000:]
    steps, evaluations = read_metrics(tmp_path / "run")
    assert len(steps) == 4 and len(evaluations) == 1  # train/ and test/ of the folder
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "run")
    assert model.config.label2id == {"circle": 0, "cross": 1, "square": 2, "triangle": 3}
