# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/parallelism.md: what ranks of a mesh have, and which weights it can train."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from proof.markdown import table
from proof.traffic import OF_8B, TRAFFIC

from .strategies import CLASSES, Results

# Kinds of meshes as their YAMLs' names end, in the order of the page
ENDINGS = ("tp", "cp", "ulysses", "ep", "pp")
# What a rank sends for a layer in a micro-batch; proof/traffic.py computes it
SENT = {
    "FSDP2, ZeRO-3": ("weights twice, gradients once", "(n - 1)/n x P x (2e + 4)"),
    "TP": ("7 all-reduces of hidden states", "7 x 2(n - 1)/n x t h e"),
    "CP": ("keys and values twice, their gradients once", "2 t k x (2(n - 1)/n x e + 4)"),
    "SP": ("8 all-to-alls of a rank's own tokens", "4(n - 1)/n x t/n x (h + k) x e"),
    "EP": ("4 all-to-alls, for each of a experts a token", "4(n - 1)/n x t a h e"),
    "PP": ("hidden states and their gradients, for each stage", "2 t h e"),
}
NO_PLAN = "models with a plan, of which its default is none"
LENGTHS = (8192, 131_072)  # tokens of the row that the table counts
MIB = 2**20
KINDS_OF_MESH = ("tp", "cp", "sp", "ep")


def mesh_bytes_block(results: Results) -> str:
    """Return the bytes of each class on the fullest rank, with their share of one process."""
    recording = results["curves"]["meshes"]
    lines = []
    for run in recording["runs"]:
        words = [f"`{run['config']}.yaml`", *run["sizes"]]
        if run["flags"]:
            words.append(f"`{' '.join(run['flags'])}`")
        cells = [share_of(run["bytes"][kind], recording["bytes"][kind]) for kind in CLASSES]
        lines.append([" ".join(words), str(run["ranks"]), *cells])
    return table(["YAML", "ranks", *CLASSES], lines)


def share_of(sizes: list[int], whole: list[int]) -> str:
    """Return the bytes of the fullest rank, and in brackets their share of one process."""
    most = max(sizes)
    return f"{most:,} ({most / whole[0]:.1%})"


def mesh_weights_block(results: Results) -> str:
    """Return which kinds of weights each mesh can train, and why it refuses the others.

    It is asked of the recipes' own checks, and of no measurement.
    """
    # Imported here, since it imports the recipes, and a wrong call should be refused at once.
    from proof.mesh_weights import KINDS, refusals_by_pair

    pairs = refusals_by_pair()
    reasons: list[str] = []
    for refusals in in_order(pairs).values():
        reasons += [reason for reason in refusals.values() if reason]
    numbers = {reason: number + 1 for number, reason in enumerate(dict.fromkeys(reasons))}
    lines = []
    for config, refusals in in_order(pairs).items():
        cells = [answer_of(refusals[kind], numbers) for kind in KINDS]
        lines.append([f"`{config}.yaml`", *cells])
    notes = [f"{number}. `{reason}`" for reason, number in numbers.items()]
    return "\n\n".join([table(["YAML", *KINDS], lines), "\n".join(notes)])


def in_order(pairs: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries of YAMLs in the order of the page, products after what they multiply."""

    def place(config: str) -> tuple[int, bool, str]:
        kind = next(number for number, end in enumerate(ENDINGS) if config.endswith(end))
        is_product = config not in ENDINGS
        return kind, is_product, config

    return {config: pairs[config] for config in sorted(pairs, key=place)}


def answer_of(refusal: str, numbers: Mapping[str, int]) -> str:
    """Return the cell of a pair: yes, or the number of the reason why not."""
    return f"no ({numbers[refusal]})" if refusal else "yes"


def mesh_recipes_block(results: Results) -> str:
    """Return which recipe takes which kind of mesh, as their own arguments say."""
    from proof.mesh_weights import has_plan, kinds_by_recipe

    by_recipe = kinds_by_recipe()
    taken_by_any = {kind for taken in by_recipe.values() for kind in taken}
    kinds = [kind for kind in KINDS_OF_MESH if kind in taken_by_any]
    lines = []
    for recipe, taken in by_recipe.items():
        cells = ["yes" if kind in taken else "" for kind in kinds]
        if "tp" in taken and not has_plan(recipe):
            cells[kinds.index("tp")] = NO_PLAN
        lines.append([f"`{recipe}.py`", *cells])
    return table(["recipe", *(kind.upper() for kind in kinds)], lines)


def mesh_traffic_block(results: Results) -> str:
    """Return what a rank sends for a layer, as a formula and for two lengths of a row.

    It is arithmetic, and no measurement.
    """
    lines = []
    for kind, (what, formula) in SENT.items():
        sizes = [TRAFFIC[kind](replace(OF_8B, tokens=tokens)) for tokens in LENGTHS]
        lines.append([kind, what, f"`{formula}`", *(f"{size / MIB:,.0f} MiB" for size in sizes)])
    columns = [f"{tokens:,} tokens" for tokens in LENGTHS]
    return table(["", "a rank sends", "bytes", *columns], lines)
