# SPDX-License-Identifier: Apache-2.0
"""Tiny versions of all cells, to check on a CPU that they work."""

from dataclasses import replace

from .cells import Cell, Flags

NOT_IN_SMALL = (
    "dtype",
    "torch_compile",
    "use_liger_kernel",
    "load_in_4bit",
    "bnb_4bit_use_double_quant",
    "optim",
    "no_master_weights",
)
WORDS_LENGTH = 64  # tokens of a row, with rows of words
LONG_LENGTH = 16  # the same for cells whose rows are longer


def in_small(cell: Cell) -> Cell:
    """Return the cell as --smoke runs it: on CPU, two timed steps, short rows, float32."""
    contestants = {}
    for label, contestant in cell.contestants.items():
        contestants[label] = replace(contestant, flags=shrink(contestant.flags))
    rows = "words" if cell.rows == "gsm8k" else cell.rows
    length = WORDS_LENGTH if rows == "words" else LONG_LENGTH
    return replace(
        cell,
        contestants=contestants,
        flags=shrink(cell.flags) | {"max_length": length},
        rows=rows,
        steps=min(cell.steps, 2),
        device="cpu",
        num_rows=min(cell.num_rows, 24),
    )


def shrink(flags: Flags) -> Flags:
    """Return flags with short rows, two per batch, and nothing that needs a GPU or a package."""
    small = {name: value for name, value in flags.items() if name not in NOT_IN_SMALL}
    if "max_length" in small:
        small["max_length"] = max(small["max_length"] // 32, 16)
    if "per_device_train_batch_size" in small:
        small["per_device_train_batch_size"] = 2
    if "attn_implementation" in small:
        small["attn_implementation"] = "sdpa"
    return small
