# SPDX-License-Identifier: Apache-2.0
"""A folder has all of its weights, or none that `from_pretrained` finds.

tests/launch/test_shards.py has several ranks.
"""

import json
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    LlamaConfig,
    NomicBertConfig,
)

from components import long_calls, shards
from components.owners import Entry
from components.shards import group_entries, publish_result, write_files, write_shards
from fakes import fake_accelerator, mixture_of_two
from ranks import on_ranks

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 16,
}


def nothing(folder):
    """What is written besides the weights."""


def written(folder, number, **shares):
    """Have owners write their shares of one tensor each; return why it failed, or None."""
    shards.stage_result(folder / shards.STAGING)
    files = shards.names_of_files(len(shares))
    reports = []
    for file, (name, value) in zip(files, shares.items(), strict=True):
        share = {name: torch.full((number,), float(value))}
        reports.append(write_files(folder / shards.STAGING, {file: [name]}, share))
    return publish_result(folder, reports, nothing)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_an_index_says_where_each_tensor_is(tmp_path):
    assert written(tmp_path, 3, a=1, b=2) is None
    assert names_in(tmp_path) == [*SHARDS, shards.INDEX]
    index = json.loads((tmp_path / shards.INDEX).read_text())
    assert index["weight_map"] == {"a": SHARDS[0], "b": SHARDS[1]}
    assert index["metadata"] == {"total_parameters": 6, "total_size": 24}


def test_nothing_of_an_earlier_result_is_left_beside_a_new_one(tmp_path):
    """from_pretrained prefers model.safetensors to an index."""
    assert written(tmp_path, 3, a=1) is None
    assert names_in(tmp_path) == [shards.SINGLE]
    assert written(tmp_path, 3, a=2, b=3) is None
    assert names_in(tmp_path) == [*SHARDS, shards.INDEX]
    assert written(tmp_path, 3, a=4) is None
    assert names_in(tmp_path) == [shards.SINGLE]
    assert load_file(tmp_path / shards.SINGLE)["a"].tolist() == [4, 4, 4]


def test_if_an_owner_cannot_write_the_earlier_result_is_unchanged(tmp_path):
    assert written(tmp_path, 3, a=1) is None
    before = (tmp_path / shards.SINGLE).read_bytes()
    shards.stage_result(tmp_path / shards.STAGING)
    share = {"b": torch.ones(1)}
    report = write_files(tmp_path / "no folder", {shards.SINGLE: ["b"]}, share)
    assert "No such file" in publish_result(tmp_path, [report], nothing)
    assert names_in(tmp_path) == [shards.SINGLE]
    assert (tmp_path / shards.SINGLE).read_bytes() == before


def with_rest(folder, write_rest):
    """Have an owner write a tensor of ones, and then the rest; return why it failed, or None."""
    shards.stage_result(folder / shards.STAGING)
    report = write_files(folder / shards.STAGING, {shards.SINGLE: ["a"]}, {"a": torch.ones(1)})
    return publish_result(folder, [report], write_rest)


def test_the_rest_is_written_before_an_earlier_result_is_removed(tmp_path):
    assert written(tmp_path, 3, a=1, b=1) is None
    (tmp_path / "config.json").write_text("earlier")
    found = []

    def write_rest(folder):
        (folder / "config.json").write_text("new")
        (folder / "templates").mkdir()
        (folder / "templates" / "tool.jinja").write_text("new")
        found.extend(names_in(tmp_path))
        found.append((tmp_path / "config.json").read_text())

    for _ in range(2):  # Also over a folder that has the same folder in it
        assert with_rest(tmp_path, write_rest) is None
        assert names_in(tmp_path) == ["config.json", shards.SINGLE, "templates"]
        assert (tmp_path / "config.json").read_text() == "new"
        assert (tmp_path / "templates" / "tool.jinja").read_text() == "new"
    assert found[:6] == ["config.json", *SHARDS, shards.INDEX, shards.STAGING, "earlier"]


@pytest.mark.parametrize("kind", [OSError, Exception])
def test_if_the_rest_cannot_be_written_the_earlier_result_is_unchanged(kind, tmp_path):
    """On a full disk the tokenizers package raises a plain Exception."""
    assert written(tmp_path, 3, a=1, b=2) is None
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(folder):
        (folder / "config.json").write_text("new")
        raise kind("No space left on device (os error 28)")

    assert "No space left" in with_rest(tmp_path, fail)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_writing_may_take_longer_than_a_collective_call(tmp_path):
    limit = 2  # seconds

    def write():
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit))
        long_calls.SECONDS_BETWEEN_WORDS = limit / 8
        accelerator = Accelerator()
        rank = accelerator.process_index
        if rank == 1:
            shards.save_file = after_seconds(3 * limit, shards.save_file)
        return write_shards(accelerator, tmp_path, {f"of {rank}": torch.ones(2)}, nothing)

    assert on_ranks(write, 2) == [None, None]
    assert names_in(tmp_path) == [*SHARDS, shards.INDEX]


def after_seconds(seconds, function):
    """The function, called so much later."""

    def wait_and_call(*arguments):
        time.sleep(seconds)
        return function(*arguments)

    return wait_and_call


def test_a_large_share_is_cut_into_files_as_transformers_does(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "LARGEST_FILE", 100)
    share = {name: torch.ones(20) for name in "abc"}
    assert write_shards(fake_accelerator(), tmp_path, share, nothing) is None
    assert sum(name.endswith("-of-00003.safetensors") for name in names_in(tmp_path)) == 3


def test_a_folder_that_cannot_be_made_is_a_problem_and_not_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    problem = write_shards(fake_accelerator(), tmp_path / "file", {}, nothing)
    assert "Not a directory" in problem


# ---- Who owns what ----
@pytest.mark.parametrize(("buffers", "owner"), [([], 1), (["norm.mean"], 0)])
def test_a_group_with_a_buffer_is_written_by_the_first_rank(buffers, owner, monkeypatch):
    """Each rank has statistics of its own rows, and a checkpoint has those of rank 0."""
    groups = {}
    for name in ("matrix", "norm.mean"):
        groups[name] = [Entry(name, shards.SMALLEST_SHARE, lambda owner: torch.ones(1))]
    monkeypatch.setattr(shards, "gather_object", lambda of_rank: [*of_rank, *of_rank])
    owners = shards.owners_of_groups(fake_accelerator(num_processes=2), groups, buffers)
    assert owners == {"matrix": 0, "norm.mean": owner}


# ---- What belongs together ----
def groups_of(model):
    """The names of a model by what must have the same owner."""
    model._weight_conversions = None  # as after from_config
    entries = [Entry(name, 1, lambda owner: torch.ones(1)) for name in model.state_dict()]
    groups = group_entries(model, entries)
    return {group: [entry.name for entry in entries] for group, entries in groups.items()}


@pytest.mark.parametrize("config", [LlamaConfig(**SIZES), mixture_of_two()])
def test_a_weight_stands_alone_if_no_tensor_in_the_files_needs_another_one(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert all(names == [group] for group, names in groups_of(model).items())


def test_weights_that_files_join_stay_together_by_layers():
    with torch.device("meta"):
        model = AutoModelForMaskedLM.from_config(NomicBertConfig(**SIZES))
    groups = groups_of(model)
    assert len(groups) == 3  # two layers, and the rest
    assert sum(map(len, groups.values())) == len(model.state_dict())
    (first,) = [names for group, names in groups.items() if group.endswith(".0.")]
    assert {name.rpartition("self_attn.")[2] for name in first} >= {
        "q_proj.weight",
        "k_proj.weight",
        "v_proj.weight",
    }


def test_what_transformers_does_not_save_is_left_out():
    entries = [Entry(name, 1, lambda owner: torch.ones(1)) for name in ("kept", "ignored")]
    model = SimpleNamespace(_keys_to_ignore_on_save=["ignored"], _weight_conversions=[])
    assert list(group_entries(model, entries)) == ["kept"]
