# SPDX-License-Identifier: Apache-2.0
"""Tables of parity and of sharding, from results/parity.json."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from job import MAKERS, WEIGHTS
from proof.markdown import decimal, table
from proof.parity_table import NAMES, reasons
from test_parity import BOUNDS

Row = dict[str, Any]  # a row of evidence/test_parity.py
Results = dict[str, Any]  # what was measured, by the name of its file

# {group of evidence/test_parity.py: the row of the summary that it counts for}
OTHER_RECIPES = "the other recipes, every YAML, 2 processes"
GROUPS = {
    "strategies": "llama.py, every YAML, 2 and 4 processes",
    "cuts": "the global batch split differently, 1, 2 and 4 processes",
    "checkpointing": "gradient checkpointing",
    "attention": "eager attention",
    "bf16": "bf16 under each engine, against a single process in fp32",
    "levers": "padding-free batches, loss in chunks",
    "packing": "packed sequences, against a single packed process",
    **{recipe: OTHER_RECIPES for recipe in MAKERS if recipe != "llama"},
    "quantized": "the other recipes, ZeRO-2 and FSDP2",
    "meshes": "TP, CP, SP, EP and PP, each recipe that has them, 2 to 8 processes",
}
# Groups of runs in which that of one process is what the others are compared with
REFERENCE_GROUPS = ("strategies", "quantized", "meshes", *MAKERS)
CLASSES = ("parameters", "gradients", "optimizer")
ORDER = ("single", "ddp", "tp", "ep", "pp", "fsdp2", "hsdp", "fsdp1", "deepspeed")


def rank_of(config: str) -> tuple[int, str]:
    """Return the sort key of a YAML in a table."""
    for number, start in enumerate(ORDER):
        if config.startswith(start):
            return number, config
    raise ValueError(f"{config}: a new kind of YAML; add it to ORDER")


SHARES = {1: "1", 2: "1/2", 4: "1/4"}  # a measured share is within 1 % of one of these

# ---- Parity ----


def parity_block(results: Results) -> str:
    """Return the largest differences from a single process, by kind of run, weights and bound."""
    measured = compared_runs(results)
    lines = []
    for text in dict.fromkeys(GROUPS.values()):
        for weights in WEIGHTS:
            lines += lines_of(text, weights, measured)
    header = ["what was compared", "weights", "runs"]
    header += [f"{name} (bound)" for name in NAMES.values()]
    return "\n\n".join([table(header, lines), "\n".join(reasons(measured))])


def compared_runs(results: Results) -> list[Row]:
    """Return the runs that were compared with another one, without those that were refused."""
    measured = []
    for row in results["parity"]["rows"]:
        if row["verdict"] == "ok" and not is_reference(row):
            measured.append(row)
    return measured


def is_reference(row: Row) -> bool:
    """Return whether a run is the one that others are compared with."""
    return row["config"] == "single" and row["group"] in REFERENCE_GROUPS


def lines_of(text: str, weights: str, measured: Sequence[Row]) -> list[list[str]]:
    """Return a row for the runs of one kind with the usual bounds, and one for wider bounds."""
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
    """Return whether a run in fp32 has a wider bound for the gradient norm than usual."""
    bound = row["bounds"]["grad_norm"]
    return row["precision"] == "no" and bound is not None and bound != BOUNDS["grad_norm"]


def summary_line(text: str, weights: str, rows: Sequence[Row]) -> list[str]:
    """Return how many runs there are, and the largest difference in each number with its bound."""
    bounds = next((row["bounds"] for row in rows if None not in row["bounds"].values()), BOUNDS)
    return [text, weights, str(len(rows)), *(with_bound(rows, key, bounds) for key in NAMES)]


def with_bound(rows: Iterable[Row], key: str, bounds: Mapping[str, float]) -> str:
    """Return the largest difference of some rows in one number, with its bound in brackets."""
    difference = largest(rows, key)
    return "" if difference is None else f"{decimal(difference)} ({decimal(bounds[key])})"


def largest(rows: Iterable[Row], key: str) -> float | None:
    """Return the largest difference of some rows in one number, None if no row reports it."""
    differences = [row["differences"][key] for row in rows]
    return max((found for found in differences if found is not None), default=None)


# ---- Sharding ----


def shares_block(results: Results) -> str:
    """Return the share of each class that the fullest rank has; one row for YAMLs that agree."""
    held = held_by_run(results, "full")
    whole = {kind: most_bytes(held["single", 1][kind]) for kind in CLASSES}
    names: dict[tuple[str, ...], list[str]] = {}
    for config in sorted({config for config, _ in held} - {"single"}, key=rank_of):
        cells = []
        for ranks in (2, 4):
            of_ranks = held.get((config, ranks), {})
            cells += [share_text(of_ranks.get(kind), whole[kind]) for kind in CLASSES]
        names.setdefault(tuple(cells), []).append(f"`{config}.yaml`")
    lines = [[", ".join(configs), *cells] for cells, configs in names.items()]
    headings = [f"{name}, {ranks} processes" for ranks in (2, 4) for name in CLASSES]
    return table(["YAML", *headings], lines)


def share_text(held: dict[str, Any] | None, whole: int) -> str:
    """Return the measured share of one class as a fraction, as a decimal if it is none of them."""
    if not held:
        return ""
    share = most_bytes(held) / whole
    for parts, text in SHARES.items():
        if abs(share * parts - 1) < 0.01:
            return text
    return f"{share:.2f}"


def most_bytes(held: dict[str, Any]) -> int:
    """Return the bytes of one class on the fullest rank."""
    return max(size for size, _ in held["ranks"])


def held_by_run(results: Results, weights: str) -> dict[tuple[str, int], dict[str, Any]]:
    """Return what the ranks of llama.py have, by YAML and number of ranks."""
    held = {}
    for row in results["parity"]["rows"]:
        if row["group"] == "strategies" and row["weights"] == weights and "held" in row:
            held[row["config"], row["ranks"]] = row["held"]
    return held


def bytes_block(results: Results, weights: str = "full") -> str:
    """Return the table of bytes of each class on the fullest rank of 2 and of 4, by YAML.

    After the bytes comes the share of the whole that the YAML promises.
    """
    held = held_by_run(results, weights)
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

    After them comes the share that the YAML promises, if it is not the whole.
    """
    if not held:
        return ""
    share = "" if held["shards"] == 1 else f" (1/{held['shards']})"
    return f"{most_bytes(held):,}{share}"
