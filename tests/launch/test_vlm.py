# SPDX-License-Identifier: Apache-2.0
"""recipes/vlm.py trains rows with and without images on ranks that have either, and its result
answers questions about pictures wherever transformers' own do."""

import json
import shutil
import sys

import pytest
from safetensors import safe_open
from transformers import pipeline

import net
from launching import read_json, script
from net import Cell

SPLIT = ["fsdp1_full_shard", "fsdp2_full_shard", "deepspeed_zero3"]


@pytest.fixture(scope="module")
def mixed(net_tiny, tmp_path_factory):
    """A model, and rows of which every second one has no image: in batches of one, the second of
    two ranks has none."""
    folder = tmp_path_factory.mktemp("mixed")
    tiny = net_tiny("vlm")
    (folder / "model").symlink_to(tiny / "model")
    (folder / "data").mkdir()
    (folder / "data" / "images").symlink_to(tiny / "data" / "images")
    for split in ("train", "test"):
        lines = (tiny / "data" / f"{split}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        for row in rows[1::2]:
            row["images"] = []
            row["messages"][0]["content"] = row["messages"][0]["content"][-1:]
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / "data" / f"{split}.jsonl").write_text("".join(lines))
    return folder


ONE_BY_ONE = ("--train_sampling_strategy", "sequential", "--per_device_eval_batch_size", "1")
TOWER = ("--freeze_vision_tower", "false")


@pytest.mark.parametrize(
    ("config", "flags"),
    [("ddp", ()), *((config, TOWER) for config in SPLIT)],
)
def test_a_rank_without_images_trains_as_one_process_does(config, flags, mixed, once, tmp_path):
    def alone(folder):
        one = Cell(recipe="vlm", flags=(*ONE_BY_ONE, *flags))
        net.launch(one, mixed, folder / "run", "--max_steps", "3").expect(0)

    expected = net.figures(once(f"vlm {flags}", alone) / "run")
    cut = ("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "6")
    cell = Cell(config, "vlm", ranks=2, flags=(*ONE_BY_ONE, *flags), riding=cut)
    done = net.launch(cell, mixed, tmp_path / "run", "--max_steps", "3").expect(0)
    assert done.report["verdict"] == "ok", done.report
    for line, other in zip(net.figures(done.folder), expected, strict=True):
        # fp32, which adds in another order
        assert line == pytest.approx(other, rel=1e-4)


def test_without_any_image_no_rank_waits_for_the_tower(net_tiny, tmp_path):
    folder = net_tiny("vlm") / "data" / "train.jsonl"
    rows = [json.loads(line) for line in folder.read_text().splitlines()]
    texts = [{**row, "images": []} for row in rows if not row["images"]]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in texts))
    cell = Cell("ddp", "vlm", ranks=2, flags=TOWER)
    words = ["--dataset_name", path, "--eval_dataset_name", path, "--max_steps", 3]
    done = net.launch(cell, net_tiny("vlm"), tmp_path / "run", *words).expect(0)
    assert "frozen: vision tower" in done.output


@pytest.mark.parametrize("weights", ["LoRA", "nf4"])
def test_merged_adapters_answer_in_the_pipeline(weights, net_tiny, tmp_path):
    tiny = net_tiny("vlm")
    cell = Cell(recipe="vlm", weights=weights, flags=("--freeze_multi_modal_projector", "false"))
    done = net.launch(cell, tiny, tmp_path / "run", "--max_steps", "3").expect(0)
    with safe_open(done.folder / "adapter_model.safetensors", "pt") as file:
        names = set(file.keys())
    adapted = {name for name in names if ".lora_" in name}
    assert adapted and all(".text_model." in name for name in adapted)
    assert {".connector." in name for name in names - adapted} == {True}
    merge = [sys.executable, net.ROOT / "scripts" / "merge.py", done.folder]
    net.run(*merge, tmp_path / "merged", code=0)
    picture = next((tiny / "data" / "images").glob("*.png"))
    ask = pipeline("image-text-to-text", str(tmp_path / "merged"))
    asked = [{"type": "image", "path": str(picture)}, {"type": "text", "text": "What is it?"}]
    said = ask(text=[{"role": "user", "content": asked}], max_new_tokens=4, do_sample=False)
    answer = said[0]["generated_text"][-1]["content"]
    generate = [sys.executable, net.ROOT / "scripts" / "generate.py", tmp_path / "merged"]
    words = ["--image", picture, "--prompt", "What is it?", "--max_new_tokens", "4"]
    told = net.run(*generate, *words, code=0).output
    assert answer.strip() in told


def test_rows_elsewhere_are_evaluated_with_the_images_of_the_run(net_tiny, tmp_path):
    tiny = net_tiny("vlm")
    words = ["--image_folder", tiny / "data", "--greater_is_better", "false", "--max_steps", 2]
    done = net.launch(Cell(recipe="vlm"), tiny, tmp_path / "run", *words).expect(0)
    rows = shutil.copy(tiny / "data" / "test.jsonl", tmp_path / "rows.jsonl")
    words = [done.folder, "--rows", rows, "--max_new_tokens", 4, "--output_dir", tmp_path / "out"]
    script("evaluate", *words, code=0)
    (model,) = read_json(tmp_path / "out" / "results.json")["models"]
    losses = [line["eval_loss"] for line in net.metrics(done.folder) if "eval_loss" in line]
    assert model["tasks"]["rows"]["metrics"]["loss"]["value"] == pytest.approx(losses[-1], abs=1e-5)
