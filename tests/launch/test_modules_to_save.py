# SPDX-License-Identifier: Apache-2.0
"""Modules that are trained whole beside adapters (--modules_to_save), under every engine.

Embeddings and head are copied by peft, beside the frozen originals. Each job gives the numbers of
one process, continues bit for bit, and leaves a folder that peft loads.
"""

import json
import shutil
from functools import partial

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from components.checkpoint import read_state
from launching import read_metrics
from proof.compare import bounds_of, compare, within
from proof.jobs import CUT, Run
from proof.launch import launch

STEPS = 10
SAVES = ("--max_steps", str(STEPS), "--save_steps", "6", "--save_total_limit", "9")
# The loss in pieces of 16 tokens: a batch has several, and the ranks have different numbers of them
LLAMA = ("--modules_to_save", "lm_head", "embed_tokens", "--max_logits_mib", "0.02", *SAVES)
CONFIGS = [
    "ddp",
    "fsdp1_full_shard",
    "fsdp1_shard_grad_op",
    "fsdp2_full_shard",
    "deepspeed_zero2",
    "deepspeed_zero3",
]
# A module of each other kind of model, under an engine that splits weights
OTHERS = [
    ("t5", "final_layer_norm", "fsdp2_full_shard"),  # in the encoder and in the decoder
    ("bert", "pooler", "deepspeed_zero3"),
    ("vit", "layernorm", "fsdp1_full_shard"),
    ("llama_dpo", "lm_head", "fsdp1_full_shard"),  # whose reference has the original head
]


def job(config, flags, recipe="llama"):
    ranks = 1 if config == "single" else 2
    return Run("whole modules", config, ranks, *CUT[ranks], "LoRA", flags, recipe)


def trained(run, tiny, folder):
    code, output = launch(run, tiny, folder)
    assert code == 0, output[-4000:]
    return output


@pytest.fixture(scope="module")
def one_process_of(short_of, once):
    """A function from a recipe and its flags to the folder of its run in one process."""

    def folder_of(recipe, flags):
        run = job("single", flags, recipe)
        return once(f"whole_modules_{recipe}", partial(trained, run, short_of(recipe)))

    return folder_of


def check_same_numbers(run, folder, whole):
    found, (bounds, _) = compare(folder, whole), bounds_of(run)
    assert within(found, bounds), found
    evaluations, expected = read_metrics(folder)[1], read_metrics(whole)[1]
    assert evaluations[-1]["eval_loss"] == pytest.approx(expected[-1]["eval_loss"], rel=1e-6)
    assert json.loads((folder / "report.json").read_text())["verdict"] == "ok"


@pytest.mark.parametrize("config", CONFIGS)
def test_embeddings_and_head_are_trained_whole_under(
    config, short_of, one_process_of, tmp_path, tiny_logits
):
    run, tiny = job(config, LLAMA), short_of("llama")
    folder = tmp_path / "run"
    trained(run, tiny, folder)
    whole = one_process_of("llama", LLAMA)
    check_same_numbers(run, folder, whole)
    torch.testing.assert_close(tiny_logits(folder), tiny_logits(whole), rtol=1e-4, atol=1e-5)

    again = tmp_path / "again"  # as if it had been killed after step 9
    again.mkdir()
    shutil.copytree(folder / "checkpoint-6", again / "checkpoint-6")
    shutil.copy(folder / "metrics.jsonl", again)
    assert "Continuing from" in trained(run, tiny, again)
    assert read_metrics(again)[0][-1]["loss"] == read_metrics(folder)[0][-1]["loss"]
    for read, name in (
        (read_state, f"checkpoint-{STEPS}"),
        (load_file, "adapter_model.safetensors"),
    ):
        before, after = read(folder / name), read(again / name)
        assert before.keys() == after.keys()
        assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())


@pytest.fixture
def tiny_logits(short_of):
    """A function from a folder of adapters to what its model makes of a few tokens."""

    def logits_of(folder):
        base = AutoModelForCausalLM.from_pretrained(short_of("llama") / "model")
        before = base.lm_head.weight.clone(), base.get_input_embeddings().weight.clone()
        model = PeftModel.from_pretrained(base, folder)
        after = model.base_model.model.lm_head.weight, model.get_input_embeddings().weight
        assert not any(map(torch.equal, before, after))
        with torch.no_grad():
            return model(input_ids=torch.arange(200)[None]).logits

    return logits_of


@pytest.mark.parametrize(("recipe", "module", "config"), OTHERS)
def test_a_module_of_another_kind_of_model_is_trained_whole(
    recipe, module, config, short_of, one_process_of, tmp_path
):
    flags = ("--modules_to_save", module, "--max_steps", "6")
    run = job(config, flags, recipe)
    trained(run, short_of(recipe), tmp_path / "run")
    check_same_numbers(run, tmp_path / "run", one_process_of(recipe, flags))
