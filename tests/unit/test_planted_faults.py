# SPDX-License-Identifier: Apache-2.0
"""Each fault that evidence/planted_faults.py plants is an edit of what is there."""

import pytest

from launching import REPO
from planted_faults import FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_what_it_edits_is_there_once(fault):
    text = (REPO / fault.file).read_text()
    assert [before for before, _ in fault.edits if text.count(before) != 1] == []
