# SPDX-License-Identifier: Apache-2.0
"""Each fault that evidence/test_planted_faults.py plants is an edit of what is there."""

import pytest

import test_planted_faults as planted
from launching import REPO


@pytest.mark.parametrize("name", planted.FAULTS)
def test_what_it_edits_is_there_once(name):
    text = (REPO / planted.FAULTS[name][0]).read_text()
    assert [before for before, _ in planted.edits_of(name) if text.count(before) != 1] == []
