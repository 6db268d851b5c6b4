"""Tables of parity and of bytes held, from results/parity.json."""

from collections.abc import Iterable, Sequence
from typing import Any

from proof.compare import BF16_BOUNDS, BOUNDS, NAMES
from proof.jobs import MAKERS, WEIGHTS
from proof.markdown import table
from proof.parity_table import reasons

Row = dict[str, Any]  # of scripts/parity.py
Results = dict[str, Any]  # what was measured, by the name of its file

# {group of scripts/parity.py: the line of the summary that it counts for}
OTHER_RECIPES = "the other recipes, every YAML, 2 ranks"
GROUPS = {
    "strategies": "every YAML, 2 and 4 ranks",
    "cuts": "every split of one global batch, 1, 2 and 4 ranks",
    "checkpointing": "gradient checkpointing",
    "attention": "eager attention",
    "bf16": "bf16 under each engine, against one process in fp32",
    "levers": "padding-free batches, loss in pieces",
    "packing": "packed lines, against one process's",
    **{recipe: OTHER_RECIPES for recipe in MAKERS if recipe != "llama"},
    "quantized": "the other recipes, under ZeRO-2 and FSDP2",
}
CLASSES = ("parameters", "gradients", "optimizer")
ORDER = ("single", "ddp", "fsdp2", "fsdp1", "deepspeed")


def rank_of(config: str) -> tuple[int, str]:
    """Return the sort key of a YAML in a table."""
    for number, start in enumerate(ORDER):
        if config.startswith(start):
            return number, config
    raise ValueError(f"{config}: a new kind of YAML; add it to ORDER")


# ---- Parity ----


def parity_block(results: Results) -> str:
    """Return the largest differences from one process, by kind of run, weights and bound."""
    measured = []
    for row in results["parity"]["rows"]:
        if row["verdict"] == "ok" and not is_reference(row):
            measured.append(row)
    lines = []
    for text in dict.fromkeys(GROUPS.values()):
        for weights in WEIGHTS:
            lines += lines_of(text, weights, measured)
    lines.append(["bound", "", "", *bounds_row(BOUNDS)])
    lines.append(["bound in bf16", "", "", *bounds_row(BF16_BOUNDS)])
    header = ["what differs from one process", "weights", "runs", *NAMES.values()]
    return "\n\n".join([table(header, lines), "\n".join(reasons(measured))])


def is_reference(row: Row) -> bool:
    """Return whether a run is the one that others are compared with."""
    return row["config"] == "single" and row["group"] in ("strategies", "quantized", *MAKERS)


def lines_of(text: str, weights: str, measured: Sequence[Row]) -> list[list[str]]:
    """Return a line for the runs of one kind with the usual bounds, and one for those beyond."""
    usual = []
    wider = []
    for row in measured:
        if GROUPS[row["group"]] == text and row["weights"] == weights:
            if has_wider_norm(row):
                wider.append(row)
            else:
                usual.append(row)
    lines = []
    if usual:
        lines.append(summary_line(text, weights, usual))
    if wider:
        lines.append(summary_line(f"{text}, sharded", weights, wider))
    return lines


def has_wider_norm(row: Row) -> bool:
    """Return whether a run in fp32 is held to a wider bound of the gradient norm than usual."""
    bound = row["bounds"]["grad_norm"]
    return row["precision"] == "no" and bound is not None and bound != BOUNDS["grad_norm"]


def summary_line(text: str, weights: str, rows: Sequence[Row]) -> list[str]:
    """Return how many runs there are, and the largest difference in each number."""
    return [text, weights, str(len(rows)), *(largest(rows, key) for key in NAMES)]


def largest(rows: Iterable[Row], key: str) -> str:
    """Return the largest difference of some rows in one number, as text."""
    differences = [row["differences"][key] for row in rows]
    reported = [difference for difference in differences if difference is not None]
    return f"{max(reported):.0e}" if reported else ""


def bounds_row(bounds: dict[str, float]) -> list[str]:
    """Return bounds as text, in the order of the columns."""
    return [f"{bounds[key]:.0e}" for key in NAMES]


# ---- Bytes ----


def bytes_block(results: Results, weights: str = "full") -> str:
    """Return the table of bytes of each class on the fullest rank of 2 and of 4, by YAML.

    Beside the bytes stands the share of the whole that the YAML promises.
    """
    held = {}
    for row in results["parity"]["rows"]:
        if row["group"] == "strategies" and row["weights"] == weights and "held" in row:
            held[row["config"], row["ranks"]] = row["held"]
    lines = []
    for config in sorted({config for config, _ in held}, key=rank_of):
        few = 1 if config == "single" else 2
        name = f"`{config}.yaml`"
        if few == 1:
            name += ", one process"
        cells = []
        for ranks in (few, 4):
            of_ranks = held.get((config, ranks), {})
            cells += [bytes_text(of_ranks.get(kind)) for kind in CLASSES]
        lines.append([name, *cells])
    headings = [f"{name}, {ranks} ranks" for ranks in (2, 4) for name in CLASSES]
    return table(["YAML", *headings], lines)


def bytes_text(held: dict[str, Any] | None) -> str:
    """Return the bytes of one class on the fullest rank, "" if they were not measured.

    Beside them stands the share that the YAML promises, if it is not the whole.
    """
    if not held:
        return ""
    share = "" if held["shards"] == 1 else f" (1/{held['shards']})"
    return f"{max(size for size, _ in held['ranks']):,}{share}"
