# SPDX-License-Identifier: Apache-2.0
"""What vLLM does not serve as it was trained, by adapters that peft wrote."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from adapter_folders import ATTENTION, EXPERTS, write_adapters
from exporting import vllm, vllm_rules
from exporting.vllm_rules import Adapters, Finding, allowed_rank, find_in_adapters
from generation.loading import find_source

MERGE = "python scripts/merge.py"


def read(folder):
    source = find_source(str(folder))
    return vllm.read_adapters(source, AutoConfig.from_pretrained(source.weights))


def findings_of(folder):
    return list(find_in_adapters(read(folder)))


ALLOWED = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "all projections": {"target_modules": "all-linear"},
    "several ranks": {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"v_proj": 3}},
    "a head that is not tied": {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
    "another start": {"init_lora_weights": "gaussian"},
}


@pytest.mark.parametrize("options", ALLOWED.values(), ids=ALLOWED)
def test_what_vllm_serves_has_no_finding(options, base, tmp_path):
    assert findings_of(write_adapters(tmp_path, base, **options)) == []


REFUSED = {
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save has lm_head", MERGE),
    "DoRA": ({"use_dora": True}, "they are DoRA", MERGE),
    "biases": ({"bias": "lora_only"}, "they train biases (bias=lora_only)", "without bias"),
    "biases of adapters": ({"lora_bias": True}, "they use lora_bias", "without lora_bias"),
    "a large rank": ({"r": 513}, "their rank is 513", MERGE),
    "a large rank of a layer": ({"rank_pattern": {"q_proj": 600}}, "their rank is 600", MERGE),
    "tokens": ({"trainable_token_indices": [5]}, "trainable_token_indices", "train them again"),
}


@pytest.mark.parametrize(("options", "problem", "cure"), REFUSED.values(), ids=REFUSED)
def test_what_vllm_refuses_or_ignores_is_found_with_its_cure(
    options, problem, cure, base, tmp_path
):
    folder = write_adapters(tmp_path / "run", base, **options)
    summary = vllm_rules.summarize(findings_of(folder))
    assert problem in summary and cure in summary


def test_one_cause_is_one_finding(base, tmp_path):
    for name, (options, _, _) in REFUSED.items():
        if name not in ("biases of adapters", "tokens"):  # These also have tensors of their own
            folder = write_adapters(tmp_path / name.replace(" ", "_"), base, **options)
            assert len(findings_of(folder)) == 1, name


@pytest.mark.parametrize("layer", ["lm_head", "embed_tokens"])
def test_adapters_of_a_tied_head_are_refused(layer, tied, tmp_path):
    (finding,) = findings_of(write_adapters(tmp_path, tied, target_modules=["q_proj", layer]))
    assert finding.problem == f"they adapt {layer}, which the base ties" and MERGE in finding.cure


def test_adapters_of_a_head_are_refused_where_vllm_has_none(base, tmp_path):
    adapters = read(write_adapters(tmp_path, base, target_modules=["q_proj", "lm_head"]))
    adapters.base.architectures = ["MistralForCausalLM"]
    (finding,) = find_in_adapters(adapters)
    assert finding.problem == "they adapt lm_head of a MistralForCausalLM"


def test_adapters_of_experts_are_refused(mixture, tmp_path):
    (finding,) = findings_of(write_adapters(tmp_path, mixture, target_parameters=EXPERTS))
    assert "they adapt experts (base_model.model.model.layers.0.mlp.experts" in finding.problem
    assert MERGE in finding.cure


def test_adapters_of_attention_in_a_mixture_are_served(mixture, tmp_path):
    assert findings_of(write_adapters(tmp_path, mixture, target_modules=ATTENTION)) == []


def test_layers_that_vllm_does_not_adapt_are_refused(base, tmp_path):
    adapters = read(write_adapters(tmp_path, base))
    adapters.base.architectures = ["Phi3ForCausalLM"]  # There one layer has all three projections
    (finding,) = find_in_adapters(adapters)
    assert "they adapt q_proj, v_proj, and vLLM adapts no such layers" in finding.problem
    adapters.base.architectures = ["SomeForCausalLM"]  # Not checked, which a note says
    assert list(find_in_adapters(adapters)) == []


def test_a_vocabulary_that_is_too_large_for_adapters_is_refused(base, tmp_path):
    adapters = read(write_adapters(tmp_path, base))
    adapters.base.vocab_size = 258_049
    (finding,) = find_in_adapters(adapters)
    assert "their base has 258049 tokens" in finding.problem and MERGE in finding.cure
    adapters.base.architectures = ["Gemma3ForCausalLM"]  # Its head has no place for adapters
    assert list(find_in_adapters(adapters)) == []


def test_a_vocabulary_that_was_extended_is_refused(base, tmp_path):
    folder = write_adapters(tmp_path, base, target_modules=["q_proj", "embed_tokens"])
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    more = torch.zeros(AutoConfig.from_pretrained(base / "model").vocab_size + 2, 64)
    save_file(tensors | {name: more}, path, {"format": "pt"})
    (finding,) = findings_of(folder)
    assert f"tokens in {name}, which vLLM skips" in finding.problem
    assert "save the base" in finding.cure  # merge.py refuses it too


def test_tensors_for_which_vllm_has_no_place_are_refused(base, tmp_path):
    folder = write_adapters(tmp_path, base)
    path = folder / "adapter_model.safetensors"
    extra = {"base_model.model.lm_head.weight": torch.zeros(2, 2)}
    save_file(load_file(path) | extra, path, {"format": "pt"})
    (finding,) = findings_of(folder)
    assert finding.problem == "they also have base_model.model.lm_head.weight"


@pytest.mark.parametrize("start", ["pissa", "olora", "loftq", "pissa_niter_4"])
def test_adapters_that_began_with_another_base_are_refused(start, base, tmp_path):
    adapters = read(write_adapters(tmp_path, base))
    changed = replace(adapters, config={**adapters.config, "init_lora_weights": start})
    (finding,) = find_in_adapters(changed)
    assert start in finding.problem and "path_initial_model" in finding.cure


def test_files_that_bitsandbytes_quantized_are_refused(base, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(base / "model", model)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (model / "config.json").write_text(json.dumps(config))
    (finding,) = vllm_rules.find_in_model(AutoConfig.from_pretrained(model), vllm.CAUSAL)
    assert "quantized by bitsandbytes" in finding.problem
    config["quantization_config"] = {"quant_method": "fp8"}
    (model / "config.json").write_text(json.dumps(config))
    assert not list(vllm_rules.find_in_model(AutoConfig.from_pretrained(model), vllm.CAUSAL))


def test_a_model_of_another_task_is_refused(base):
    config = AutoConfig.from_pretrained(base / "model")
    assert list(vllm_rules.find_in_model(config, vllm.CAUSAL)) == []
    config.architectures = ["BertForSequenceClassification"]
    (finding,) = vllm_rules.find_in_model(config, vllm.CAUSAL)
    assert "BertForSequenceClassification, which is no causal language model" in finding.problem
    config.architectures = None
    (finding,) = vllm_rules.find_in_model(config, vllm.CAUSAL)
    assert "not named" in finding.problem


def test_tokens_without_a_row_of_embeddings_are_refused(base):
    config = AutoConfig.from_pretrained(base / "model")
    assert list(vllm_rules.find_large_vocabulary(config, config.vocab_size)) == []
    (finding,) = vllm_rules.find_large_vocabulary(config, config.vocab_size + 1)
    assert f"{config.vocab_size + 1} tokens" in finding.problem


@pytest.mark.parametrize(
    ("rank", "allowed"), [(1, 1), (2, 8), (8, 8), (9, 16), (257, 320), (512, 512)]
)
def test_the_next_rank_that_vllm_allows_is_named(rank, allowed):
    assert allowed_rank(rank) == allowed


def test_a_cure_of_several_problems_is_named_once():
    findings = [Finding("one", "merge"), Finding("two", "merge"), Finding("three", "train")]
    assert vllm_rules.summarize(findings).endswith(": one; two; three; merge; train")


def test_layers_are_the_last_parts_of_the_names_of_tensors():
    adapters = Adapters("run", {"r": 4}, {"base_model.model.lm_head.lora_A.weight": (4, 8)}, None)
    assert adapters.layers == {"lm_head"} and adapters.rank == 4
