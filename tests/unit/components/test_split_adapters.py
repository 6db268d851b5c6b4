# SPDX-License-Identifier: Apache-2.0
"""What adapters of split matrices draw, which splits they cannot follow, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

import llama
import mixtral
from components.cli import parse_arguments
from components.mesh_checks import find_misfits_of_tp
from components.split_adapters import DropoutOfPart, split_adapters_of
from components.strategy import Strategy
from fakes import fake_accelerator
from rehearsal.step_hooks import planned_dimension

DDP = Strategy("DDP")
PLAN = {"model.layers.*.q_proj": "colwise", "model.layers.*.o_proj": "rowwise"}


def test_each_part_drops_what_the_whole_drops():
    features = torch.randn(3, 5, 8)
    torch.manual_seed(1)
    whole = torch.nn.Dropout(0.5)(features)
    parts = []
    for rank, part in enumerate(features.chunk(2, -1)):
        torch.manual_seed(1)
        parts.append(DropoutOfPart(0.5, rank, 2)(part))
    assert torch.equal(torch.cat(parts, -1), whole)
    assert (whole == 0).any()


def test_evaluation_drops_nothing():
    features = torch.randn(3, 4)
    assert DropoutOfPart(0.5, 0, 2).eval()(features) is features


def test_a_split_that_adapters_cannot_follow_is_refused(capsys):
    style = ALL_PARALLEL_STYLES["mla_kv_a_proj"]
    with pytest.raises(SystemExit) as ended:
        split_adapters_of(SimpleNamespace(), "layers.0.kv_a_proj", style, mesh=None)
    assert ended.value.code == 64
    assert "splits layers.0.kv_a_proj in a way that adapters cannot" in capsys.readouterr().err


@pytest.mark.parametrize("style", [None, ALL_PARALLEL_STYLES["embedding_rowwise"]])
def test_adapters_of_whole_outputs_stay_whole(style):
    layer = torch.nn.ModuleDict({"lora_A": torch.nn.Linear(2, 1)})
    before = dict(layer.named_parameters())
    split_adapters_of(layer, "embed_tokens", style, mesh=None)
    assert dict(layer.named_parameters()) == before


@pytest.mark.parametrize(
    ("recipe", "words", "says"),
    [
        (llama, "--use_peft", None),
        (llama, "--use_peft --use_rslora --lora_dropout 0.1 --modules_to_save lm_head", None),
        (llama, "--use_peft --use_dora", "--use_dora takes norms over whole matrices"),
        (llama, "--use_peft --load_in_8bit", "a quantized base cannot be split"),
        (llama, "--use_peft --load_in_4bit", "a quantized base cannot be split"),
        (mixtral, "--use_peft", "--lora_target_parameters: adapters of experts cannot"),
        (mixtral, "--use_peft --lora_target_parameters", None),
    ],
)
def test_what_cannot_be_split_is_refused_in_one_line(recipe, words, says):
    args = parse_arguments(recipe.Arguments, words=words.split())
    problems = list(find_misfits_of_tp(args, fake_accelerator(), DDP))
    assert len(problems) == (says is not None)
    assert all(problem.startswith(says) and "\n" not in problem for problem in problems)


@pytest.mark.parametrize(
    ("name", "dimension"),
    [
        ("q_proj.base_layer.weight", -2),
        ("q_proj.lora_A.default.weight", None),
        ("q_proj.lora_B.default.weight", -2),
        ("o_proj.base_layer.weight", -1),
        ("o_proj.lora_A.default.weight", -1),
        ("o_proj.lora_B.default.weight", None),
        ("norm.weight", None),
    ],
)
def test_the_shard_report_promises_the_split_half_of_an_adapter(name, dimension):
    model = SimpleNamespace(tp_size=2, tp_plan=PLAN)
    found = planned_dimension(model, f"base_model.model.model.layers.0.{name}")
    assert found == dimension
