# SPDX-License-Identifier: Apache-2.0
"""Precisions, engines and kernels give the losses of fp32 in one process."""

from collections.abc import Iterator, Sequence

from . import launches
from .cell import Outcome, Setup
from .comparisons import compare
from .launches import Variant, job, only_on_gpu
from .masks import attention_variant

PACKING = ("--packing", "--max_length", "128")


def padded(setup: Setup) -> Outcome:
    """Compare precisions, engines, pieces of the loss and checkpointing with fp32."""
    return compare_with_first(setup, [*in_one_process(setup), *under_engines(setup)])


def in_one_process(setup: Setup) -> Iterator[Variant]:
    """Yield the job in fp32, and other ways to compute the same in one process."""
    plain = job(setup)
    in_pieces = job(setup, "--max_logits_mib", "0.05")
    yield Variant("fp32", precision="no", flags=plain)
    yield Variant("fp32, loss in pieces", precision="no", flags=in_pieces)
    tf32 = job(setup, "--tf32")
    yield Variant("TF32", precision="no", flags=tf32, left_out=only_on_gpu(setup))
    yield Variant("bf16", flags=plain)
    yield Variant("bf16, loss in pieces", flags=in_pieces)
    yield Variant("bf16, checkpointed", flags=job(setup, "--gradient_checkpointing"))
    yield Variant("bf16, a line every 5 steps", flags=job(setup, "--logging_steps", "5"))
    yield attention_variant(setup, "bf16", "flash_attention_2")
    yield Variant("fp16", precision="fp16", flags=plain, left_out=only_on_gpu(setup))


def under_engines(setup: Setup) -> Iterator[Variant]:
    """Yield the job under one YAML of each engine."""
    flags = job(setup)
    on_gpu = only_on_gpu(setup)
    yield Variant("FSDP2 bf16", "fsdp2_full_shard", flags=flags)
    yield Variant("FSDP2 fp16", "fsdp2_full_shard", "fp16", flags, left_out=on_gpu)
    yield Variant("FSDP2 offload bf16", "fsdp2_cpu_offload", flags=flags)
    yield Variant("FSDP1 bf16", "fsdp1_full_shard", flags=flags)
    yield Variant("ZeRO-2 bf16", "deepspeed_zero2", flags=flags)
    yield Variant("ZeRO-3 bf16", "deepspeed_zero3", flags=flags)


def packed(setup: Setup) -> Outcome:
    """Compare precisions and kernels with fp32 on packed rows, whose batches are different."""
    return compare_with_first(setup, list(packed_variants(setup)))


def packed_variants(setup: Setup) -> Iterator[Variant]:
    """Yield the job with packed rows in fp32, and faster ways to compute it."""
    on_gpu = only_on_gpu(setup, "compiling takes minutes on a CPU")
    flags = job(setup, *PACKING)
    yield Variant("fp32 packed", precision="no", flags=flags)
    yield Variant("bf16 packed", flags=flags)
    flags = job(setup, "--torch_compile", *PACKING)
    yield Variant("bf16 packed, compiled", flags=flags, left_out=on_gpu)
    flags = job(setup, "--use_liger_kernel", *PACKING)
    liger = ("liger-kernel",)
    yield Variant("bf16 packed, Liger", flags=flags, left_out=on_gpu, needs=liger)


def compare_with_first(setup: Setup, variants: Sequence[Variant]) -> Outcome:
    """Run variants and compare the losses of each with those of the first."""
    outcome = Outcome(ok=True)
    trained = launches.train_all(setup, variants, launches.tiny_model(setup))
    compare(outcome, trained, trained[0])
    return outcome
