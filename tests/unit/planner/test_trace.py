# SPDX-License-Identifier: Apache-2.0
"""What is traced: three layers stand for all, every layer where they differ, and other recipes."""

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig

import llama_dpo
import mistral_pretrain
import mixtral
import planner_jobs
from core.cli import parse
from planner import model as planned_model
from planner.engines import at_rest, peak_of
from planner.plan import Batch, Plan, first_rank
from planner.trace import profile_of

DEEP = planner_jobs.BASE | {"width": 128, "depth": 6, "vocab": 1000}
BATCH = Batch(2, 64, 128)
SHARDED = {"engine": "fsdp2", "ranks": 2, "shards": 2, "mixed_precision": "bf16"}


@pytest.fixture
def folder(tmp_path):
    planner_jobs.config_of(DEEP).save_pretrained(tmp_path)
    return tmp_path


SELECTIVE = ["--gradient_checkpointing", "selective"]
LORA = ["--use_peft", "--gradient_checkpointing", "--dtype", "bfloat16"]
JOBS = [
    ([], {}),
    (["--gradient_checkpointing"], {"mixed_precision": "bf16"}),
    (SELECTIVE, {"mixed_precision": "bf16"}),
    (LORA, SHARDED),
    ([*LORA, "--load_in_4bit"], {"mixed_precision": "bf16"}),
    ([*LORA, "--load_in_fp8"], SHARDED),
]


@pytest.mark.parametrize(("flags", "how"), JOBS)
def test_three_layers_stand_for_all(flags, how, folder, monkeypatch):
    plan = Plan(planner_jobs.training_arguments(folder, flags), **how)
    stretched = profile_of(plan, BATCH)
    monkeypatch.setattr(planned_model, "TRACED", 99)
    traced = profile_of(plan, BATCH)
    assert stretched.units == traced.units == 8
    assert at_rest(plan, stretched) == at_rest(plan, traced)
    assert peak_of(plan, stretched).peak == pytest.approx(peak_of(plan, traced).peak, rel=1e-3)


QLORA = ["--use_peft", "--load_in_4bit"]


@pytest.mark.parametrize("flags", [[], ["--use_peft"], QLORA, ["--use_peft", "--load_in_8bit"]])
def test_selective_recomputation_takes_what_it_keeps_more_than_full(flags, folder):
    batch = Batch(2, 512, 64)  # of which activations take most

    def planned(*more):
        plan = Plan(planner_jobs.training_arguments(folder, [*flags, *more]))
        return peak_of(plan, profile_of(plan, batch)).peak

    config = planner_jobs.config_of(DEEP)
    key_and_value = 2 * config.num_key_value_heads * config.head_dim
    # Query, attention, and what returns to the width of the model twice; the MLP's other products
    kept = 4 * config.hidden_size + key_and_value + 2 * config.intermediate_size
    if flags:
        kept += 7 * 16  # the first products of adapters, not the large second ones
    full = planned("--gradient_checkpointing")
    more = planned(*SELECTIVE) - full
    # Of one layer either has all
    of_layers = 4 * batch.lines * batch.length * kept * (config.num_hidden_layers - 1)
    assert more == pytest.approx(of_layers, rel=0.05)
    assert planned() > full + more


def test_every_layer_is_traced_where_they_differ(tmp_path):
    kinds = ["sliding_attention", "full_attention"] * 3
    shape = {"num_hidden_layers": 6, "layer_types": kinds, "vocab_size": 1000, "hidden_size": 128}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    AutoConfig.for_model("gemma3_text", head_dim=32, **shape, **sizes).save_pretrained(tmp_path)
    plan = Plan(planner_jobs.training_arguments(tmp_path))
    profile = profile_of(plan, BATCH)
    assert profile.units == 8
    assert [phase.unit for phase in profile.phases if not phase.is_backward] == list(range(8))
    with first_rank(plan) as layout, FakeTensorMode():
        assert planned_model.load(plan, layout)[1] == 0  # layers that are left out


RECIPES = [
    (llama_dpo, [], "llama", Batch(4, 64, 256)),
    (llama_dpo, ["--use_peft"], "llama", Batch(4, 64, 256)),
    (mistral_pretrain, [], "llama", Batch(2, 64, 128, is_packed=True)),
    (mixtral, [], "mixtral", BATCH),
]


@pytest.mark.parametrize(("recipe", "flags", "family", "batch"), RECIPES)
def test_the_step_of_other_recipes_is_traced(recipe, flags, family, batch, tmp_path):
    make = planner_jobs.mixture_of if family == "mixtral" else planner_jobs.config_of
    make(DEEP).save_pretrained(tmp_path)
    words = ["--model_name_or_path", str(tmp_path), "--max_logits_mib", "256", *flags]
    plan = Plan(parse(recipe.Arguments, words=words), mixed_precision="bf16")
    profile = profile_of(plan, batch)
    assert sum(phase.gradients for phase in profile.phases) == sum(
        weight.numel * weight.itemsize for weight in profile.weights if weight.trains
    )
    references = sum(phase.unit == 0 and not phase.is_backward for phase in profile.phases)
    assert references == (2 if recipe is llama_dpo and flags else 1)
