# SPDX-License-Identifier: Apache-2.0
"""The tables of README.md and docs/, and results/README.md, from the measurements in results/."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import tables_speed
from families import tables as families
from job import WEIGHTS
from paths import ROOT
from proof.parity_table import in_order, tables

from .memory import (
    activations_block,
    host_memory_block,
    planner_block,
    shapes_table,
    tracked_table,
)
from .meshes import (
    mesh_bytes_block,
    mesh_recipes_block,
    mesh_traffic_block,
    mesh_weights_block,
)
from .proof import faults_block, proof_block
from .saving import checkpoint_memory_block, checkpoint_plan_block
from .strategies import Results, bytes_block, parity_block, shares_block

MADE_BY = "Made by `evidence/readme_tables.py` from the JSON files beside it."
ABOUT_PARITY = (
    "`evidence/test_parity.py` on {device} ranks, in fp32, with {versions}. The numbers are the "
    "largest relative differences from the same job in one process over 20 steps; bytes ok: each "
    "rank held what the YAML promises."
)
ABOUT_BYTES = (
    "Live tensors of the rank with the most of them after one step, and the share of the whole "
    "that the YAML promises."
)
ABOUT_RANKS = (
    "`evidence/track_ranks.py`: the planned peak relative to that of live tensors on CPU ranks; "
    "under ZeRO-1 to 3 without the bucket of 2 GB that each rank has."
)
ABOUT_SHAPES = (
    "`evidence/validate_planner.py`: the closed form relative to the trace, rows of 4,096 tokens."
)


def families_block(results: Results) -> str:
    """Return the table of model families, or a line that says that none was measured."""
    return families.block(results.get("model_families"))


MARK = re.compile(r"^<!-- (\w+) -->$", re.MULTILINE)
# The tables of the documents, by the NAME of the marks around them
Block = Callable[[Results], str]
BLOCKS: dict[str, Block] = {
    "parity": parity_block,
    "shares": shares_block,
    "proof": proof_block,
    "faults": faults_block,
    "planner": planner_block,
    "activations": activations_block,
    "host_memory": host_memory_block,
    "checkpoint_memory": checkpoint_memory_block,
    "checkpoint_plan": checkpoint_plan_block,
    "families": families_block,
    "mesh_bytes": mesh_bytes_block,
    "mesh_weights": mesh_weights_block,
    "mesh_recipes": mesh_recipes_block,
    "mesh_traffic": mesh_traffic_block,
}
BLOCKS |= {name: lambda _, make=make: make() for name, make in tables_speed.BLOCKS.items()}


def read_results() -> Results:
    """Return the measurements by the name of their file under results/."""
    results: Results = {}
    for path in (ROOT / "results").glob("*.json"):
        results[path.stem] = listed(json.loads(path.read_text()))
    return results


def listed(content: dict) -> dict:
    """Return the content of a file of rows by test (evidence/conftest.py) with a list of them."""
    if not all(name.startswith("test_") for name in content):
        return content
    rows = list(content.values())
    if "recipe" in rows[0]:
        rows = in_order(rows)
    return {"device": "cpu", "versions": rows[0]["versions"], "rows": rows}


def documents() -> list[Path]:
    """Return README.md and the pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def fill_documents(results: Results) -> dict[Path, str]:
    """Return the text of each document that has tables, with each table made from the results.

    Raises ValueError if a table is in no document, or in several.
    """
    texts = {path: path.read_text() for path in documents()}
    for name in BLOCKS:
        marked = [path for path, text in texts.items() if f"<!-- {name} -->" in text]
        if len(marked) != 1:
            places = ", ".join(path.name for path in marked) or "none"
            raise ValueError(f"<!-- {name} --> belongs in one document, and is in {places}")
    return {path: fill(text, results) for path, text in texts.items() if MARK.search(text)}


def fill(text: str, results: Results) -> str:
    """Return a document's text with each of its tables made from the results.

    Raises ValueError if a mark has no end, or no table has its name.
    """
    for name in MARK.findall(text):
        start = f"<!-- {name} -->\n"
        end = f"<!-- end of {name} -->"
        if name not in BLOCKS or text.count(start) != 1 or text.count(end) != 1:
            raise ValueError(f"a table needs one {start.strip()} and one {end}")
        before, rest = text.split(start)
        after = rest.split(end)[1]
        text = f"{before}{start}{BLOCKS[name](results)}\n{end}{after}"
    return text


def whole(results: Results) -> str:
    """Return the text of results/README.md: every run."""
    parts = ["# Results", MADE_BY]
    parts += parity_section(results)
    parts += bytes_section(results)
    parts += planner_section(results)
    return "\n\n".join(parts) + "\n"


def parity_section(results: Results) -> list[str]:
    """Return every run of evidence/test_parity.py."""
    measured = results["parity"]
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    about = ABOUT_PARITY.format(device=measured["device"], versions=versions)
    return ["# Parity", about, tables(measured["rows"])]


def bytes_section(results: Results) -> list[str]:
    """Return the bytes that ranks held, by kind of weights."""
    parts = ["# Bytes", ABOUT_BYTES]
    for weights in WEIGHTS:
        parts += [f"## {weights}", bytes_block(results, weights)]
    return parts


def planner_section(results: Results) -> list[str]:
    """Return the errors of the planner, run by run."""
    tracked = tracked_table(results["planner_ranks"]["rows"])
    shapes = shapes_table(results["planner"]["cells"])
    return ["# Memory planner", ABOUT_RANKS, tracked, ABOUT_SHAPES, shapes]
