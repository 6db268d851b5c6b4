# SPDX-License-Identifier: Apache-2.0
"""Precisions, engines, kernels and masks give the losses of fp32 in one process."""

import sys

from gpu.runs import REPO, Variant, compare_with_first

ALIKE = "losses of 20 steps within 2e-2 of the first row's"
PACKING = ("--packing", "--max_length", "128")
KERNELS = ("eager", "sdpa", "flex_attention", "varlen", "flash_attention_2")
ALONE = 2e-2  # logits are about 0.5, and bf16 keeps eight bits
PLANTED = 0.1  # what a planted leak moves at least


def test_precisions(cell):
    claim = "bf16, fp16, TF32, engines and pieces of the loss against fp32"
    cell.proves("parity.precisions", claim, ALIKE)
    plain = cell.job()
    pieces = cell.job("--max_logits_mib", "0.05")
    flash = cell.job("--attn_implementation", "flash_attention_2")
    variants = [
        Variant("fp32", precision="no", flags=plain),
        Variant("fp32, loss in pieces", precision="no", flags=pieces),
        Variant("TF32", precision="no", flags=cell.job("--tf32")),
        Variant("bf16", flags=plain),
        Variant("bf16, loss in pieces", flags=pieces),
        Variant("bf16, checkpointed", flags=cell.job("--gradient_checkpointing")),
        Variant("bf16, a line every 5 steps", flags=cell.job("--logging_steps", "5")),
        Variant("bf16, flash_attention_2", flags=flash),
        Variant("fp16", precision="fp16", flags=plain),
    ]
    engines = [
        Variant("FSDP2 bf16", "fsdp2_full_shard", flags=plain),
        Variant("FSDP2 fp16", "fsdp2_full_shard", "fp16", plain),
        Variant("FSDP2 offload bf16", "fsdp2_cpu_offload", flags=plain),
        Variant("FSDP1 bf16", "fsdp1_full_shard", flags=plain),
        Variant("ZeRO-2 bf16", "deepspeed_zero2", flags=plain),
        Variant("ZeRO-3 bf16", "deepspeed_zero3", flags=plain),
    ]
    compare_with_first(cell, variants + engines)


def test_packed(cell):
    """Batches of packed rows are others, so that they have a reference of their own."""
    claim = "packed, compiled and with Liger's kernels against fp32"
    cell.proves("parity.packed", claim, ALIKE)
    flags = cell.job("--torch_compile", "off", *PACKING)
    compiled = cell.job("--torch_compile", *PACKING)
    liger = cell.job("--use_liger_kernel", "--torch_compile", "off", *PACKING)
    variants = [
        Variant("fp32 packed", precision="no", flags=flags),
        Variant("bf16 packed", flags=flags),
        Variant("bf16 packed, compiled", flags=compiled),
        Variant("bf16 packed, Liger", flags=liger),
    ]
    compare_with_first(cell, variants)


def test_packed_rows(cell):
    claim = "packed and padding-free rows have one loss under each installed attention"
    cell.proves("masks.packed_rows", claim, ALIKE)
    for name, flags in (("packed", PACKING), ("padding-free", ("--padding_free",))):
        variants = []
        for kernel in KERNELS:
            with_kernel = cell.job("--attn_implementation", kernel, *flags)
            variants.append(Variant(f"{name}, {kernel}", flags=with_kernel))
        compare_with_first(cell, variants)


def test_documents(cell, monkeypatch):
    """Logits of a packed document do not depend on its neighbors (tests/mask_probe.py)."""
    claim = "packed documents do not see each other under each installed attention"
    cell.proves("masks.documents", claim, "no leak, and a planted one is detected")
    monkeypatch.setattr(sys, "path", [str(REPO / "tests"), *sys.path])
    from mask_probe import ARCHITECTURES

    for kernel in KERNELS if cell.on_gpu else KERNELS[:2]:
        try:
            for architecture in ARCHITECTURES:
                planted = planted_leak(cell, architecture, kernel)
                row = {"what": f"{kernel}, {architecture}", "result": "passed"}
                cell.rows.append(row | {"planted": planted})
        except (ImportError, ValueError) as error:  # the kernel is not installed
            cell.rows.append({"what": kernel, "result": f"skipped: {str(error)[:100]}"})
    assert any(row["result"] == "passed" for row in cell.rows)


def planted_leak(cell, architecture, kernel):
    """What a planted leak moves; there must be none without it."""
    import torch

    from core.batches import ends_of_rows
    from mask_probe import distance_from_alone, leak, packed_batch, random_model

    device = "cuda" if cell.on_gpu else "cpu"
    dtype = torch.bfloat16 if cell.on_gpu else torch.float32
    model = random_model(architecture, kernel, dtype, device)
    lengths = [7, 1, 10, 6]  # in one row: flash attention packs only in batches of one
    batch, owners = packed_batch(lengths, device=device)
    if kernel == "varlen":
        batch |= ends_of_rows(lengths)
    assert leak(model, batch, owners) == 0
    assert distance_from_alone(model, batch, owners) < ALONE
    batch["position_ids"] = torch.arange(24, device=device)[None]
    if kernel == "varlen":
        batch |= ends_of_rows([24])
    planted = leak(model, batch, owners)
    assert planted > PLANTED
    return planted
