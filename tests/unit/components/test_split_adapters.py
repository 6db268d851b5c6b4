# SPDX-License-Identifier: Apache-2.0
"""What adapters of split matrices draw, which splits they cannot follow, and what is refused."""

import pytest
import torch
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

import llama
import mixtral
from components.mesh_checks import find_misfits_of_tp
from components.split_adapters import DropoutOfPart, split_adapters_of
from components.strategy import Strategy
from core.cli import parse
from fakes import fake_accelerator

DDP = Strategy("DDP")


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


@pytest.mark.parametrize("style", [None, ALL_PARALLEL_STYLES["embedding_rowwise"]])
def test_adapters_of_whole_outputs_stay_whole(style):
    layer = torch.nn.ModuleDict({"lora_A": torch.nn.Linear(2, 1)})
    before = dict(layer.named_parameters())
    split_adapters_of(layer, "embed_tokens", style, mesh=None)
    assert dict(layer.named_parameters()) == before


@pytest.mark.parametrize(
    ("recipe", "words", "word"),
    [
        (llama, "--use_peft --use_rslora --lora_dropout 0.1 --modules_to_save lm_head", ""),
        (llama, "--use_peft --use_dora", "--use_dora"),  # takes norms over whole matrices
        (llama, "--use_peft --load_in_8bit", "quantized"),
        (llama, "--use_peft --load_in_4bit", "quantized"),
        (mixtral, "--use_peft", "--lora_target_parameters"),
        (mixtral, "--use_peft --lora_target_parameters", ""),
    ],
)
def test_what_cannot_be_split_is_refused_in_one_line(recipe, words, word):
    args = parse(recipe.Arguments, words=words.split())
    problems = list(find_misfits_of_tp(args, fake_accelerator(), Strategy("DDP")))
    assert len(problems) == bool(word) and all(word in problem for problem in problems)
