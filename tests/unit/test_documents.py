# SPDX-License-Identifier: Apache-2.0
"""The documents name what is there: their links, pictures, recipes and YAML files exist."""

import json
import re
from pathlib import Path

import pytest
import yaml

from launching import REPO

DOCS = REPO / "docs"
PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
README_LINES = 150  # most lines of the README, its tables included: what is longer belongs in docs/


def without_code(text):
    """The text of a document without blocks and spans of code, which hold no links."""
    return re.sub(
        r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    )


def links_of(text):
    """The targets of links in a document that are files or anchors."""
    found = re.findall(r"\]\(([^)\s]+)\)", without_code(text))
    return [target for target in found if not target.startswith(("https://", "http://"))]


def anchors_of(text):
    """The anchors of the headings, as GitHub and MkDocs both make them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page, text):
    """The links of a page whose file or anchor does not exist."""
    broken = []
    for link in links_of(text):
        name, _, anchor = link.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in anchors_of(path.read_text())):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_link_and_anchor_exists(page):
    assert broken_links(page, page.read_text()) == []


def test_the_readme_tells_what_the_quick_start_measured():
    text = (REPO / "README.md").read_text()
    rows = json.loads((REPO / "results" / "quickstarts.json").read_text())
    llama = rows["test_quickstart[llama]"]
    assert f"then {llama['seconds']:.0f} s on two CPU cores" in text
    assert f"rises from {llama['before']:.0f} to {llama['after']:.2f}" in text


def test_the_readme_tells_what_the_gpu_showed():
    text = " ".join((REPO / "README.md").read_text().split())
    measured = json.loads((REPO / "results" / "gpu" / "side_by_side.json").read_text())
    rows = {}
    for kind in ("lora", "qlora"):
        found = measured[f"test_side_by_side[8b_{kind}]"]["rows"]
        rows[kind] = {row["what"]: row for row in found}
    speeds = {name: f"{row['tokens/s']:,.0f}" for name, row in rows["lora"].items()}
    assert f"ran at {speeds['this recipe']} tokens per second" in text
    assert (
        f"with Trainer at {speeds['Trainer']} and with SFTTrainer at {speeds['SFTTrainer']}" in text
    )
    ours = rows["qlora"]["this recipe"]
    planned = f"planned as {ours['planned, GiB']:.1f}"
    assert f"takes {ours['allocated, GiB']:.1f} GiB of tensors, {planned}" in text


def test_the_readme_stays_short():
    assert len((REPO / "README.md").read_text().splitlines()) <= README_LINES


def test_the_readme_leads_to_each_page():
    linked = {Path(link).name for link in links_of((REPO / "README.md").read_text())}
    pages = {page.name for page in DOCS.glob("*.md")} - {"index.md"}
    assert pages <= linked


def pages_of(entries):
    """The pages in a navigation of MkDocs, in their order."""
    pages = []
    for entry in entries:
        for value in entry.values():
            pages += [value] if isinstance(value, str) else pages_of(value)
    return pages


def test_each_page_is_in_the_navigation_of_the_site():
    site = yaml.safe_load((REPO / "mkdocs.yml").read_text())
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert sorted(pages_of(site["nav"])) == sorted(pages)
    assert site["strict"] and site["theme"]["font"] is False


def test_each_recipe_has_its_row():
    text = (REPO / "README.md").read_text()
    rows = set(re.findall(r"^\| `recipes/(\w+\.py)` \|", text, re.MULTILINE))
    assert rows == {path.name for path in (REPO / "recipes").glob("*.py")}


def test_each_yaml_has_its_row():
    table = re.findall(r"^\| `.*", (DOCS / "strategies.md").read_text(), re.MULTILINE)
    named = {name for row in table for name in re.findall(r"`(\w+\.yaml)`", row.split(" | ")[0])}
    assert named == {path.name for path in (REPO / "accelerate_configs").glob("*.yaml")}
