# SPDX-License-Identifier: Apache-2.0
"""A merged folder has the weights of peft's merge in fp32, bit for bit, in the base's layout."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
)

from adapter_folders import EXPERTS, make_base, write_adapters
from merging import shards, writing
from merging.adapter import read_adapter_folder
from merging.contestants import Contestant
from merging.plan import make_plan
from merging.receipt import Receipt
from merging.skeleton import read_skeleton
from merging.tensors import find_wrong_tensors
from merging.trained import merge_by_peft


def read_plan(adapters):
    adapter = read_adapter_folder(str(adapters))
    skeleton = read_skeleton(adapter)
    files = shards.find_files(adapter.base, adapter.revision)
    return SimpleNamespace(
        adapter=adapter, files=files, plan=make_plan(adapter, skeleton, files.names)
    )


def merge(adapters, output, dtype=None, use_quantized=False):
    """Merge, and check that the receipt's comparison of tensors has no false alarm."""
    read = read_plan(adapters)
    output.mkdir()
    writing.write_weights(output, read.adapter, read.plan, read.files, use_quantized, dtype)
    writing.copy_tokenizer(output, read.adapter)
    tokenizer = AutoTokenizer.from_pretrained(output)
    of_base = writing.read_json_of_base(read.adapter, writing.GENERATION_CONFIG)
    writing.write_generation_config(output, of_base, {2, 3}, tokenizer)
    writing.write_config(output, read.adapter, read.plan.unties, dtype)
    written = shards.find_files(str(output), "main")
    wrong = find_wrong_tensors(read.adapter, read.plan, read.files, written, use_quantized)
    assert list(wrong) == []
    return output


def merge_with_peft(adapters, base):
    model = AutoModelForCausalLM.from_pretrained(base / "model")
    unties = read_plan(adapters).plan.unties
    return merge_by_peft(PeftModel.from_pretrained(model, adapters), unties)


def weights_of(model):
    return {name: weight for name, weight in model.state_dict().items()}


def assert_as_peft(adapters, base, output):
    """The merged folder loads with the weights of peft's merge, bit for bit; returns the model."""
    expected = weights_of(merge_with_peft(adapters, base))
    model, report = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    found = weights_of(model)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    untouched = weights_of(AutoModelForCausalLM.from_pretrained(base / "model"))
    assert any(not torch.equal(untouched[name], found[name]) for name in found)
    return model


def make_other(folder, model):
    """A base of another architecture with the tokenizer and rows of the tiny Llama."""
    make_base(folder)
    tokens = AutoTokenizer.from_pretrained(folder / "model")
    for name in ("model.safetensors", "generation_config.json"):
        (folder / "model" / name).unlink()
    torch.manual_seed(0)
    model(len(tokens)).save_pretrained(folder / "model")


def make_gpt2(vocabulary):
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, n_embd=64, n_layer=2, n_head=2))


def make_gpt_oss(vocabulary):
    return GptOssForCausalLM(
        GptOssConfig(
            vocab_size=vocabulary,
            hidden_size=64,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            num_local_experts=4,
        )
    )


LINEAR = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True, "target_modules": "all-linear"},
    "DoRA": {"use_dora": True, "target_modules": "all-linear"},
    "DoRA and rsLoRA": {"use_dora": True, "use_rslora": True},
    "whole modules": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "ranks of their own": {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 32}},
    "embedding": {"target_modules": ["embed_tokens", "down_proj"]},
    "one layer": {"layers_to_transform": [1]},
}


@pytest.mark.parametrize("options", LINEAR.values(), ids=LINEAR)
def test_the_weights_are_those_of_peft(options, base, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", base, **options)
    output = merge(adapters, tmp_path / "merged")
    assert_as_peft(adapters, base, output)
    names = sorted(path.name for path in (base / "model").glob("*.safetensors*"))
    assert len(names) > 3
    assert sorted(path.name for path in output.glob("*.safetensors*")) == names
    before = json.loads((base / "model" / shards.INDEX).read_text())
    after = json.loads((output / shards.INDEX).read_text())
    assert after["weight_map"] == before["weight_map"]
    assert after["metadata"]["total_size"] == before["metadata"]["total_size"]


EXPERT_OPTIONS = {
    "experts": {"target_parameters": EXPERTS},
    "rsLoRA": {"target_parameters": EXPERTS, "use_rslora": True},
    "router": {"target_parameters": ["gate.weight", "experts.down_proj"], "target_modules": []},
}


@pytest.mark.parametrize("options", EXPERT_OPTIONS.values(), ids=EXPERT_OPTIONS)
def test_experts_are_merged_into_the_tensors_of_the_files(options, mixture, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", mixture, **options)
    output = merge(adapters, tmp_path / "merged")
    assert_as_peft(adapters, mixture, output)
    names = shards.find_files(str(output), "main").names
    assert names == shards.find_files(str(mixture / "model"), "main").names
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in names


def test_files_in_the_layout_of_the_model_are_merged_too(mixture, tmp_path):
    copy = tmp_path / "base"
    make_base(copy, "mixtral")
    model = AutoModelForCausalLM.from_pretrained(copy / "model")
    save_file(dict(model.state_dict()), copy / "model" / "model.safetensors", {"format": "pt"})
    adapters = write_adapters(tmp_path / "adapters", copy, target_parameters=EXPERTS)
    output = merge(adapters, tmp_path / "merged")
    assert_as_peft(adapters, copy, output)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(output / "model.safetensors")


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (make_gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
        (
            make_gpt2,
            {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True},
        ),
        (make_gpt_oss, {"target_parameters": EXPERTS}),
    ],
    ids=["GPT-2", "GPT-2 with DoRA", "gpt-oss"],
)
def test_weights_that_are_stored_the_other_way_around_are_merged(make, options, tmp_path):
    base = tmp_path / "base"
    make_other(base, make)
    adapters = write_adapters(tmp_path / "adapters", base, **options)
    assert_as_peft(adapters, base, merge(adapters, tmp_path / "merged"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_another_dtype_rounds_the_fp32_result_once(dtype, base, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", base)
    output = merge(adapters, tmp_path / "merged", dtype)
    expected = weights_of(merge_with_peft(adapters, base))
    model = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    assert model.dtype == dtype
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected[name].to(dtype)), name


# ---- Tied weights ----
def test_tied_weights_stay_tied_and_are_written_once(tied, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", tied)
    output = merge(adapters, tmp_path / "merged")
    model = assert_as_peft(adapters, tied, output)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(output / "model.safetensors")
    assert json.loads((output / "config.json").read_text())["tie_word_embeddings"] is True


def test_a_head_that_the_base_has_twice_is_written_once(tied, tmp_path):
    copy = tmp_path / "base"
    make_base(copy, "llama", "--tie_word_embeddings")
    path = copy / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    adapters = write_adapters(tmp_path / "adapters", copy)
    output = merge(adapters, tmp_path / "merged")
    assert_as_peft(adapters, copy, output)
    assert "lm_head.weight" not in load_file(output / "model.safetensors")


@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
    ],
    ids=["whole head", "adapter of the head", "adapter of the embedding"],
)
def test_what_adapters_made_different_is_no_longer_tied(options, tied, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", tied, **options)
    output = merge(adapters, tmp_path / "merged")
    model = assert_as_peft(adapters, tied, output)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert json.loads((output / "config.json").read_text())["tie_word_embeddings"] is False


# ---- Quantized bases ----
@pytest.mark.parametrize(
    "arguments",
    [
        {"load_in_4bit": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
        {"load_in_4bit": True, "dtype": "bfloat16"},
    ],
    ids=["nf4", "fp4, double", "nf4 of bf16"],
)
def test_a_quantized_base_gives_the_values_that_it_computes_with(arguments, base, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", base, arguments, use_dora=True)
    read = read_plan(adapters)
    quantized = AutoModelForCausalLM.from_pretrained(
        base / "model",
        dtype=read.adapter.quantization.dtype,
        quantization_config=read.adapter.quantization.config(),
    )
    dequantized = quantized.dequantize().float()
    expected = weights_of(PeftModel.from_pretrained(dequantized, adapters).merge_and_unload())
    output = merge(adapters, tmp_path / "merged", use_quantized=True)
    found = weights_of(AutoModelForCausalLM.from_pretrained(output))
    original = weights_of(AutoModelForCausalLM.from_pretrained(base / "model"))
    for name, weight in expected.items():
        if read.adapter.quantization.dtype == torch.float32 or "norm" not in name:
            assert torch.equal(found[name], weight) or name in {
                "model.embed_tokens.weight",
                "lm_head.weight",
            }, name
    # Layers without adapters are quantized as well, but neither the head nor the embedding
    assert not torch.equal(
        found["model.layers.0.mlp.up_proj.weight"], original["model.layers.0.mlp.up_proj.weight"]
    )
    assert torch.equal(found["lm_head.weight"], original["lm_head.weight"])


# ---- The other files ----
def test_the_folder_has_the_files_of_a_model_and_none_of_adapters(base, tmp_path):
    adapters = write_adapters(tmp_path / "adapters", base)
    (adapters / "README.md").write_text("of the adapters")
    output = merge(adapters, tmp_path / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (output / name).read_bytes() == (adapters / name).read_bytes()
    config = json.loads((output / "config.json").read_text())
    assert config == json.loads((base / "model" / "config.json").read_text())
    assert not list(output.glob("adapter_*")) and not (output / "README.md").exists()
    ends = json.loads((output / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [2, 3]


def test_a_staging_folder_replaces_that_of_a_killed_merge(tmp_path):
    output = tmp_path / "merged"
    staging = writing.start_staging(output)
    (staging / "model.safetensors").write_text("half")
    again = writing.start_staging(output)
    assert again == staging and not list(again.glob("model*"))
    writing.finish(again, output)
    assert output.is_dir() and not list(output.iterdir()) and not staging.exists()


def test_a_staging_folder_that_no_merge_made_is_kept(tmp_path, capsys):
    staging = writing.staging_of(tmp_path / "merged")
    staging.mkdir()
    (staging / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit, match="73"):
        writing.start_staging(tmp_path / "merged")
    assert "merged.unfinished is not of a merge" in capsys.readouterr().err
    assert (staging / "thesis.txt").read_text() == "years of work"


def copy_tokenizer_of_the_hub(folder):
    tokenizer = SimpleNamespace(save_pretrained=lambda where: Path(where, "vocab.txt").touch())
    source = SimpleNamespace(tokenizer="owner/name")
    adapter = SimpleNamespace(source=source, base="owner/name", revision="main")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing.AutoTokenizer, "from_pretrained", lambda *_, **options: tokenizer)
        writing.copy_tokenizer(folder, adapter)


def copy_a_license(folder):
    source = folder.parent / "source"
    source.mkdir()
    (source / "LICENSE").touch()
    writing.copy_files(source, folder, ["LICENSE*"])


def write_receipt(folder):
    asked = Contestant("trained", "float32", ["a"], [[1]], [[2]], None, None)
    Receipt({}, asked).write(folder)


WRITERS = {
    "weights": lambda folder: shards.write_shard(folder / "a.safetensors", {"a": torch.ones(1)}),
    "index": lambda folder: shards.write_index(folder / shards.INDEX, {}, 0),
    "config": lambda folder: writing.write_json(folder / "config.json", {}),
    "tokenizer": copy_tokenizer_of_the_hub,
    "license": copy_a_license,
    "receipt": write_receipt,
    "end": lambda folder: writing.finish(folder, folder.parent / "merged"),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_what_cannot_be_written_is_one_line_with_73(write, tmp_path, capsys):
    with pytest.raises(SystemExit, match="73"):
        write(tmp_path / "gone")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: cannot write "), lines


@pytest.mark.parametrize("make", ["mkdir", "touch"])
def test_nothing_is_written_over(make, tmp_path, capsys):
    output = tmp_path / "merged"
    getattr(output, make)()
    with pytest.raises(SystemExit) as end:
        writing.check_output(output)
    assert end.value.code == 73 and "exists" in capsys.readouterr().err
