# SPDX-License-Identifier: Apache-2.0
"""Every YAML for one GPU trains full weights and QLoRA, and each process holds what it promises."""

import json

import pytest

from gpu.runs import Variant, falls, needs_compiler, train_all

BOUND = "the loss falls, and each process holds what the YAML promises"
CELLS = {
    "one_process": ("single.yaml and ddp.yaml train in bf16, full and QLoRA", "single ddp"),
    "fsdp2": (
        "every FSDP2 YAML for one GPU trains in bf16, full and QLoRA",
        "fsdp2_full_shard fsdp2_shard_grad_op fsdp2_cpu_offload",
    ),
    "fsdp1": (
        "every FSDP1 YAML for one GPU trains in bf16",
        "fsdp1_full_shard fsdp1_shard_grad_op fsdp1_no_shard",
    ),
    "zero": (
        "ZeRO-0 to 3 train in bf16, full and QLoRA",
        "deepspeed_zero2 deepspeed_zero0 deepspeed_zero1 deepspeed_zero3",
    ),
    "zero_offload": (
        "ZeRO-2 and 3 with offload train in bf16, full and QLoRA",
        "deepspeed_zero2_offload deepspeed_zero3_offload",
    ),
}


@pytest.mark.parametrize("name", CELLS)
def test_trains(name, cell):
    claim, configs = CELLS[name]
    cell.proves(f"strategies.{name}", claim, BOUND)
    if name == "zero_offload":
        needs_compiler()
    variants = [variant for config in configs.split() for variant in variants_under(cell, config)]
    for one in train_all(cell, variants, cell.model()):
        report = json.loads((one.folder / "report.json").read_text())
        one.row["shard report"] = report["verdict"]
        for kind in ("parameters", "gradients", "optimizer"):
            one.row[f"{kind}, bytes"] = one.held(kind)
        one.row["learns"] = falls(one.losses)
        assert one.row["learns"] and report["verdict"] == "ok", one.row


def variants_under(cell, config):
    """Full weights and QLoRA under one YAML.

    One rank of FSDP1 is NO_SHARD, which loses frozen weights beside adapters: that is refused.
    """
    variants = [Variant(f"{config}, full", config, flags=cell.job())]
    if not config.startswith("fsdp1"):
        qlora = cell.job(*cell.adapters("nf4"))
        variants.append(Variant(f"{config}, QLoRA", config, flags=qlora))
    return variants
