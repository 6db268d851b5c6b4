# SPDX-License-Identifier: Apache-2.0
"""Each merged tensor is what peft makes of the base and its adapter, rounded once."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_folders import EXPERTS, write_adapters
from merging import shards, writing
from merging.adapter import read_adapter_folder
from merging.plan import Plan, make_plan
from merging.skeleton import read_skeleton
from merging.tensors import find_wrong_tensors, is_rounded

KINDS = {
    "LoRA": {"target_modules": "all-linear"},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True, "target_modules": "all-linear"},
    "embedding": {"target_modules": ["embed_tokens", "down_proj"]},
    "whole modules": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "ranks of their own": {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 32}},
    "experts": {"target_parameters": EXPERTS},
}


@pytest.fixture
def merge_and_check(base, mixture, tmp_path):
    """A function from options of LoRA, and a change of the written files, to what is found."""

    def check(options, dtype, change=None):
        of = mixture if "target_parameters" in options else base
        adapters = write_adapters(tmp_path / "adapters", of, scale=2e-3, **options)
        adapter = read_adapter_folder(str(adapters))
        skeleton = read_skeleton(adapter)
        files = shards.find_files(adapter.base, adapter.revision)
        plan = make_plan(adapter, skeleton, files.names)
        output = tmp_path / "merged"
        output.mkdir()
        writing.write_weights(output, adapter, plan, files, False, dtype)
        if change is not None:
            change(output)
        written = shards.find_files(str(output), "main")
        return list(find_wrong_tensors(adapter, plan, files, written, False))

    return check


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_what_is_merged_right_has_no_problem(options, dtype, merge_and_check):
    assert merge_and_check(options, dtype) == []


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_mild_adapter_of_any_kind_that_was_left_out_is_found(
    options, merge_and_check, monkeypatch
):
    parts = Plan.parts

    def nothing(self, target, read):
        return {name: 0 * delta for name, delta in parts(self, target, read).items()}

    monkeypatch.setattr(Plan, "parts", nothing)
    (problem,) = merge_and_check(options, torch.bfloat16)
    assert "is not what peft makes of the base and its adapter: model." in problem


def spoil(name, change):
    """Return a function that changes one tensor in the files of a folder."""

    def write(folder):
        for path in folder.glob("*.safetensors"):
            tensors = load_file(path)
            if name in tensors:
                tensors[name] = change(tensors[name])
                save_file(tensors, path, {"format": "pt"})
                return
        raise AssertionError(f"no {name}")

    return write


def change_one_value(weight):
    weight.view(-1)[7] *= 1.01
    return weight


def lose_a_number(weight):
    weight.view(-1)[7] = float("nan")
    return weight


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("self_attn.q_proj", change_one_value, "is not what peft makes"),
        ("mlp.up_proj", change_one_value, "without an adapter is not the base's"),
        ("mlp.up_proj", lose_a_number, "not numbers"),
        ("mlp.up_proj", lambda weight: weight.to(torch.float64), "written as torch.float64"),
        ("self_attn.q_proj", lambda weight: weight[:-1].contiguous(), "is not what peft makes"),
    ],
)
def test_a_single_wrong_value_is_found(name, change, says, merge_and_check):
    name = f"model.layers.1.{name}.weight"
    (problem,) = merge_and_check({}, torch.bfloat16, spoil(name, change))
    assert says in problem and problem.endswith(f": {name}")


def test_a_module_that_was_saved_whole_is_compared_too(merge_and_check):
    change = spoil("lm_head.weight", change_one_value)
    (problem,) = merge_and_check({"modules_to_save": ["lm_head"]}, None, change)
    assert "the module that was saved whole: lm_head.weight" in problem


def test_a_value_is_rounded_once_to_the_nearest():
    exact = torch.tensor([1.0, 1.001, -3.0])
    rounded = exact.to(torch.bfloat16)
    assert is_rounded(rounded, exact)
    assert not is_rounded(torch.nextafter(rounded, torch.zeros_like(rounded)), exact)
