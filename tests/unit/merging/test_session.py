# SPDX-License-Identifier: Apache-2.0
"""Receipts of merge.py: what they say of each kind of adapter, and what is refused."""

import errno
import json
import math
import shutil

import pytest
import torch

from adapter_folders import EXPERTS, make_base, write_adapters
from merged_folders import edit_json, edit_tensors, read_receipt
from merging import session, shards, writing


def read_tensor(folder, name):
    return shards.find_files(str(folder), "main").read_tensor(name)


def contestants(receipt):
    return {row["name"]: row for row in receipt["comparisons"]}


# ---- Receipts ----
KINDS = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "whole modules": {"modules_to_save": ["lm_head", "embed_tokens"]},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_receipt_shows_that_the_merged_model_is_the_trained_one(options, base, merge, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", base, **options)
    code, printed = merge(adapters, tmp_path / "merged")
    assert code == 0, printed
    receipt = read_receipt(tmp_path / "merged")
    assert receipt["passed"] and receipt["problems"] == []
    assert receipt["trained_on"] == receipt["merged_into"] == "16bit"
    assert receipt["prompts_from"] == {"evaluation rows of the run": 50}
    rows = contestants(receipt)
    assert list(rows) == ["merged", "reloaded"]
    for row in rows.values():
        assert row["same_greedy_tokens"] == row["same_rendered_prompts"] == row["prompts"] == 50
        assert 0 <= row["largest_logit_gap"] < row["bound"]
    without = receipt["reference"]["largest_logit_gap_without_adapters"]
    assert without > 100 * rows["reloaded"]["bound"]
    assert any(
        line.startswith("its base") and f"{without:.2e}" in line for line in printed.split("\n")
    )
    assert len(receipt["greedy_tokens"]["reloaded"]) == 50
    files = {path.name for path in (tmp_path / "merged").iterdir()}
    files -= {"receipt.json", "README.md"}
    assert receipt["files"].keys() == files
    assert "evaluation rows of the run" in printed and "50/50 same" in printed


def test_an_adapter_of_experts_has_a_receipt(mixture, merge, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", mixture, target_parameters=EXPERTS)
    code, printed = merge(adapters, tmp_path / "merged")
    assert code == 0, printed
    assert read_receipt(tmp_path / "merged")["passed"]


def test_the_base_with_the_nearer_logits_is_the_default(base, merge, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", base, {"load_in_4bit": True})
    code, printed = merge(adapters, tmp_path / "merged")
    assert code == 0, printed
    receipt = read_receipt(tmp_path / "merged")
    gaps = receipt["gaps_of_bases"]
    assert gaps["4bit"] < 1e-3 * gaps["16bit"]
    assert receipt["trained_on"] == receipt["merged_into"] == "4bit"
    for name, gap in gaps.items():
        assert f"Merged into the {name} base, the largest logit gap is {gap:.2e}" in printed


@pytest.mark.parametrize(
    ("gaps", "chosen"),
    [
        ({"16bit": 0.2, "4bit": 0.1}, "4bit"),
        ({"16bit": math.nan, "4bit": 0.1}, "4bit"),
        ({"16bit": 0.2, "4bit": math.nan}, "16bit"),
        ({"16bit": math.inf, "4bit": 0.1}, "4bit"),
    ],
)
def test_a_base_without_numbers_is_never_the_nearest(gaps, chosen):
    assert session.nearest_base(gaps) == chosen


def test_bases_that_both_have_no_numbers_are_an_error(capsys):
    with pytest.raises(SystemExit, match="76"):
        session.nearest_base({"16bit": math.nan, "4bit": math.nan})
    assert "16bit or 4bit, the model's logits are not numbers" in capsys.readouterr().err


def test_the_16_bit_base_may_be_requested_and_shows_its_gap(base, merge, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", base, {"load_in_4bit": True})
    code, printed = merge(adapters, tmp_path / "merged", "--base", "16bit")
    assert code == 0, printed
    receipt = read_receipt(tmp_path / "merged")
    row = contestants(receipt)["reloaded"]
    assert receipt["merged_into"] == "16bit"
    assert row["largest_logit_gap"] == pytest.approx(receipt["gaps_of_bases"]["16bit"], rel=1e-3)
    assert row["largest_logit_gap"] < row["bound"]
    # Weights without adapters are those of the base, which the quantized ones are not
    name = "model.layers.0.mlp.up_proj.weight"
    original = read_tensor(base / "model", name)
    assert torch.equal(read_tensor(tmp_path / "merged", name), original)


def test_a_bound_of_ones_own_decides(base, merge, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", base, {"load_in_4bit": True})
    code, printed = merge(adapters, tmp_path / "merged", "--base", "16bit", "--bound", "1e-3")
    assert code == 76 and "a logit differs by" in printed, printed
    assert not (tmp_path / "merged").exists()


def test_an_int8_base_is_offered_too(base, merge, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", base, {"load_in_8bit": True})
    code, printed = merge(adapters, tmp_path / "merged")
    assert code == 0, printed
    assert read_receipt(tmp_path / "merged")["gaps_of_bases"].keys() == {"16bit", "8bit"}


def test_bf16_weights_are_within_the_bound_of_bf16(base, merge, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", base)
    code, printed = merge(adapters, tmp_path / "merged", "--dtype", "bfloat16")
    assert code == 0, printed
    rows = contestants(read_receipt(tmp_path / "merged"))
    assert rows["merged"]["largest_logit_gap"] < 0.01 * rows["reloaded"]["largest_logit_gap"]
    assert rows["reloaded"]["dtype"] == "bfloat16"
    assert rows["reloaded"]["bound"] == pytest.approx(500 * rows["merged"]["bound"])


def test_an_untied_model_has_a_receipt(tied, merge, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", tied, target_modules=["lm_head", "q_proj"])
    code, printed = merge(adapters, tmp_path / "merged")
    assert code == 0, printed


def test_a_model_without_a_chat_template_continues_texts(merge, tmp_path):
    base = make_base(tmp_path / "base", "mistral_pretrain")
    adapters = write_adapters(tmp_path / "adapters", base, use_rslora=True)
    code, printed = merge(adapters, tmp_path / "merged")
    assert code == 0, printed
    receipt = read_receipt(tmp_path / "merged")
    assert receipt["passed"] and receipt["prompts_from"] == {"evaluation rows of the run": 50}


def test_prompts_may_come_from_a_file_and_are_filled_up(base, merge, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", base)
    rows = tmp_path / "few.jsonl"
    rows.write_text('{"prompt": "Spell it.", "completion": "i-t"}\n')
    code, printed = merge(adapters, tmp_path / "merged", "--prompts", rows)
    assert code == 0, printed
    sources = read_receipt(tmp_path / "merged")["prompts_from"]
    assert sources == {str(rows): 1, "simple questions, made here": 49}


def test_fewer_prompts_than_requested_are_said(base, merge, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", base)
    words = ["--num_prompts", "500", "--max_new_tokens", "1"]
    code, printed = merge(adapters, tmp_path / "merged", *words)
    assert code == 0, printed
    number = sum(read_receipt(tmp_path / "merged")["prompts_from"].values())
    assert number < 500
    assert f"There are no more than these {number} of --num_prompts 500" in printed


def test_a_merge_that_was_killed_leaves_nothing_that_looks_finished(
    base, merge, monkeypatch, tmp_path
):
    adapters = write_adapters(tmp_path / "adapters", base)

    def die(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writing, "write_config", die)
        merge(adapters, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    left = tmp_path / "merged.unfinished"
    assert (left / "model.safetensors.index.json").exists()
    assert not (left / "config.json").exists() and not (left / "receipt.json").exists()
    code, printed = merge(adapters, tmp_path / "merged")
    assert code == 0 and not left.exists(), printed


def test_a_whole_folder_passes_and_gets_its_receipt(merged, copy, merge):
    code, printed = merge(merged / "adapters", copy, "--check")
    assert code == 0 and "is what was trained" in printed, printed
    assert read_receipt(copy)["files"] == read_receipt(merged / "merged")["files"]


def test_the_adapters_of_another_run_do_not_pass(merged, copy, tied, merge, tmp_path):
    others = write_adapters(tmp_path / "others", tied, seed=1)
    code, printed = merge(others, copy, "--check")
    assert code == 76 and "is not what peft makes of the base and its adapter" in printed, printed


def test_the_hashes_show_a_changed_file(merged, tied, merge, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(merged / "merged", folder)
    (folder / "tokenizer_config.json").write_text(
        (folder / "tokenizer_config.json").read_text() + "\n"
    )
    code, printed = merge(merged / "adapters", folder, "--check")
    assert code == 76 and "tokenizer_config.json is not the file of receipt.json" in printed


# ---- Bad input ----
def rewrite_weights(folder, change):
    edit_tensors(folder / "adapter_model.safetensors", change)


def other_method(adapters, base):
    edit_json(adapters / "adapter_config.json", peft_type="IA3")


def other_task(adapters, base):
    edit_json(adapters / "adapter_config.json", task_type="SEQ_CLS")


def train_biases(adapters, base):
    edit_json(adapters / "adapter_config.json", bias="all")


def start_with_pissa(adapters, base):
    edit_json(adapters / "adapter_config.json", init_lora_weights="pissa")


def other_base(adapters, base):
    edit_json(adapters / "adapter_config.json", base_model_name_or_path=str(base))


def shapes_of_another_base(adapters, base):
    edit_json(base / "model" / "config.json", hidden_size=32, head_dim=16)


def quantize_the_files(adapters, base):
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    edit_json(base / "model" / "config.json", quantization_config=quantization)


def lose_a_tensor(adapters, base):
    rewrite_weights(adapters, lambda tensors: tensors.pop(next(iter(tensors))))


def add_a_tensor(adapters, base):
    rewrite_weights(adapters, lambda tensors: tensors.update(more=torch.zeros(1)))


def cut_adapters(adapters, base):
    path = adapters / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def remove_adapters(adapters, base):
    (adapters / "adapter_model.safetensors").unlink()


def strange_run(adapters, base):
    run = json.loads((adapters / "run.json").read_text())
    run["arguments"]["dtype"] = "float99"
    (adapters / "run.json").write_text(json.dumps(run))


BAD_INPUT = {
    other_method: "are of the type IA3",
    other_task: "its task is SEQ_CLS",
    train_biases: "train biases",
    start_with_pissa: "init_lora_weights=pissa",
    other_base: "run.json says that the adapters were trained on",
    shapes_of_another_base: "another rank, or another base",
    quantize_the_files: "its files are quantized",
    lose_a_tensor: "lacks base_model.model.model.layers.0",
    add_a_tensor: "has more, for which the base has no place",
    cut_adapters: "cannot be read",
    remove_adapters: "has no adapter_model.safetensors",
    strange_run: "dtype float99",
}


@pytest.mark.parametrize("spoil", BAD_INPUT, ids=lambda spoil: spoil.__name__)
def test_bad_input_is_one_line_with_65_and_leaves_nothing(spoil, base, merge, tmp_path):
    copy = tmp_path / "base"
    shutil.copytree(base, copy)
    adapters = write_adapters(tmp_path / "adapters", copy)
    spoil(adapters, copy)
    code, printed = merge(adapters, tmp_path / "merged")
    assert code == 65 and BAD_INPUT[spoil] in printed, printed
    assert len(printed.splitlines()) == 1 and printed.startswith("error: "), printed
    assert not list(tmp_path.glob("merged*"))


def test_wrong_calls_are_one_line_with_64(base, merge, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", base)
    for words, says in (
        ([base / "model", tmp_path / "merged"], "nothing to merge"),
        ([tmp_path / "none", tmp_path / "merged"], "no such folder"),
        ([adapters, tmp_path / "merged", "--base", "4bit"], "the run was on the 16bit base"),
        ([adapters, tmp_path / "merged", "--check"], "--check needs a merged one"),
        ([adapters, tmp_path / "merged", "--num_prompts", "0"], "--num_prompts"),
        ([adapters, tmp_path / "merged", "--bound", "0"], "--bound"),
        ([adapters, adapters, "--check", "--dtype", "float16"], "--check writes none"),
    ):
        code, printed = merge(*words)
        assert code == 64 and says in printed and len(printed.splitlines()) == 1, printed


def test_a_full_disk_is_one_line_with_73_and_the_next_merge_replaces_what_is_left(
    base, merge, monkeypatch, tmp_path
):
    adapters = write_adapters(tmp_path / "adapters", base)

    def fill(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shards, "save_file", fill)
        code, printed = merge(adapters, tmp_path / "merged")
    assert code == 73 and len(printed.splitlines()) == 1, printed
    assert "cannot write" in printed and "No space left on device" in printed
    assert not (tmp_path / "merged").exists()
    code, printed = merge(adapters, tmp_path / "merged")
    assert code == 0 and not (tmp_path / "merged.unfinished").exists(), printed


def test_an_existing_folder_is_not_written_over(base, merge, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", base)
    code, printed = merge(adapters, adapters)
    assert code == 73 and "exists" in printed, printed
