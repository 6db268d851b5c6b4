# SPDX-License-Identifier: Apache-2.0
"""What documents show is what results/ says: their tables, and that pictures are shown.

tests/launch/test_pictures.py draws them again, which takes seconds.
"""

import re

import pytest

import pictures
import tables
from launching import REPO

DOCUMENTS = [REPO / "README.md", *REPO.glob("results/*.md"), *sorted(REPO.glob("docs/*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_tables_of_a_document_are_made_from_the_results(path):
    assert tables.filled(path.read_text()) == path.read_text(), "python evidence/tables.py"


def test_each_table_is_in_one_document():
    marks = []
    for path in DOCUMENTS:
        marks += re.findall(r"^<!-- (?!end of )(\w+) -->$", path.read_text(), re.MULTILINE)
    assert sorted(marks) == sorted(tables.BLOCKS)


def test_each_picture_is_shown_and_no_other_is_committed():
    committed = {path.stem for path in (REPO / "docs" / "pictures").iterdir()}
    shown = set()
    for path in DOCUMENTS:
        shown |= set(re.findall(r"\]\(\S*pictures/(\w+)\.svg\)", path.read_text()))
    assert committed == shown == set(pictures.PICTURES)
