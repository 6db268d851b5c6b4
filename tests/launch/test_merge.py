# SPDX-License-Identifier: Apache-2.0
"""scripts/merge.py merges what the recipes train, and its receipts show it."""

import json
import shutil
import sys
from functools import partial

import pytest
from safetensors.torch import load_file, save_file

from launching import REPO, data_of, recipe, rehearse, run

# A high rate: after two steps the adapters change the logits by more than any bound
STEPS = ("--use_peft", "--max_steps", "2", "--learning_rate", "2e-2", "--logging_steps", "1")
KINDS = {
    "lora": [],
    "rslora": ["--use_rslora", "--modules_to_save", "lm_head"],
    "dora": ["--use_dora"],
    "qlora": ["--load_in_4bit"],
}


def merge(*arguments):
    return run(sys.executable, REPO / "scripts" / "merge.py", *arguments)


def train(flags, tiny, folder, **options):
    done = recipe(*data_of(tiny), *STEPS, *flags, "--output_dir", folder, **options)
    assert done.returncode == 0, done.output[-3000:]


def train_mixture(tiny, folder):
    script = REPO / "recipes" / "mixtral.py"
    done = run(sys.executable, script, *data_of(tiny), *STEPS, "--output_dir", folder)
    assert done.returncode == 0, done.output[-3000:]


@pytest.fixture(scope="module")
def trained(tiny, tiny_of, once):
    """A function from a kind of adapters to the folder of a short run."""

    def folder_of(kind):
        if kind == "experts":
            return once("merge_experts", partial(train_mixture, tiny_of("mixtral")))
        return once(f"merge_{kind}", partial(train, KINDS[kind], tiny))

    return folder_of


def read_receipt(folder):
    return json.loads((folder / "receipt.json").read_text())


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora", "experts"])
def test_what_a_recipe_trained_is_merged_with_a_receipt(kind, trained, tmp_path):
    folder = trained(kind)
    done = merge(folder, tmp_path / "merged")
    assert done.returncode == 0, done.output
    receipt = read_receipt(tmp_path / "merged")
    assert receipt["passed"] and receipt["trained_on"] == "16bit"
    assert sum(receipt["prompts_from"].values()) == 50
    for row in receipt["comparisons"]:
        assert row["largest_logit_gap"] < row["bound"] < 0.001, row
        assert row["same_rendered_prompts"] == row["same_greedy_tokens"] == 50, row
    assert not list((tmp_path / "merged").glob("adapter_*"))
    if kind == "rslora":  # A module that was trained whole takes the place of the base's
        (name,) = [key for key in load_file(folder / "adapter_model.safetensors") if "head" in key]
        head = load_file(folder / "adapter_model.safetensors")[name]
        assert load_file(tmp_path / "merged" / "model.safetensors")["lm_head.weight"].equal(head)


@pytest.mark.parametrize(
    "config", ["ddp", "fsdp", "fsdp1_full_shard", "deepspeed_zero2", "deepspeed_zero3"]
)
def test_what_two_ranks_trained_under_a_yaml_is_merged(config, tiny, tmp_path):
    words = [*data_of(tiny), *STEPS, "--output_dir", tmp_path / "run"]
    done = rehearse(config, *words, num_processes=2)
    assert done.returncode == 0, done.output[-3000:]
    few = ("--num_prompts", "8", "--max_new_tokens", "4")
    done = merge(tmp_path / "run", tmp_path / "merged", *few)
    assert done.returncode == 0, done.output
    receipt = read_receipt(tmp_path / "merged")
    (_, reloaded) = receipt["comparisons"]
    assert receipt["passed"] and reloaded["largest_logit_gap"] < reloaded["bound"]
    # The adapters do something, so that the wrong ones would not pass
    assert receipt["reference"]["largest_logit_gap_without_adapters"] > 10 * reloaded["bound"]


@pytest.mark.parametrize("base", ["auto", "16bit"])
def test_qlora_is_merged_into_either_base_and_both_gaps_are_shown(base, trained, tmp_path):
    done = merge(trained("qlora"), tmp_path / "merged", "--base", base)
    assert done.returncode == 0, done.output
    receipt = read_receipt(tmp_path / "merged")
    gaps = receipt["gaps_of_bases"]
    assert gaps["4bit"] < 1e-4 < 1e-2 < gaps["16bit"]
    assert receipt["merged_into"] == ("4bit" if base == "auto" else base)
    for name in gaps:
        assert f"Merged into the {name} base, the largest logit gap is" in done.output


@pytest.fixture
def copied(trained, tiny, tmp_path):
    """A copy of a run and of its base, both of which a test may change: (run, base)."""
    folder = tmp_path / "run"
    base = tmp_path / "base"
    shutil.copytree(trained("lora"), folder)
    shutil.copytree(tiny / "model", base)
    for name in ("adapter_config.json", "run.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace(str(tiny / "model"), str(base)))
    return folder, base


def refuse(folder, output):
    """Merge, and return the one line with which that ends."""
    done = merge(folder, output)
    lines = done.output.splitlines()
    assert done.returncode == 65 and len(lines) == 1 and lines[0].startswith("error: "), done.output
    assert not list(output.parent.glob("merged*"))
    return lines[0]


def test_another_base_than_that_of_the_run_is_refused(copied, tiny, tmp_path):
    folder, base = copied
    path = folder / "adapter_config.json"
    path.write_text(path.read_text().replace(str(base), str(tiny / "model")))
    assert "run.json says that the adapters were trained on" in refuse(folder, tmp_path / "merged")


def test_a_base_whose_weights_changed_since_the_run_is_refused(copied, tmp_path):
    folder, base = copied
    assert merge(folder, tmp_path / "good").returncode == 0
    weights = load_file(base / "model.safetensors")
    for weight in weights.values():
        weight *= 1.01
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    assert "are not those that the adapters were trained on" in refuse(folder, tmp_path / "merged")


def test_adapters_of_another_rank_are_refused(copied, tmp_path):
    folder, _ = copied
    path = folder / "adapter_config.json"
    path.write_text(path.read_text().replace('"r": 16', '"r": 8'))
    assert "another rank, or another base" in refuse(folder, tmp_path / "merged")


def test_a_merged_folder_answers_as_the_adapters_do(trained, tiny, tmp_path):
    folder = trained("dora")
    assert merge(folder, tmp_path / "merged").returncode == 0
    generate = [sys.executable, REPO / "scripts" / "generate.py"]
    words = ["--file", tiny / "data" / "test.jsonl", "--max_new_tokens", "8", "--output"]
    for name, model in (("adapters", folder), ("merged", tmp_path / "merged")):
        done = run(*generate, model, *words, tmp_path / f"{name}.jsonl")
        assert done.returncode == 0, done.output
    ours = (tmp_path / "merged.jsonl").read_text()
    assert ours == (tmp_path / "adapters.jsonl").read_text() and ours


def test_a_fault_in_a_merged_folder_ends_with_76(trained, tmp_path):
    merged = tmp_path / "merged"
    assert merge(trained("lora"), merged).returncode == 0
    config = json.loads((merged / "generation_config.json").read_text())
    config["eos_token_id"] = config["eos_token_id"][:1]
    (merged / "generation_config.json").write_text(json.dumps(config))
    done = merge(trained("lora"), merged, "--check")
    assert done.returncode == 76 and "Traceback" not in done.output, done.output
    assert "generation_config.json is not the file of receipt.json" in done.output
    (merged / "receipt.json").unlink()
    done = merge(trained("lora"), merged, "--check")
    assert done.returncode == 76 and "end tokens" in done.output, done.output
