# SPDX-License-Identifier: Apache-2.0
"""recipes/mixtral.py as a user runs it: it learns, its results load, and a bad row is named.

Ranks and resume: test_recipes.py.
"""

import json
import sys

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import mixtral
from bench.recipe import Rows
from components.chat_template import ChatTemplate
from components.head_loss import LossInHead
from fakes import fake_accelerator
from launching import REPO, read_metrics, run

RECIPE = REPO / "recipes" / "mixtral.py"
EXPERTS, TOP_K = 4, 2
ONE_PROCESS = fake_accelerator()


@pytest.fixture(scope="module")
def tiny(tiny_of):
    return tiny_of("mixtral")


def evaluated(model, tiny):
    """Loss and router loss of a model over the evaluation rows, one at a time."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    token_loss = LossInHead(model, 256, torch.device("cpu"))
    collate = mixtral.RoutedCollator(pad_token_id=0)
    sums, counts = torch.zeros(2), torch.zeros(2)
    for line in (tiny / "data" / "test.jsonl").read_text().splitlines():
        row = {**mixtral.tokenize_row(json.loads(line), ChatTemplate(tokenizer), 1024), "row": 1}
        batch = collate(Rows([row]), [[0]])
        with torch.no_grad():
            found = mixtral.summed_losses(ONE_PROCESS, model.eval(), token_loss, batch, TOP_K)
            sums += torch.stack(found[:2])
        counts += batch["counts"]
    return (sums / counts).tolist()


def last_evaluation(folder):
    evaluation = read_metrics(folder)[1][-1]
    return [evaluation["eval_loss"], evaluation["eval_aux_loss"]]


def test_it_learns_and_the_result_loads_under_the_names_that_other_tools_read(tiny, one_process):
    folder = one_process("full", "mixtral")
    steps, _ = read_metrics(folder)
    assert steps[-1]["loss"] < 0.6 * steps[0]["loss"]
    most = EXPERTS / TOP_K  # even shares: every token picks one and the same expert
    assert all(
        1 < step["max_expert_load"] <= most * 1.000001 and 1 < step["aux_loss"] < EXPERTS
        for step in steps
    )
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in load_file(
        folder / "model.safetensors"
    )
    found = evaluated(AutoModelForCausalLM.from_pretrained(folder), tiny)
    assert found == pytest.approx(
        last_evaluation(folder), rel=1e-5
    )  # evaluated without padding, other sums


def test_adapters_on_the_experts_load_and_merge_outside_of_the_recipe(tiny, one_process):
    folder = one_process("LoRA", "mixtral")
    summary = json.loads((folder / "run.json").read_text())["summary"]
    assert "router frozen" in summary["experts"] and " 0 of " not in summary["experts"]
    adapters = load_file(folder / "adapter_model.safetensors")
    trained = [
        name
        for name, weight in adapters.items()
        if ".experts." in name and "lora_B" in name and weight.any()
    ]
    assert len(trained) == 2 * 2  # two matrices a layer; B begins at zero
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny / "model"), folder
    ).merge_and_unload()
    assert evaluated(model, tiny) == pytest.approx(last_evaluation(folder), rel=1e-5)


def test_a_bad_row_is_named(tiny, tmp_path):
    rows = (tiny / "data" / "train.jsonl").read_text().splitlines()
    rows[3] = json.dumps({"prompt": "Spell.", "completion": ""})
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    command = ["--model_name_or_path", tiny / "model", "--dataset_name", tmp_path / "rows.jsonl"]
    done = run(sys.executable, RECIPE, *command, "--output_dir", tmp_path / "run")
    assert done.returncode == 65 and "rows.jsonl, line 4: has no answer" in done.output, (
        done.output[-3000:]
    )
