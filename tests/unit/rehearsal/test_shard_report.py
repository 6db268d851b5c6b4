# SPDX-License-Identifier: Apache-2.0
"""The shard report calls nothing as promised that is not: planted measurements of a small model."""

import copy

import pytest

from config_strategy import read, strategy_of
from launching import CONFIGS
from rehearsal.shard_report import judge, table

WHOLE = [[20_000, 100, True]] * 16  # (elements, rows, whether it is trained) of each tensor
ELEMENTS = 320_000
STATES = 2  # tensors of optimizer state per parameter
CLASSES = ("parameters", "gradients", "optimizer")
SPLIT = {
    "single": (),
    "ddp": (),
    "fsdp1_no_shard": (),
    "deepspeed_zero1": CLASSES[2:],
    "deepspeed_zero2": CLASSES[1:],
    "deepspeed_zero3": CLASSES,
    "deepspeed_zero3_offload": CLASSES,
    "fsdp2_full_shard": CLASSES,
    "fsdp2_cpu_offload": CLASSES,
}
OFFLOADED = {
    "fsdp2_cpu_offload": CLASSES,
    "deepspeed_zero3_offload": ("parameters", "optimizer"),
}


def held_as_promised(config, name, ranks):
    """What a rank holds of one class on a GPU if the YAML does what it says."""
    elements = ELEMENTS
    if name == "optimizer":
        elements *= STATES
    if name in SPLIT[config]:
        elements //= ranks
    is_offloaded = name in OFFLOADED.get(config, ())
    return {
        "elements": elements,
        "bytes": 4 * elements,
        "dtypes": ["float32"],
        "devices": ["cpu" if is_offloaded else "cuda"],
    }


def measurements(config, ranks=4):
    """What each of the ranks holds, and what the YAML asks for."""
    facts = strategy_of(read(CONFIGS / f"{config}.yaml"))
    measured = {
        "tensors": WHOLE,
        "shards": None,
        "place": None,
        "state_tensors_per_parameter": STATES,
        "master": {"elements": 0, "bytes": 0},
    }
    for name in CLASSES:
        measured[name] = held_as_promised(config, name, ranks)
    return [copy.deepcopy(measured) for _ in range(ranks)], facts


def verdicts(measured, facts):
    """The verdict of each class on the last rank."""
    rows = judge(measured, facts, 2)
    return {row["class"]: row["verdict"] for row in rows if row["rank"] == len(measured) - 1}


@pytest.mark.parametrize("config", SPLIT)
def test_what_is_promised_is_ok(config):
    measured, facts = measurements(config, 1 if config == "single" else 4)
    assert set(verdicts(measured, facts).values()) == {"ok"}


@pytest.mark.parametrize("factor", [0.5, 2, 4])
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("config", SPLIT)
def test_a_rank_that_holds_more_is_found_and_one_with_fewer_parameters(config, name, factor):
    measured, facts = measurements(config, 1 if config == "single" else 4)
    held = measured[-1][name]
    held["elements"] = int(held["elements"] * factor)
    # Less of the rest is no fault: an optimizer may keep less of some weights, and at the step only
    # its own share of the gradients is left to a rank of ZeRO-1
    is_allowed = factor < 1 and name != "parameters"
    assert verdicts(measured, facts)[name] == ("ok, less" if is_allowed else "NOT AS PROMISED")


def test_FSDP2_leaves_a_tensor_of_one_row_whole_on_one_rank():
    measured, facts = measurements("fsdp2_full_shard", ranks=2)
    for found, more in zip(measured, (1_000, 0), strict=True):
        found["tensors"] = [*WHOLE, [1_000, 1, True]]
        found["parameters"]["elements"] += more
        found["parameters"]["bytes"] += 4 * more
    rows = [row for row in judge(measured, facts, 1) if row["class"] == "parameters"]
    assert [row["verdict"] for row in rows] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("config", "name", "devices"),
    [
        ("fsdp2_cpu_offload", "parameters", ["cuda"]),
        ("fsdp2_cpu_offload", "parameters", ["cpu", "cuda"]),
        ("fsdp2_cpu_offload", "optimizer", ["cuda"]),
        ("deepspeed_zero3_offload", "parameters", ["cuda"]),
        ("deepspeed_zero3_offload", "optimizer", ["cpu", "cuda"]),
    ],
)
def test_offloaded_state_that_stays_on_the_gpu_is_found(config, name, devices):
    measured, facts = measurements(config)
    measured[-1][name]["devices"] = devices
    assert verdicts(measured, facts)[name] == "NOT AS PROMISED"


def test_a_second_copy_of_what_is_not_offloaded_is_found():
    measured, facts = measurements("deepspeed_zero2")
    for found in measured:
        found |= {"tensors": [*WHOLE, [100, 1, True]], "persistence_threshold": 100}
        found["parameters"] |= {"elements": ELEMENTS + 100, "devices": ["cuda"]}
    assert verdicts(measured, facts)["parameters"] == "ok"
    measured[-1]["parameters"] |= {"elements": 2 * ELEMENTS, "devices": ["cpu", "cuda"]}
    assert verdicts(measured, facts)["parameters"] == "NOT AS PROMISED"


def measured_pipeline(shards):
    """What the two ranks of each of two pipelines hold, and what the YAML asks for."""
    measured, facts = measurements("ddp")
    for rank, found in enumerate(measured):
        found |= {"shards": shards, "place": rank % 2}
        for name in CLASSES:
            for unit in ("elements", "bytes"):
                found[name][unit] //= shards
    return measured, facts


@pytest.mark.parametrize("shards, promise", [(1, "whole"), (2, "1/2")])
def test_a_rank_of_a_pipeline_is_held_to_its_own_stages(shards, promise):
    measured, facts = measured_pipeline(shards)
    rows = judge(measured, facts, 2)
    assert {row["verdict"] for row in rows} == {"ok"}
    assert {line.split()[-2] for line in table(rows).splitlines()[1:]} == {promise}
