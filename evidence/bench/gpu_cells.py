# SPDX-License-Identifier: Apache-2.0
"""What one GPU can show: absolute numbers.

Weights are random, and rows have exactly --max_length tokens except for the ladder's. All
contestants compute in bf16. Weights that are trained are fp32, except for full fine-tuning of 8B,
whose fp32 weights and optimizer state would take 120 GiB.
"""

from .cells import Cell, Contestant, Flags
from .contestants import BARE_AND_OURS, FIVE, MATCHED

COMMON: Flags = MATCHED | {"max_length": 4096, "weight_decay": 0.0}
LORA = {"use_peft": True, "lora_r": 16, "dtype": "bfloat16"}
NF4 = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
CHECKPOINTED = {"gradient_checkpointing": True}
# Full fine-tuning without fp32 weights, in which small updates are lost: the recipe refuses it
# without --no_master_weights
FULL_IN_BF16 = {"dtype": "bfloat16", "no_master_weights": True}

FULL_8B = FULL_IN_BF16 | CHECKPOINTED | {"per_device_train_batch_size": 4}
LORA_8B = LORA | {"per_device_train_batch_size": 2, "max_grad_norm": 0}
QLORA_8B = {
    **LORA,
    **NF4,
    **CHECKPOINTED,
    "max_length": 2048,
    "per_device_train_batch_size": 2,
}

# Each rung keeps the flags of those before it
LADDER_START = {"per_device_train_batch_size": 2, "max_logits_mib": 1e6}
LADDER: dict[str, Flags] = {
    "padded": {},
    "packing": {"packing": True},
    "compile": {"torch_compile": True},
    "loss in pieces": {"max_logits_mib": 256},
    "liger": {"use_liger_kernel": True},
    "checkpointing": {"gradient_checkpointing": True},
    "8-bit AdamW": {"optim": "adamw_8bit"},
    "LoRA": LORA | {"optim": "adamw_torch_fused"},
    "QLoRA": NF4,
}

# Flags of each attention in addition to attn_implementation, and the package that it needs
ATTENTION_FLAGS: dict[str, Flags] = {
    "eager": {},
    "sdpa": {},
    "varlen": {},
    # With one row per batch, transformers reads the borders of rows from the device in every layer,
    # unless they are known in advance, as in padding-free batches.
    "flash_attention_2": {"padding_free": True},
}
ATTENTION_NEEDS = {"flash_attention_2": "flash-attn"}


def gpu_cells() -> list[Cell]:
    """Return the cells of a GPU."""
    ours = {"ours": Contestant("ours")}
    matched = BARE_AND_OURS | {"trainer": FIVE["trainer"]}
    four_rows = {"per_device_train_batch_size": 4}
    one_row = {"per_device_train_batch_size": 1}
    return [
        gpu_cell("8B LoRA", "growth", "8B", ours, LORA_8B),
        gpu_cell("8B full", "growth", "8B", ours, FULL_8B),
        gpu_cell("8B QLoRA", "growth", "8B", ours, QLORA_8B),
        gpu_cell("3B ladder", "growth", "3B", ladder(), {}, rows="gsm8k"),
        gpu_cell("1B matched", "matched", "1B", matched, four_rows),
        gpu_cell("1B attention", "growth", "1B", attention(), one_row),
    ]


def gpu_cell(
    name: str,
    kind: str,
    model: str,
    contestants: dict[str, Contestant],
    flags: Flags,
    rows: str = "long",
) -> Cell:
    """Return a cell with the flags that all cells of a GPU share, and its own."""
    return Cell(name, kind, model, rows, contestants, COMMON | flags, device="cuda")


def ladder() -> dict[str, Contestant]:
    """Return our recipe with one more lever on each rung."""
    contestants = {}
    flags: Flags = LADDER_START
    for name, lever in LADDER.items():
        flags = flags | lever
        needs = "liger-kernel" if "use_liger_kernel" in flags else ""
        contestants[name] = Contestant("ours", flags, needs=needs)
    return contestants


def attention() -> dict[str, Contestant]:
    """Return our recipe with each attention at three lengths."""
    contestants = {}
    for kernel, more in ATTENTION_FLAGS.items():
        for length in (1024, 4096, 16384):
            flags = {"attn_implementation": kernel, "max_length": length} | more
            needs = ATTENTION_NEEDS.get(kernel, "")
            contestants[f"{kernel}, {length}"] = Contestant("ours", flags, needs=needs)
    return contestants
