# SPDX-License-Identifier: Apache-2.0
"""Weights and optimizer state in fewer bits train equally well, and take fewer bytes."""

from . import launches
from .cell import Outcome, Setup, relative_error
from .comparisons import add_row, falls, held_bytes, row_of
from .launches import Variant, adapters, job, only_on_gpu

# Relative, of the first loss: 4 and 8 bits round a random model's logits by some percent
LOSS_BOUND = 0.1
MOST_8_BIT_STATE = 0.3  # relative to fp32 state: a quarter, plus the scales
OPTIMIZERS = (
    "adamw_torch_fused",
    "adamw_8bit",
    "adamw_torch",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
)


def bases(setup: Setup) -> Outcome:
    """Train int8 and 4-bit bases, which start at about the loss of bf16 and take fewer bytes."""
    nf4 = job(setup, *adapters(setup, "nf4"))
    variants = [
        Variant("LoRA", flags=job(setup, *adapters(setup))),
        Variant("nf4", flags=nf4),
        Variant("int8", flags=job(setup, *adapters(setup, "int8"))),
        Variant("nf4, FSDP2", "fsdp2_full_shard", flags=nf4),
        Variant("nf4, FSDP2 offload", "fsdp2_cpu_offload", flags=nf4),
        Variant("nf4, ZeRO-3", "deepspeed_zero3", flags=nf4),
    ]
    trained = launches.train_all(setup, variants, launches.wide_model(setup))
    base = trained[0]
    outcome = Outcome(ok=True)
    for one in trained:
        row = row_of(one)
        if one.succeeded and base.succeeded:
            error = relative_error(one.losses[0], base.losses[0])
            row["parameters, bytes"] = held_bytes(one, "parameters")
            row["first loss, from LoRA's"] = error
            row["learns"] = falls(one.losses)
            is_smaller = row["parameters, bytes"] < held_bytes(base, "parameters")
            outcome.require(is_smaller or one is base)
            outcome.require(row["learns"] and error <= LOSS_BOUND)
        add_row(outcome, row, one)
    return outcome


def optimizers(setup: Setup) -> Outcome:
    """Train with every --optim, which must reach about the loss of fused AdamW.

    Those in 8 bits hold a quarter of its state.
    """
    variants = []
    for name in OPTIMIZERS:
        left_out = ""
        if name.startswith("paged"):
            left_out = only_on_gpu(setup, "pages between GPU and host")
        variants.append(Variant(name, flags=job(setup, "--optim", name), left_out=left_out))
    trained = launches.train_all(setup, variants, launches.wide_model(setup))
    fused = trained[0]
    outcome = Outcome(ok=True)
    for one in trained:
        row = row_of(one)
        if one.succeeded and fused.succeeded:
            error = relative_error(one.losses[-1], fused.losses[-1])
            state = held_bytes(one, "optimizer")
            row["optimizer, bytes"] = state
            row["last loss, from fused"] = error
            outcome.require(error <= LOSS_BOUND)
            if "8bit" in one.variant.name and not setup.tiny:  # small tensors keep 32 bits
                outcome.require(state < MOST_8_BIT_STATE * held_bytes(fused, "optimizer"))
        add_row(outcome, row, one)
    return outcome
