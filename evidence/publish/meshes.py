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
SOME_PLANS = "models with a plan, such as Llama; its default has none"
NO_PLAN = "no model has a plan"
LENGTHS = (8192, 131_072)  # tokens of the row that the table counts
MIB = 2**20
KINDS_OF_MESH = ("tp", "cp", "sp", "ep")


def mesh_bytes_block(results: Results) -> str:
    """Return the bytes of each class on the fullest rank, with their share of one process."""
    recording = results["curves"]["meshes"]
    lines = []
    for run in recording["runs"]:
        whole = recording["models"][run["model"]]["bytes"]
        held = run["bytes"]
        ranks = str(run["ranks"])
        cells = [share_of(held[kind], whole[kind]) for kind in CLASSES]
        lines.append([name_of(run), ranks, *cells])
    return table(["YAML", "ranks", *CLASSES], lines)


def name_of(run: Mapping[str, Any]) -> str:
    """Return the YAML of a recorded run, with its sizes and flags."""
    config = run["config"]
    words = [f"`{config}.yaml`", *run["sizes"]]
    flags = " ".join(run["flags"])
    if flags:
        words.append(f"`{flags}`")
    return " ".join(words)


def share_of(sizes: list[int], whole: list[int]) -> str:
    """Return the bytes of the fullest rank, and in brackets their share of one process."""
    most = max(sizes)
    share = most / whole[0]
    return f"{most:,} ({share:.1%})"


def mesh_weights_block(results: Results) -> str:
    """Return which kinds of weights each mesh can train, and why it refuses the others.

    It is asked of the recipes' own checks, and of no measurement.
    """
    # Imported here, since it imports the recipes, and a wrong call should be refused at once.
    from proof.mesh_weights import KINDS, refusals_by_pair

    numbers: dict[str, int] = {}  # {reason: its number}
    lines = []
    for config, refusals in in_order(refusals_by_pair()).items():
        cells = [answer_of(refusals[kind], numbers) for kind in KINDS]
        lines.append([f"`{config}.yaml`", *cells])
    answers = table(["YAML", *KINDS], lines)
    notes = "\n".join(f"{number}. `{reason}`" for reason, number in numbers.items())
    return f"{answers}\n\n{notes}"


def in_order(pairs: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries of YAMLs in the order of the page, products after what they multiply."""
    ordered = {}
    for end in ENDINGS:
        names = sorted(name for name in pairs if name.endswith(end))
        for config in sorted(names, key=lambda name: name not in ENDINGS):
            ordered[config] = pairs[config]
    return ordered


def answer_of(refusal: str, numbers: dict[str, int]) -> str:
    """Return the cell of a pair: yes, or the number of the reason why not.

    Args:
        numbers: of the reasons so far, to which a new one is added.
    """
    if not refusal:
        return "yes"
    number = numbers.setdefault(refusal, len(numbers) + 1)
    return f"no ({number})"


def mesh_recipes_block(results: Results) -> str:
    """Return which recipe takes which kind of mesh, as their own arguments say."""
    from proof.mesh_weights import has_plan, kinds_by_recipe, takes_a_model_with_a_plan

    by_recipe = kinds_by_recipe()
    taken_by_any = {kind for taken in by_recipe.values() for kind in taken}
    kinds = [kind for kind in KINDS_OF_MESH if kind in taken_by_any]
    lines = []
    for recipe, taken in by_recipe.items():
        cells = ["yes" if kind in taken else "" for kind in kinds]
        if "tp" in taken and not has_plan(recipe):
            words = SOME_PLANS if takes_a_model_with_a_plan(recipe) else NO_PLAN
            cells[kinds.index("tp")] = words
        lines.append([f"`{recipe}.py`", *cells])
    return table(["recipe", *(kind.upper() for kind in kinds)], lines)


def mesh_traffic_block(results: Results) -> str:
    """Return what a rank sends for a layer, as a formula and for two lengths of a row.

    It is arithmetic, and no measurement.
    """
    lines = []
    for kind, (what, formula) in SENT.items():
        count = TRAFFIC[kind]
        sizes = [count(replace(OF_8B, tokens=tokens)) for tokens in LENGTHS]
        cells = [f"{size / MIB:,.0f} MiB" for size in sizes]
        lines.append([kind, what, f"`{formula}`", *cells])
    columns = [f"{tokens:,} tokens" for tokens in LENGTHS]
    return table(["", "a rank sends", "bytes", *columns], lines)
