# SPDX-License-Identifier: Apache-2.0
"""A pipeline gives the loss and the gradients of the whole model, whatever its schedule.

Here one rank has two stages; tests/launch/test_cells.py has several ranks.
"""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from datasets import Dataset
from transformers import AutoModelForCausalLM

import llama_pipeline
from core.batches import TokenCollator
from core.cli import parse
from extras.pipeline import workarounds
from extras.pipeline.batches import PipelineCollator, micro_batches_of
from extras.pipeline.layout import make_layout
from extras.pipeline.pipeline import Pipeline
from extras.pipeline.stages import cut_into_stages, keep_only
from fakes import small_llama
from harm import shows_harm_without

LENGTHS = [5, 9, 3, 7]


@pytest.fixture
def accelerator(tmp_path, monkeypatch):
    """The only rank of a process group."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Accelerator(cpu=True)
    dist.destroy_process_group()


@pytest.fixture
def whole():
    torch.manual_seed(0)
    config = small_llama(num_hidden_layers=3, tie_word_embeddings=True)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


@pytest.fixture
def batches():
    """Two batches of different widths, the second with rows of padding."""
    rows = []
    for number, length in enumerate(LENGTHS):
        ids = [(7 * number + 3 * place) % 60 + 1 for place in range(length)]
        rows.append({"input_ids": ids, "labels": [-100, *ids[1:]], "row": number + 1})
    source = Dataset.from_list(rows)
    collator = PipelineCollator(TokenCollator(0), num_rows=4, num_microbatches=2)
    return [collator(source, [[0], [1], [2], [3]]), collator(source, [[0], [2]])]


def make_pipeline(accelerator, whole, schedule):
    words = ["--pipeline_schedule", schedule]
    args = parse(llama_pipeline.Arguments, words=words)
    part = copy.deepcopy(whole)
    stages = cut_into_stages(3, 2)
    keep_only(part, stages)
    return Pipeline(args, layout_of_one_rank(args, accelerator), stages, part)


def layout_of_one_rank(args, accelerator):
    args.pp_size = 1
    return make_layout(args, accelerator)


def test_packed_rows_keep_their_positions_in_each_micro_batch():
    rows = []
    for number, ids in enumerate(([5, 6, 7], [8, 9, 10, 11], [12, 13]), 1):
        rows.append({"input_ids": ids, "labels": ids, "row": number})
    collate = PipelineCollator(TokenCollator(0, width=8), num_rows=2, num_microbatches=2)
    first, second = micro_batches_of(collate(Dataset.from_list(rows), [[0, 1], [2]]))
    assert first["inputs"]["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert second["inputs"]["position_ids"].shape == (1, 8)


@shows_harm_without("run_only_forward")
def test_an_evaluation_under_zbv_ends(cured, accelerator, whole, batches, monkeypatch):
    if not cured:
        monkeypatch.setattr(workarounds, "run_only_forward", lambda schedule: None)
    pipeline = make_pipeline(accelerator, whole, "zbv")
    failure = None
    try:
        pipeline.evaluate(batches[0])
    except AssertionError as error:
        failure = str(error)
    assert (failure is None) == cured, failure


@shows_harm_without("keep_gradients_of_shards")
def test_the_gradients_of_shards_outlive_a_new_schedule(
    cured, accelerator, whole, batches, monkeypatch
):
    if not cured:
        monkeypatch.setattr(workarounds, "keep_gradients_of_shards", lambda stage: None)
    words = ["--pipeline_schedule", "interleaved", "--shard_stages"]
    args = parse(llama_pipeline.Arguments, words=words)
    layout = layout_of_one_rank(args, accelerator)
    stages = cut_into_stages(3, 2)
    # No two stages of a rank can have shards of one weight
    whole.lm_head.weight = torch.nn.Parameter(whole.lm_head.weight.detach().clone())
    whole.all_tied_weights_keys = {}
    keep_only(whole, stages)
    pipeline = Pipeline(args, layout, stages, whole)
    for stage in pipeline._stages.values():
        torch.distributed.fsdp.fully_shard(stage, mesh=layout.over_pipelines)
    norms = []
    for batch in batches:  # They have two widths, for which two schedules are made
        pipeline.step(batch, torch.tensor(1))
        norms.append(pipeline.clip_gradients(math.inf))
    pipeline.model.zero_grad()
    pipeline.step(batches[1], torch.tensor(1))
    has_both = not torch.isclose(norms[1], pipeline.clip_gradients(math.inf))
    assert has_both == cured
