# SPDX-License-Identifier: Apache-2.0
"""What a repository is expected to have: a license, a workflow, and one version in all places."""

import re

import pytest
import yaml

from core import __version__
from launching import REPO

SPDX = "# SPDX-License-Identifier: Apache-2.0"
CODE = ["recipes", "scripts", "tests", "accelerate_configs", ".github", ".ci"]
SUFFIXES = (".py", ".yaml", ".yml", ".sh")


def test_the_workflow_runs_what_the_readme_names():
    workflow = yaml.safe_load((REPO / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step.get("run") for step in workflow["jobs"]["test"]["steps"]]
    assert commands[-1] == ".ci/run" and (REPO / ".ci" / "run").stat().st_mode & 0o100
    assert workflow["permissions"] == {"contents": "read"}


def test_changelog_and_citation_name_the_version_and_the_license():
    heading = re.search(r"^## (\S+)", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading[1] == __version__
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (__version__, "Apache-2.0")
    assert "Apache License\n" in (REPO / "LICENSE").read_text()


@pytest.mark.parametrize("folder", CODE)
def test_every_file_of_code_names_its_license_first(folder):
    paths = [path for path in (REPO / folder).rglob("*") if path.suffix in SUFFIXES]
    assert paths or folder == ".ci"
    for path in [*paths, REPO / ".ci" / "run"]:
        lines = path.read_text().splitlines()
        first = lines[1] if lines[0].startswith("#!") else lines[0]
        assert first == SPDX, path.relative_to(REPO)
