# SPDX-License-Identifier: Apache-2.0
"""The version is stated in one place; tests/launch/test_slow_imports.py has commands print it."""

import re

import yaml

from core import __version__
from launching import REPO


def test_the_changelog_begins_with_it():
    heading = re.search(r"^## (\S+)", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading[1] == __version__


def test_the_citation_names_it_and_the_license():
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (__version__, "Apache-2.0")
    assert "Apache License\n" in (REPO / "LICENSE").read_text()
