"""The shard report says of nothing that it is as promised which is not: planted measurements of a small model."""

import copy

import pytest
import yaml
from config_rules import strategy_of
from launching import CONFIGS
from shard_report import judge

WHOLE = [[20_000, 100, True]] * 16  # (elements, rows, trains) of each tensor
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


def measurements(config, ranks=4):
    """What each of the ranks holds on a GPU if the YAML does what it says, and what it asks for."""
    facts, rows = strategy_of(yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())), []
    for _ in range(ranks):
        measured = {
            "tensors": WHOLE,
            "state_tensors_per_parameter": 2,
            "master": {"elements": 0, "bytes": 0},
        }
        for name, count in zip(CLASSES, (1, 1, 2), strict=True):
            elements = 320_000 * count // (ranks if name in SPLIT[config] else 1)
            offloaded = (
                config == "fsdp2_cpu_offload"
                or config == "deepspeed_zero3_offload"
                and name != "gradients"
            )
            measured[name] = {
                "elements": elements,
                "bytes": 4 * elements,
                "dtypes": ["float32"],
                "devices": ["cpu" if offloaded else "cuda"],
            }
        rows.append(measured)
    return rows, facts


def verdicts(rows, facts):
    return {
        row["class"]: row["verdict"]
        for row in judge(rows, facts, 2)
        if row["rank"] == len(rows) - 1
    }


@pytest.mark.parametrize("config", SPLIT)
def test_what_is_promised_is_ok_and_nothing_else(config):
    rows, facts = measurements(config, 1 if config == "single" else 4)
    assert set(verdicts(rows, facts).values()) == {"ok"}
    for name in CLASSES:
        for factor in (0.5, 2, 4):
            wrong = copy.deepcopy(rows)
            wrong[-1][name]["elements"] = int(wrong[-1][name]["elements"] * factor)
            share_is_left = (
                config == "deepspeed_zero1" and name == "gradients" and factor < 1
            )  # at the step
            assert share_is_left or verdicts(wrong, facts)[name] == "NOT AS PROMISED", (
                name,
                factor,
            )


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
    rows, facts = measurements(config)
    rows[-1][name]["devices"] = devices
    assert verdicts(rows, facts)[name] == "NOT AS PROMISED"
