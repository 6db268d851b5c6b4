# SPDX-License-Identifier: Apache-2.0
"""What is planned for a save is what the recipes gather, and no more than an equal share."""

import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from components import state
from components.gathering import gather_shards
from components.pipeline_kinds import KINDS
from components.pipeline_stages import PartOfModel, cut_into_stages
from components.state import gather_state
from components.strategy import Strategy
from fakes import fake_accelerator
from planner.plan import Plan
from planner.recipe import parse_words
from planner.saving import bytes_to_join, saving_of, sizes_of_tensors
from planner_jobs import training_arguments

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4000,
}


def config(**more):
    return AutoConfig.for_model("llama", **SMALL | more)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tensors_are_those_that_are_gathered(tied, dtype):
    model = AutoModelForCausalLM.from_config(
        config(tie_word_embeddings=tied), dtype=getattr(torch, dtype)
    )
    optimizer = SimpleNamespace(optimizer=torch.optim.AdamW(model.parameters()))
    gathered = gather_state(fake_accelerator(), model, optimizer)
    plan = Plan(training_arguments(["--dtype", dtype]))
    planned = sizes_of_tensors(plan, config(tie_word_embeddings=tied))
    assert sorted(planned.values()) == sorted(tensor.nbytes for tensor in gathered.values())


def test_deepspeed_saves_fp32_whatever_the_dtype_of_the_model():
    in_fp32 = sizes_of_tensors(Plan(training_arguments([])), config())
    plan = Plan(training_arguments(["--dtype", "bfloat16"]), engine="zero", stage=2, ranks=4)
    assert sizes_of_tensors(plan, config()) == in_fp32


def test_adapters_are_saved_without_their_base():
    whole = saving_of(Plan(training_arguments([])), config()).whole
    assert saving_of(Plan(training_arguments(["--use_peft"])), config()).whole < whole / 10


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_a_rank_has_an_equal_share_and_at_most_one_tensor_more(ranks):
    plan = Plan(training_arguments([]), engine="fsdp2", ranks=ranks, shards=ranks)
    saving = saving_of(plan, config())
    assert saving.whole / ranks <= saving.share <= saving.whole / ranks + saving.largest
    assert saving.largest == 4000 * 128 * 4  # the embedding, in fp32
    assert saving.most == saving.share + 2 * saving.largest


def test_split_matrices_are_saved_whole():
    whole = sizes_of_tensors(Plan(training_arguments([])), config())
    assert sizes_of_tensors(Plan(training_arguments([]), ranks=2, tp=2), config()) == whole


def test_all_ranks_of_a_host_need_what_they_have_between_them():
    plan = Plan(training_arguments([]), engine="fsdp2", ranks=8, shards=8, machines=2)
    saving = saving_of(plan, config())
    assert saving.host <= 4 * saving.most
    assert saving.host >= saving.whole / 2 + 4 * 2 * saving.largest


# ---- On the GPU ----
class LiveBytes(TorchDispatchMode):
    """Counts the bytes of what ops allocate, and the most of them at a time."""

    def __init__(self):
        super().__init__()
        self.live = {}
        self.peak = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        output = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata)
                self.peak = max(self.peak, sum(self.live.values()))
        return output


@pytest.fixture
def four_ranks():
    """The first of four ranks, whose collective calls only allocate."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("mesh", "placements", "how"),
    [
        ((4,), [Shard(0)], {"engine": "fsdp2", "shards": 4}),
        ((4,), [Shard(1)], {"tp": 4}),
        ((2, 2), [Shard(0), Shard(1)], {"engine": "fsdp2", "shards": 2, "tp": 2}),
        (
            (2, 2),
            [_StridedShard(0, split_factor=2), Shard(0)],
            {"engine": "fsdp2", "shards": 2, "tp": 2},
        ),
    ],
)
def test_joining_shards_takes_no_more_than_planned(mesh, placements, how, four_ranks):
    plan = Plan(training_arguments([]), ranks=4, **how)
    saving = saving_of(plan, config())
    largest = saving.largest
    whole = torch.Size([4000, 128])
    shape = list(whole)
    for size, placement in zip(mesh, placements, strict=True):
        shape[placement.dim] //= size
    shard = DTensor.from_local(
        torch.zeros(shape),
        init_device_mesh("cpu", mesh),
        placements,
        shape=whole,
        stride=(128, 1),
    )
    with LiveBytes() as allocated:
        assert gather_shards(shard, owner=0).shape == whole
    beside_the_shard = allocated.peak - largest // 4
    assert largest <= beside_the_shard <= 1.001 * bytes_to_join(plan, saving)


@pytest.mark.parametrize("how", [{}, {"engine": "ddp"}, {"engine": "zero"}])
def test_what_each_rank_has_whole_is_not_joined(how):
    plan = Plan(training_arguments([]), ranks=2, **how)
    assert bytes_to_join(plan, saving_of(plan, config())) == 0


# ---- Pipelines ----
def shares_in_recipe(schedule, pp, ranks, config, monkeypatch):
    """The bytes that each rank of llama_pipeline.py owns of a checkpoint, without a launch."""
    kind = KINDS[schedule]
    stages = cut_into_stages(config.num_hidden_layers, pp * kind.stages_per_rank)
    accelerator = fake_accelerator(num_processes=ranks)
    monkeypatch.setattr(state.Strategy, "of", lambda _: Strategy(f"PP {pp}", pipeline=pp))
    of_ranks = []
    for place in range(pp):
        own = [stages[number] for number in kind.stages_of(place, pp)]
        model = PartOfModel(own).from_config(config)
        entries = list(
            state.trained_parts(accelerator, model, torch.optim.AdamW(model.parameters()))
        )
        of_ranks += [{entry.name: entry.nbytes for entry in entries}] * (ranks // pp)
    monkeypatch.setattr(state, "gather_object", lambda _: of_ranks)
    owners = state.owners_of(accelerator, entries)
    sizes = {name: nbytes for of_rank in of_ranks for name, nbytes in of_rank.items()}
    shares = [0] * ranks
    for name, owner in owners.items():
        shares[owner] += sizes[name]
    return shares


def pipelines(schedule, pp, ranks, machines=1):
    args = parse_words(["--pp_size", str(pp), "--pipeline_schedule", schedule], "llama_pipeline.py")
    return Plan(args, ranks=ranks, pp=pp, machines=machines)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize(("pp", "ranks"), [(4, 4), (2, 6)])
def test_what_a_stage_has_is_planned_for_its_own_ranks(schedule, pp, ranks, tied, monkeypatch):
    model = config(num_hidden_layers=8, tie_word_embeddings=tied)
    planned = saving_of(pipelines(schedule, pp, ranks, machines=ranks), model)
    shares = shares_in_recipe(schedule, pp, ranks, model, monkeypatch)
    assert planned.share == max(shares)
    assert planned.whole == sum(shares)
    assert planned.host == planned.most  # each host has one rank


def test_the_stages_at_the_ends_of_a_pipeline_have_the_largest_shares():
    """They have the embedding and the head beside their layers."""
    model = config(num_hidden_layers=8)
    saving = saving_of(pipelines("1f1b", 4, 4), model)
    assert saving.share > saving.whole / 4 + saving.largest
