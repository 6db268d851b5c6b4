# SPDX-License-Identifier: Apache-2.0
"""The cells of the GPU proof are well formed, and all that the README promises is among them."""

import time

from gpu import launches
from gpu.catalog import CELLS, PROVING_CELLS
from gpu.cell import LONGEST, Setup
from launching import CONFIGS
from proof.jobs import expert_configs, mesh_configs


def test_cells_have_names_of_their_own_a_claim_and_a_limit():
    names = [cell.name for cell in CELLS]
    assert len(set(names)) == len(names)
    assert len(names) >= 40
    for cell in CELLS:
        assert cell.name.count(".") == 1 and len(cell.proves) > 20, cell.name
        assert 0 < cell.limit <= LONGEST == 300, cell.name


def test_the_most_valuable_come_first():
    topics = list(dict.fromkeys(cell.name.split(".")[0] for cell in CELLS))
    assert topics[:4] == ["micro", "strategies", "masks", "parity"]
    assert topics.index("resume") < topics.index("recipes") < topics.index("speed")


def test_every_function_of_a_cell_exists():
    for cell in CELLS:
        assert callable(cell.load()), cell.name


def test_no_two_cells_share_a_function():
    functions = [cell.function for cell in CELLS]
    assert len(set(functions)) == len(functions)


def test_every_yaml_is_trained_by_a_cell_or_says_why_not(tmp_path, monkeypatch):
    seen = []

    def train_all(setup, variants, data):
        seen.extend(variants)
        return []

    monkeypatch.setattr(launches, "train_all", train_all)
    monkeypatch.setattr(launches, "tiny_model", lambda setup: None)
    monkeypatch.setattr(launches, "require_compiler", lambda: None)
    setup = Setup("cuda", False, tmp_path, tmp_path, time.monotonic() + 99)
    for cell in CELLS:
        if cell.name.startswith("strategies."):
            cell.run(setup)
    needs_more_gpus = {"pp", *mesh_configs(), *expert_configs()}
    shipped = {path.stem for path in CONFIGS.glob("*.yaml")} - {"fsdp"} - needs_more_gpus
    assert {variant.config for variant in seen} == shipped
    left_out = {variant.name for variant in seen if variant.left_out}
    assert left_out == {
        "fsdp1_hybrid_shard",
        "fsdp2_hybrid_shard",
        "fsdp1_full_shard, QLoRA",
        "fsdp1_shard_grad_op, QLoRA",
        "fsdp1_no_shard, QLoRA",
    }


def test_the_tests_of_a_gpu_are_the_cells_that_prove_something():
    chosen = {cell.name for cell in PROVING_CELLS}
    expected = {
        "resume.optimizers",
        "quantized.bases",
        "parity.precisions",
        "recipes.bert",
        "masks.documents",
    }
    assert expected <= chosen
    assert not {name for name in chosen if name.startswith(("speed.", "planner.", "models."))}
