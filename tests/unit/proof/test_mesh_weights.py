# SPDX-License-Identifier: Apache-2.0
"""The table of meshes and weights has each pair, and says what the recipes and their job say."""

import pytest

from paths import CONFIGS, OF_PIPELINES
from proof.jobs import WEIGHTS, Run, all_runs, expert_configs, is_refused, mesh_configs
from proof.mesh_weights import (
    EXPERTS,
    KINDS,
    TASKS,
    has_plan,
    kinds_by_recipe,
    pair_of,
    refusals_by_pair,
    takes_a_model_with_a_plan,
)
from publish import meshes


@pytest.fixture(scope="module")
def pairs():
    return refusals_by_pair()


def test_no_pair_is_left_out(pairs):
    shipped = {path.stem for path in CONFIGS.glob("*.yaml")}
    ends = tuple(f"_{end}" for end in meshes.ENDINGS)
    of_meshes = {name for name in shipped if name in meshes.ENDINGS or name.endswith(ends)}
    assert set(pairs) == of_meshes
    assert all(tuple(refusals) == KINDS for refusals in pairs.values())
    assert KINDS == (*WEIGHTS, EXPERTS)


def test_full_training_works_under_each_mesh(pairs):
    assert {config: refusals["full"] for config, refusals in pairs.items()} == dict.fromkeys(
        pairs, ""
    )


def test_a_pair_is_refused_exactly_if_the_job_says_so(pairs):
    for config in mesh_configs():
        for kind in WEIGHTS:
            refused = bool(pairs[config][kind])
            assert refused == is_refused(Run("meshes", config, weights=kind)), (config, kind)


def test_parity_runs_each_pair_that_is_not_refused(pairs):
    taken = {
        (config, kind)
        for config, refusals in pairs.items()
        for kind, reason in refusals.items()
        if not reason
    }
    runs = [run for run in all_runs() if run.group == "meshes" and not is_refused(run)]
    assert {pair_of(run) for run in runs if run.config != "single"} == taken


def test_each_refusal_is_one_line_with_a_fix(pairs):
    for config in set(pairs) - {*expert_configs(), OF_PIPELINES.stem}:
        for reason in filter(None, pairs[config].values()):
            assert "\n" not in reason
            assert ": " in reason


def test_pipelines_train_all_weights_only(pairs):
    adapters = {pairs[OF_PIPELINES.stem][kind] for kind in KINDS if kind != "full"}
    assert len(adapters) == 1
    assert "this recipe trains all weights" in adapters.pop()


def test_a_recipe_without_a_flag_is_not_asked_about_it(pairs):
    assert pairs["ep"]["int8 LoRA"] == "mixtral.py has no --load_in_8bit"


def test_the_recipes_and_their_plans_are_those_of_transformers():
    kinds = kinds_by_recipe()
    assert set(kinds["llama"]) == {"tp", "cp", "sp"}
    assert "ep" in kinds["mixtral"]
    assert [has_plan(recipe) for recipe in ("llama_dpo", "bert_ner")] == [True, False]


def test_only_classifiers_of_text_take_a_model_with_a_plan():
    taken = {recipe: takes_a_model_with_a_plan(recipe) for recipe in TASKS}
    assert taken == {"t5": False, "bert": True, "bert_ner": True, "vit": False}


def test_the_table_numbers_each_reason_once(pairs, monkeypatch):
    refused = dict.fromkeys(KINDS, "") | {"LoRA": "no adapters: leave them out"}
    monkeypatch.setattr(
        "proof.mesh_weights.refusals_by_pair", lambda: {"fsdp2_tp": refused, "tp": refused}
    )
    text = meshes.mesh_weights_block({})
    assert text.count("no (1)") == 2
    assert text.index("`tp.yaml`") < text.index("`fsdp2_tp.yaml`")
    assert text.endswith("\n\n1. `no adapters: leave them out`")
