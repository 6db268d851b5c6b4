"""The planner's bytes of each rank: what rehearsals of every YAML measured (results/), states and peaks."""

import json

import pytest
from transformers import AutoConfig

import track_ranks
from components.config_files import load
from components.config_reading import as_read
from launching import CONFIGS, REPO
from memory_plan import Batch, closed_form, plan_of
from memory_ranks import Gathered, Whole
from memory_zero import Zero, Zero3
from model_shapes import Unplannable
from proof import jobs
from validate_planner import recipe_arguments

SHAPE = {
    "hidden_size": 320,
    "intermediate_size": 640,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "num_hidden_layers": 2,
    "vocab_size": 320,
}
TRACKED = json.loads((REPO / "results" / "planner_ranks.json").read_text())["rows"]
RUNS = [
    row
    for row in json.loads((REPO / "results" / "parity.json").read_text())["rows"]
    if row["group"] == "strategies"
]
CLASSES = {
    "parameters": ("parameters", "adapters", "unsharded"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "master": ("master copies",),
}


def plan_of_run(row):
    read = as_read(load(str(CONFIGS / f"{row['config']}.yaml")).content)
    machines = 2 if row["config"] == "fsdp1_hybrid_shard" else 1  # which the rehearsal simulates
    return plan_of(
        recipe_arguments(jobs.WEIGHTS[row["weights"]]), read, row["ranks"], machines, "no"
    )


def held_at_the_step(plan, monkeypatch):
    """{category: bytes} of device and host when the backward pass is done."""
    found = {}
    for strategy in (Whole, Gathered, Zero, Zero3):
        monkeypatch.setattr(strategy, "step", lambda self: found.update(self.ag.ledger.held))
    _, host = closed_form(plan, AutoConfig.for_model("llama", **SHAPE), Batch(3, 8, 8))
    return {name: found.get(name, 0) + host.get(name, 0) for name in {**found, **host}}


def name_of(row):
    return f"{row['config']}-{row['ranks']}-{row['weights'].replace(' ', '-')}"


@pytest.mark.parametrize("row", RUNS, ids=name_of)
def test_a_rank_holds_what_the_planner_says(row, monkeypatch):
    if row["verdict"] == "refused":
        with pytest.raises(Unplannable):
            plan_of_run(row)
        return
    planned = held_at_the_step(plan_of_run(row), monkeypatch)
    for name, categories in CLASSES.items():
        if name in row["held"]:
            measured = max(size for size, _ in row["held"][name]["ranks"])
            assert sum(planned.get(category, 0) for category in categories) == measured, name
    assert bool(planned.get("master copies")) == ("master" in row["held"])


@pytest.mark.parametrize(
    "row", TRACKED, ids=lambda row: f"{row['config']}-{row['job'].replace(' ', '-')}"
)
def test_the_peak_is_that_of_live_tensors(row):
    """Measured by scripts/track_ranks.py; the tests of tests/launch measure some of them again."""
    compared = track_ranks.compare(row)
    assert abs(compared["error"]) < 0.05 and abs(compared["beside_bucket"]) < 0.05


def test_every_yaml_was_tracked():
    assert {row["config"] for row in TRACKED} == set(jobs.configs())
