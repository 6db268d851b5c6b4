# SPDX-License-Identifier: Apache-2.0
"""The planner's bytes of each rank: what rehearsals of every YAML measured, states and peaks."""

import json
from dataclasses import replace

import pytest
from transformers import AutoConfig

import planner_jobs
from launching import CONFIGS, REPO
from planner import yaml_files
from planner.closed_form import closed_form
from planner.errors import UnplannableError
from planner.ledger import both
from planner.plan import plan_of
from planner.ranks import Gathered, Replica
from planner.request import Batch
from planner.zero import Zero
from planner.zero3 import Zero3
from planner_jobs import training_arguments

SHAPE = {
    "hidden_size": 320,
    "intermediate_size": 640,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "num_hidden_layers": 2,
    "vocab_size": 320,
}
CONFIG = AutoConfig.for_model("llama", **SHAPE)
# What a rank of a rehearsal holds: the planner's categories for it
CATEGORIES = {
    "parameters": ("parameters", "adapters", "unsharded"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "master": ("master copies",),
}


TRACKED = planner_jobs.tracked_rows()
PARITY = json.loads((REPO / "results" / "parity.json").read_text()).values()
RUNS = [row for row in PARITY if row["group"] == "strategies"]
WEIGHTS = {
    "full": [],
    "LoRA": ["--use_peft"],
    "int8 LoRA": ["--use_peft", "--load_in_8bit"],
    "nf4 LoRA": ["--use_peft", "--load_in_4bit", "--bnb_4bit_use_double_quant"],
}


def plan_of_run(row):
    config = yaml_files.read(CONFIGS / f"{row['config']}.yaml")
    machines = 1
    if row["config"] == "fsdp1_hybrid_shard":  # whose machines the rehearsal simulates
        machines = 2
    args = training_arguments(WEIGHTS[row["weights"]])
    return plan_of(args, config, row["ranks"], machines, "no")


def held_at_the_step(plan, config, monkeypatch):
    """{category: bytes} of device and host when the backward pass is done."""
    held = {}

    def step(strategy):
        held.update(strategy.autograd.ledger.held)

    for strategy in (Replica, Gathered, Zero, Zero3):
        monkeypatch.setattr(strategy, "step", step)
    _, host = closed_form(plan, config, Batch(3, 8, 8), planner_jobs.BUILD)
    return both(held, host)


def name_of_run(row):
    return f"{row['config']}-{row['ranks']}-{row['weights'].replace(' ', '-')}"


@pytest.mark.parametrize("row", RUNS, ids=name_of_run)
def test_a_rank_holds_what_the_planner_says(row, monkeypatch):
    if row["verdict"] == "refused":
        with pytest.raises(UnplannableError):
            plan_of_run(row)
        return
    planned = held_at_the_step(plan_of_run(row), CONFIG, monkeypatch)
    for name, categories in CATEGORIES.items():
        if name in row["held"]:
            fullest = max(size for size, _ in row["held"][name]["ranks"])
            sizes = [planned.get(category, 0) for category in categories]
            assert sum(sizes) == fullest, name
    assert bool(planned.get("master copies")) == ("master" in row["held"])


def name_of_tracked(row):
    words = [row["config"], *row.get("sizes", []), row["job"].replace(" ", "-")]
    if "ep" in row:
        words.append(f"ep_size={row['ep']}")
    if "pp" in row:
        words += [f"pp_size={row['pp']}", row["schedule"], *["sharded"] * row["shards_stages"]]
    return "-".join([*words, str(row["ranks"])])


MESHES = [row for row in TRACKED if "sizes" in row and "pp" not in row]
PIPELINES = [row for row in TRACKED if "pp" in row]


@pytest.mark.parametrize("row", MESHES, ids=name_of_tracked)
def test_a_rank_of_a_mesh_holds_what_the_planner_says(row, monkeypatch):
    model = planner_jobs.shared_model(row)
    planned = held_at_the_step(planner_jobs.plan_of_row(row), model, monkeypatch)
    for name, categories in CATEGORIES.items():
        sizes = [planned.get(category, 0) for category in categories]
        assert sum(sizes) == row["held"].get(name, 0), name


@pytest.mark.parametrize("row", PIPELINES, ids=name_of_tracked)
def test_a_rank_of_a_pipeline_holds_what_the_planner_says(row, monkeypatch):
    held = {}  # by the ranks of the pipeline, each of which takes steps of its own

    def step(strategy):
        held[strategy] = dict(strategy.autograd.ledger.held)

    for strategy in (Replica, Gathered):
        monkeypatch.setattr(strategy, "step", step)
    planner_jobs.planned_places(row)
    assert len(held) == row["pp"]
    for planned, measured in zip(held.values(), row["held"], strict=True):
        for name, categories in CATEGORIES.items():
            sizes = [planned.get(category, 0) for category in categories]
            assert sum(sizes) == measured.get(name, 0), name


def test_more_tokens_at_the_experts_of_a_rank_take_more_activations_and_nothing_else():
    """A token is sent to two of the experts, and each layer has its own number of arrivals."""
    row = {"config": "ep", "job": "plain", "ranks": 2, "sizes": [], "ep": 2, "supervised": 496}
    batch = planner_jobs.batch_of_row(row)
    sent = 2 * batch.sequences * batch.length
    even, same, more, most = (
        planner_jobs.planned_rank(row, replace(batch, arrived=arrived))
        for arrived in ((), (sent, sent), (sent, 2 * sent), (2 * sent, 2 * sent))
    )
    assert even == same
    grown = [sizes["activations"] for sizes in (even, more, most)]
    assert grown == sorted(set(grown))
    others = [{**sizes, "activations": 0} for sizes in (even, more, most)]
    assert others[0] == others[1] == others[2]


@pytest.mark.parametrize("row", TRACKED[::4], ids=name_of_tracked)
def test_the_peak_is_that_of_live_tensors(row):
    """Every fourth that was measured; tests/launch/test_planner_trace.py compares all."""
    compared = planner_jobs.compare(row)
    assert abs(compared["error"]) < 0.05
    assert abs(compared["beside_bucket"]) < 0.05


def test_every_mesh_that_can_be_traced_was_and_its_trace_is_close():
    """DeepSpeed cannot be traced. Like the planner, a trace knows no routers."""
    traced = [row for row in MESHES if "traced" in row]
    assert [row for row in MESHES if row["config"] != "deepspeed_ulysses"] == traced
    for row in traced:
        if "ep" in row:
            even = row.get("even", row["error"])
            assert 1 + row["traced"] == pytest.approx(1 + even, rel=0.01)
        else:
            assert abs(row["traced"]) < 0.001
