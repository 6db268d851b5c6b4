# SPDX-License-Identifier: Apache-2.0
"""scripts/merge.py merges what the recipes train: the result says what the adapters say."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from generation import joining
from launching import REPO, data_of, recipe, rehearse, run

# A high rate: after two steps the adapters change the logits by more than any bound
STEPS = ("--use_peft", "--max_steps", "2", "--learning_rate", "2e-2", "--logging_steps", "1")
KINDS = {
    "rslora": ["--use_rslora", "--modules_to_save", "lm_head"],
    "dora": ["--use_dora"],
    "qlora": ["--load_in_4bit"],
}
FEW = ("--num_prompts", "8")


def command(name, *arguments):
    done = run(sys.executable, REPO / "scripts" / name, *arguments)
    assert done.returncode == 0, done.output
    return done.output


def train(kind, tiny, folder):
    words = [*data_of(tiny), *STEPS, *KINDS.get(kind, ()), "--output_dir", folder]
    if kind == "experts":
        done = run(sys.executable, REPO / "recipes" / "mixtral.py", *words)
    else:
        done = recipe(*words)
    assert done.returncode == 0, done.output[-3000:]


@pytest.fixture(scope="module")
def trained(tiny_of, once):
    """A function from a kind of adapters to the folder of a short run."""

    def folder_of(kind):
        tiny = tiny_of("mixtral" if kind == "experts" else "llama")
        return once(f"merge_{kind}", partial(train, kind, tiny))

    return folder_of


@pytest.mark.parametrize("kind", ["rslora", "dora", "experts"])
def test_a_merged_folder_answers_as_the_adapters_do(kind, trained, tiny_of, tmp_path):
    folder = trained(kind)
    command("merge.py", folder, tmp_path / "merged", *FEW)
    assert not list((tmp_path / "merged").glob("adapter_*"))
    rows = tiny_of("mixtral" if kind == "experts" else "llama") / "data" / "test.jsonl"
    words = ["--file", rows, "--limit", "16", "--max_new_tokens", "8", "--output"]
    for name, model in (("adapters", folder), ("merged", tmp_path / "merged")):
        command("generate.py", model, *words, tmp_path / f"{name}.jsonl")
    ours = (tmp_path / "merged.jsonl").read_text()
    assert ours == (tmp_path / "adapters.jsonl").read_text() and ours
    if kind == "rslora":  # A module that was trained whole takes the place of the base's
        tensors = load_file(folder / "adapter_model.safetensors")
        (head,) = [tensors[name] for name in tensors if "head" in name]
        assert load_file(tmp_path / "merged" / "model.safetensors")["lm_head.weight"].equal(head)


def test_qlora_is_merged_into_the_nearer_base_and_both_gaps_are_shown(trained, tmp_path):
    output = command("merge.py", trained("qlora"), tmp_path / "merged", *FEW)
    assert "Merging into the 4bit base" in output
    gaps = {}
    for line in output.splitlines():
        if line.startswith("Merged into the "):
            gaps[line.split()[3]] = float(line.split()[-1])
    assert gaps["4bit"] < 1e-4 < 1e-2 < gaps["16bit"]


# ---- A checkpoint ----
def test_a_checkpoint_becomes_the_folder_that_its_run_ends_with(tiny, tmp_path, monkeypatch):
    out = tmp_path / "run"
    words = ["--max_steps", 2, "--save_steps", 2, "--eval_strategy", "no", "--output_dir", out]
    done = rehearse("fsdp2_full_shard", *data_of(tiny), *words)
    assert done.returncode == 0, done.output[-3000:]
    # The model has four files of this size
    monkeypatch.setattr(joining, "BYTES_OF_A_FILE", 3_000_000)
    joined = tmp_path / "joined"
    joining.run(SimpleNamespace(adapter=out / "checkpoint-2", output=joined, dtype="auto"))
    weights = {}
    files = list(joined.glob("*.safetensors"))
    assert len(files) > 1
    for file in files:
        weights |= load_file(file)
    expected = load_file(out / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    others = {path.name for path in out.glob("*.json*")} - {"run.json", "status.json"}
    for name in others - {"metrics.jsonl", "report.json"}:
        assert (joined / name).read_bytes() == (out / name).read_bytes(), name
    AutoModelForCausalLM.from_pretrained(joined)
