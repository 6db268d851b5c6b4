# SPDX-License-Identifier: Apache-2.0
"""Every YAML for one GPU trains full weights and QLoRA, and holds what it promises."""

from . import launches
from .cell import Outcome, Setup
from .comparisons import add_row, falls, held_bytes, row_of
from .launches import Variant, adapters, job

ONE_RANK = "refused: one rank of FSDP1 is NO_SHARD, which loses frozen weights beside adapters"
NO_4_BIT = "the recipe refuses a 4-bit base there"
FOUR_GPUS = "its mesh needs four GPUs"


def one_process(setup: Setup) -> Outcome:
    """Train without sharding."""
    return train_under(setup, "single", "ddp")


def fsdp2(setup: Setup) -> Outcome:
    """Train under every FSDP2 YAML."""
    return train_under(
        setup,
        "fsdp2_full_shard",
        "fsdp2_shard_grad_op",
        "fsdp2_cpu_offload",
        "fsdp2_hybrid_shard",
    )


def fsdp1(setup: Setup) -> Outcome:
    """Train under every FSDP1 YAML."""
    return train_under(
        setup, "fsdp1_full_shard", "fsdp1_shard_grad_op", "fsdp1_no_shard", "fsdp1_hybrid_shard"
    )


def zero(setup: Setup) -> Outcome:
    """Train under ZeRO-0 to 3."""
    return train_under(
        setup, "deepspeed_zero2", "deepspeed_zero0", "deepspeed_zero1", "deepspeed_zero3"
    )


def zero_offload(setup: Setup) -> Outcome:
    """Train under ZeRO with offload, for which DeepSpeed compiles its CPU optimizer."""
    launches.require_compiler()
    return train_under(setup, "deepspeed_zero2_offload", "deepspeed_zero3_offload")


def train_under(setup: Setup, *configs: str) -> Outcome:
    """Train full weights and QLoRA under each YAML, and read the shard report of each launch."""
    variants = []
    for config in configs:
        variants += variants_under(setup, config)
    outcome = Outcome(ok=True)
    for trained in launches.train_all(setup, variants, launches.tiny_model(setup)):
        row = row_of(trained)
        if trained.report:
            row["shard report"] = trained.report["verdict"]
            for kind in ("parameters", "gradients", "optimizer"):
                row[f"{kind}, bytes"] = held_bytes(trained, kind)
            row["learns"] = falls(trained.losses)
            outcome.require(row["learns"] and row["shard report"] == "ok")
        add_row(outcome, row, trained)
    return outcome


def variants_under(setup: Setup, config: str) -> list[Variant]:
    """Return full weights and QLoRA under one YAML, with the reason if one cannot train."""
    if "hybrid" in config:
        return [Variant(config, config, left_out=FOUR_GPUS)]
    qlora = job(setup, *adapters(setup, "nf4"))
    return [
        Variant(f"{config}, full", config, flags=job(setup)),
        Variant(f"{config}, QLoRA", config, flags=qlora, left_out=why_no_qlora(setup, config)),
    ]


def why_no_qlora(setup: Setup, config: str) -> str:
    """Return why QLoRA cannot train under a YAML, "" if it can."""
    if config == "fsdp1_shard_grad_op":
        return NO_4_BIT
    if config == "fsdp1_no_shard":
        return ONE_RANK
    return ONE_RANK if config.startswith("fsdp1") and setup.on_gpu else ""
