# SPDX-License-Identifier: Apache-2.0
"""Weights and optimizer state in fewer bits train equally well, and take fewer bytes."""

from gpu.runs import Variant, falls, train_all

# Relative, of the first loss: 4 and 8 bits round a random model's logits by some percent
LOSS_BOUND = 0.1
MOST_8_BIT_STATE = 0.3  # relative to fp32 state: a quarter, plus the scales


def test_bases(cell):
    claim = "int8, float8 and 4-bit bases learn and hold fewer bytes, also sharded"
    bound = "first loss within 10 % of LoRA's, fewer bytes, the loss falls"
    cell.proves("quantized.bases", claim, bound)
    nf4 = cell.job(*cell.adapters("nf4"))
    variants = [
        Variant("LoRA", flags=cell.job(*cell.adapters())),
        Variant("nf4", flags=nf4),
        Variant("int8", flags=cell.job(*cell.adapters("int8"))),
        Variant("float8", flags=cell.job(*cell.adapters("float8"))),
        Variant("nf4, FSDP2", "fsdp2_full_shard", flags=nf4),
        Variant("nf4, FSDP2 offload", "fsdp2_cpu_offload", flags=nf4),
        Variant("nf4, ZeRO-3", "deepspeed_zero3", flags=nf4),
    ]
    lora, *others = train_all(cell, variants, cell.model(wide=True))
    for one in [lora, *others]:
        error = abs(one.losses[0] / lora.losses[0] - 1)
        one.row["parameters, bytes"] = one.held("parameters")
        one.row["first loss, from LoRA's"] = error
        assert falls(one.losses) and error <= LOSS_BOUND, one.row
        assert one is lora or one.held("parameters") < lora.held("parameters"), one.row


def test_optimizers(cell):
    claim = "8-bit and paged AdamW reach the loss of fused AdamW with less state"
    bound = "last loss within 10 %, 8-bit state below 0.3 of fp32's"
    cell.proves("optimizers.adamw", claim, bound)
    names = "adamw_torch_fused adamw_8bit adamw_torch paged_adamw_8bit paged_adamw_32bit".split()
    variants = [Variant(name, flags=cell.job("--optim", name)) for name in names]
    fused, *others = train_all(cell, variants, cell.model(wide=True))
    for one in [fused, *others]:
        error = abs(one.losses[-1] / fused.losses[-1] - 1)
        one.row["optimizer, bytes"] = one.held("optimizer")
        one.row["last loss, from fused"] = error
        assert error <= LOSS_BOUND, one.row
        if "8bit" in one.variant.name and cell.on_gpu:  # small tensors keep 32 bits
            assert one.held("optimizer") < MOST_8_BIT_STATE * fused.held("optimizer")
