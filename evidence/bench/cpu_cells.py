# SPDX-License-Identifier: Apache-2.0
"""What two CPU cores can show: ratios."""

from collections.abc import Iterator

from .cells import Cell, Contestant
from .contestants import BARE_AND_OURS, FIVE, LEARN, MATCHED

EIGHT_ROWS = {"per_device_train_batch_size": 8}
TWO_ROWS = {"per_device_train_batch_size": 2}  # a step of about a second
PACKED = {"packing": True, "per_device_train_batch_size": 3}
ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}

SHIPPED = {
    "floor": FIVE["floor"],
    "ours": Contestant("ours", PACKED),
    "trainer": FIVE["trainer"],
    "trl": FIVE["trl"],
    "trl packed": Contestant("trl", PACKED),
}
TOKENIZING_TRAINER = Contestant("trainer", {"text": True})  # tokenizes rows, as the recipe does
STARTING = {"floor": FIVE["floor"], "ours": FIVE["ours"], "trainer": TOKENIZING_TRAINER}
ALL_OF_GSM8K = 7473
TOKENS_PER_STEP = 2048  # while the length of a row grows


def cpu_cells() -> list[Cell]:
    """Return the cells of a CPU."""
    return [*matched_cells(), shipped_cell(), *start_cells(), *growth_cells()]


def matched_cells() -> Iterator[Cell]:
    """Yield the cells in which all contestants train on the same batches."""

    def medium(name: str, flags: dict, contestants: dict = FIVE) -> Cell:
        return Cell(name, "matched", "medium", "gsm8k", contestants, MATCHED | flags)

    yield medium("matched, medium", TWO_ROWS)
    flags = MATCHED | EIGHT_ROWS
    yield Cell("matched, near zero", "matched", "near zero", "words", FIVE, flags, steps=1000)
    yield medium("matched, medium, LoRA", TWO_ROWS | {"use_peft": True})
    yield medium("matched, medium, accumulation", ACCUMULATED)
    # No other tool packs the same rows together: the recipe is only compared with the loops.
    three_lines = {"per_device_train_batch_size": 3, "packing": True}
    yield medium("matched, medium, packed", three_lines, BARE_AND_OURS)


def shipped_cell() -> Cell:
    """Return the cell in which each tool has its own defaults, one pass over the same rows."""
    flags = LEARN | EIGHT_ROWS | {"num_train_epochs": 1}
    # With 200 rows, a different order would already change the loss by 2 %.
    return Cell(
        "shipped, medium", "shipped", "medium", "gsm8k", SHIPPED, flags, steps=0, num_rows=256
    )


def start_cells() -> Iterator[Cell]:
    """Yield the cells that time the first step, of a model whose step takes very little time."""
    for cache in ("cold", "warm"):
        yield Cell(
            f"start, {cache} cache",
            "start",
            "1.5M",
            "gsm8k",
            STARTING,
            MATCHED | EIGHT_ROWS,
            steps=1,
            num_rows=ALL_OF_GSM8K,
            cache=cache,
        )


def growth_cells() -> Iterator[Cell]:
    """Yield the cells in which one quantity grows and nothing else changes."""

    def growth(quantity: str, model: str, contestants: dict[str, Contestant]) -> Cell:
        flags = MATCHED | {"max_length": 256, "per_device_train_batch_size": 2}
        return Cell(f"growth, {quantity}", "growth", model, "long", contestants, flags)

    lengths = {}
    for length in (128, 512, 2048):
        rows = TOKENS_PER_STEP // length
        flags = {"max_length": length, "per_device_train_batch_size": rows}
        lengths[str(length)] = Contestant("ours", flags)
    yield growth("length", "1.5M", lengths)

    batches = {}
    for rows in (1, 4, 16):
        batches[str(rows)] = Contestant("ours", {"per_device_train_batch_size": rows})
    yield growth("batch", "1.5M", batches)

    yield growth("ranks", "7M", {str(ranks): Contestant("ours", ranks=ranks) for ranks in (1, 2)})

    names = ("1.5M", "7M", "20M", "medium")
    yield growth("model", "medium", {name: Contestant("ours", model=name) for name in names})
