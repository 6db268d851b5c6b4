# SPDX-License-Identifier: Apache-2.0
"""Nothing of a base is lost without a word, and nothing seems to be trained that is not.

Each tensor in the files of a base is in the result of a run of all weights, or the run says that it
is not. Each adapter that is saved was trained. Base and saved adapter have the loss that the run
has logged last. Merged adapters are what peft merges, whatever names the files of the base have.
"""

import re
from fnmatch import fnmatch
from functools import partial

import numpy as np
import pytest
import torch
import yaml
from peft import PeftModel
from PIL import Image
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoTokenizer,
    LevitConfig,
    LevitForImageClassification,
    ViTImageProcessor,
)

from launching import (
    REPO,
    errors_of,
    read_json,
    read_metrics,
    recipe,
    rehearse,
    script,
    tensors_of,
)

STEPS = ("--max_steps", "3", "--per_device_train_batch_size", "4", "--learning_rate", "1e-2")
LAYERS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
TEXT = LAYERS | {
    "vocab_size": 320,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
VISION = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 14}
KNOWN = yaml.safe_load((REPO / "evidence" / "catalog.yaml").read_text())["families"]
# {family: (its class, its config, tensors that published files have and no class loads)}
FAMILIES = {
    "llama": (AutoModelForCausalLM, TEXT, []),
    "gemma3": (
        AutoModelForImageTextToText,
        {
            "text_config": TEXT | {"sliding_window": 16},
            "vision_config": VISION
            | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
            "image_token_index": 300,
            "boi_token_index": 301,
            "eoi_token_index": 302,
            "mm_tokens_per_image": 4,
        },
        [],
    ),
    "qwen3_5": (
        AutoModelForImageTextToText,
        {
            "text_config": TEXT | KNOWN["qwen3_5_text"] | {"mtp_num_hidden_layers": 1},
            "vision_config": VISION
            | {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16},
            "image_token_id": 300,
            "video_token_id": 301,
            "vision_start_token_id": 302,
            "vision_end_token_id": 303,
        },
        ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"],
    ),
    "glm4_moe": (
        AutoModelForCausalLM,
        TEXT | KNOWN["glm4_moe"] | {"num_nextn_predict_layers": 1},
        ["model.layers.46.eh_proj.weight", "model.layers.46.self_attn.q_proj.weight"],
    ),
}


# ---- Bases ----
def make_base(tiny, family, folder):
    """Make a tiny base of a family, whose files have what published ones have besides."""
    auto_class, settings, others = FAMILIES[family]
    torch.manual_seed(0)
    auto_class.from_config(AutoConfig.for_model(family, **settings)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(folder)
    tensors = tensors_of(folder) | {name: torch.randn(32, 32) for name in others}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def base_of(tiny, once):
    return lambda family: once(f"base_{family}", partial(make_base, tiny, family))


@pytest.fixture(scope="module")
def rows(tiny_of):
    """The flags of few rows."""
    return ["--dataset_name", tiny_of("llama") / "data" / "train.jsonl"]


def train(*flags, name="llama"):
    return recipe(*STEPS, *flags, name=name, code=0).output


# ---- All weights ----
def parts_not_in_result(output):
    """The names, as in "model.visual.*", that a run says are in the base and not in the result."""
    found = re.findall("not in the result: .* has no (.*)", output)
    return [word.partition(" (")[0] for word in found[-1].split(", ")] if found else []


def is_named(tensor, parts):
    return any(fnmatch(tensor, part) for part in parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_of_the_base_is_in_the_result_or_is_named(family, base_of, rows, tmp_path):
    base = base_of(family)
    output = train(*rows, "--model_name_or_path", base, "--output_dir", tmp_path / "run")
    before = tensors_of(base)
    after = tensors_of(tmp_path / "run")
    parts = parts_not_in_result(output)
    lost = before.keys() - after.keys()
    assert lost == {name for name in before if is_named(name, parts)}
    assert not after.keys() - before.keys()
    unused = set(FAMILIES[family][2]) - lost
    for name in unused:
        assert torch.equal(after[name], before[name])
    # Both at the start and at the end
    summary = read_json(tmp_path / "run" / "run.json")["summary"]
    assert all(part in summary["base files"] for part in parts)
    assert ("base files" in summary) == bool(lost | unused)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "run", output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    check_what_was_trained(family, before, after)


def check_what_was_trained(family, before, after):
    """Text trains no part that reads images, not even by weight decay, and all others."""
    for name in after.keys() & before.keys() - set(FAMILIES[family][2]):
        is_same = torch.equal(before[name], after[name])
        reads_images = "vision" in name or "multi_modal" in name
        # An expert that no token chose, and the bias by which experts are chosen
        may_stay = ".experts." in name or "e_score_correction_bias" in name
        assert is_same == reads_images or may_stay, name


def test_the_head_of_another_task_is_named(tiny_of, tmp_path):
    """An encoder loses the head of its pre-training, and a result has none that nothing trained."""
    tiny = tiny_of("bert")
    config = AutoConfig.from_pretrained(tiny / "model")
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(tmp_path / "base")
    flags = ["--model_name_or_path", tmp_path / "base", "--output_dir", tmp_path / "run"]
    output = train("--dataset_name", tiny / "data" / "train.jsonl", *flags, name="bert")
    lost = tensors_of(tmp_path / "base").keys() - tensors_of(tmp_path / "run").keys()
    assert lost
    assert all(is_named(name, parts_not_in_result(output)) for name in lost)


def test_two_ranks_keep_what_one_keeps(base_of, rows, tmp_path):
    family = "glm4_moe"
    flags = ["--model_name_or_path", base_of(family), "--output_dir", tmp_path / "run"]
    flags += ["--dtype", "float32"]
    rehearse("deepspeed_zero3", *rows, *STEPS, *flags, num_processes=2, code=0)
    before = tensors_of(base_of(family))
    after = tensors_of(tmp_path / "run")
    assert before.keys() == after.keys()
    check_what_was_trained(family, before, after)


# ---- Adapters ----
@pytest.mark.parametrize(
    ("flag", "name"),
    [("--lora_target_modules", "fc1"), ("--modules_to_save", "multi_modal_projector")],
)
def test_a_part_that_reads_no_text_is_not_trained(flag, name, base_of, rows, tmp_path):
    flags = ["--use_peft", "--model_name_or_path", base_of("gemma3"), flag, name]
    (line,) = errors_of(recipe(*rows, *flags, "--output_dir", tmp_path / "run", code=64))
    assert f"{flag} {name}: " in line and "reads no text" in line


def test_merged_adapters_are_what_peft_merges(base_of, rows, tmp_path):
    base = base_of("qwen3_5")
    flags = ["--use_peft", "--model_name_or_path", base, "--output_dir", tmp_path / "run"]
    train(*rows, *flags)
    adapted = tensors_of(tmp_path / "run", "adapter_model.safetensors")
    seconds = [name for name in adapted if ".lora_B." in name]
    assert [name for name in seconds if not adapted[name].any()] == []  # Each was trained
    done = script("merge", tmp_path / "run", tmp_path / "merged", "--num_prompts", 4, code=0)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "run")
    expected = model.merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-6, msg=name)
    before = tensors_of(base)
    after = tensors_of(tmp_path / "merged")
    assert after.keys() <= before.keys()
    parts = parts_not_in_result(done.output)
    assert all(is_named(name, parts) for name in before.keys() - after.keys())
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert len(changed) == len(seconds) > 0


# ---- Running statistics ----
def make_images(folder, rows_of_split):
    rng = np.random.default_rng(0)
    for split, number in rows_of_split.items():
        for label, mean in (("dark", 120), ("light", 170), ("white", 200)):
            (folder / split / label).mkdir(parents=True)
            for i in range(number):
                pixels = rng.normal(mean, 20, (64, 64, 3)).clip(0, 255).astype("uint8")
                Image.fromarray(pixels).save(folder / split / label / f"{i}.png")


def make_levit(folder):
    """Make a tiny LeViT, whose statistics are far from those of the images, with two classes."""
    torch.manual_seed(0)
    config = LevitConfig(
        image_size=64,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        attention_ratio=[2, 2, 2],
        num_labels=2,
        down_ops=[["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 3, 4, 2, 2]],
    )
    model = LevitForImageClassification(config)
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
    model.save_pretrained(folder / "model")
    ViTImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder / "model")
    make_images(folder / "three", {"train": 12, "test": 6})


ADAPT = "--use_peft --augmentation none --per_device_train_batch_size 8 --max_steps 8"
ADAPT = [*ADAPT.split(), "--eval_steps", "4", "--learning_rate", "3e-3"]


def test_base_and_saved_adapter_have_the_loss_that_was_logged_last(once, tmp_path):
    """With a new head, which has a BatchNorm."""
    levit = once("levit", make_levit)
    data = levit / "three"
    words = ["--model_name_or_path", levit / "model", "--dataset_name", data]
    recipe(*ADAPT, *words, "--output_dir", tmp_path / "run", name="vit", code=0)
    logged = read_metrics(tmp_path / "run")[1][-1]["eval_loss"]
    labels = sorted(path.name for path in (data / "test").iterdir())
    base = AutoModelForImageClassification.from_pretrained(
        levit / "model", num_labels=len(labels), ignore_mismatched_sizes=True
    )
    model = PeftModel.from_pretrained(base, tmp_path / "run").eval()
    processor = AutoImageProcessor.from_pretrained(tmp_path / "run", backend="pil")
    losses = []
    for label, name in enumerate(labels):
        for path in (data / "test" / name).iterdir():
            with torch.no_grad():
                logits = model(**processor(Image.open(path), return_tensors="pt")).logits
            losses.append(cross_entropy(logits, torch.tensor([label])).item())
    assert np.mean(losses) == pytest.approx(logged, abs=1e-4)
