# SPDX-License-Identifier: Apache-2.0
"""How far the loss under each YAML is from that of one process, from results/parity.json."""

import json
from typing import Any

from paths import ROOT

from .style import Theme, axes_in, figure_of, to_svg

PARITY = ROOT / "results" / "parity.json"
REFERENCE = "single"

Row = dict[str, Any]


def plain_rows() -> list[Row]:
    """Return the rows of full fine-tuning of the tiny Llama, one per YAML, on the fewest ranks."""
    found: dict[str, Row] = {}
    results = json.loads(PARITY.read_text())
    for row in results["rows"]:
        if is_plain(row) and row["config"] != REFERENCE:
            found.setdefault(row["config"], row)
    return list(found.values())


def is_plain(row: Row) -> bool:
    """Whether a row is of full fine-tuning of the tiny Llama, without further flags."""
    if row["group"] != "strategies" or row["flags"]:
        return False
    return row["recipe"] == "llama" and row["weights"] == "full"


def loss_difference(row: Row) -> float:
    """Return the largest relative difference of the loss."""
    return row["differences"]["loss"]


def draw_agreement(theme: Theme) -> str:
    """Return a bar per YAML: the largest relative difference of the loss over all steps."""
    rows = sorted(plain_rows(), key=loss_difference, reverse=True)
    largest = loss_difference(rows[0])
    bound = rows[0]["bounds"]["loss"]
    figure = figure_of(
        theme,
        4.9,
        f"{len(rows)} strategies, one loss: none is further than {largest:.1e} from one process",
        "Largest relative difference of the loss in 20 steps of the same job: tiny Llama, fp32, "
        "12 rows per step, 2 or 4 CPU ranks.\nNot yet measured in bf16 on several GPUs.",
    )
    axes = axes_in(figure, left=2.3, right=0.6, top=0.95, bottom=0.5)
    names = [f"{row['config']}.yaml" for row in rows]
    sizes = [loss_difference(row) for row in rows]
    bars = axes.barh(names, sizes, 0.66, color=theme.series["blue"])
    axes.bar_label(bars, [f"{size:.1e}" for size in sizes], padding=5, fontsize=9)
    top = len(rows) - 0.4
    style: dict[str, Any] = {"color": theme.series["red"]}
    axes.axvline(bound, linestyle="--", linewidth=1.3, **style)
    axes.text(bound, top, f"bound: {bound:.0e}", ha="center", va="bottom", **style)
    axes.set_ylim(-0.6, top)
    axes.set_xlabel("largest relative difference of the loss")
    axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 0), useMathText=True)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    return to_svg(figure)
